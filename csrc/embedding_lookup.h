// One lookup as requested: its table, ids, offsets and weights, and whether the kernels can read
// them in place.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor.h"

namespace recast::embedding {

enum class Mode { sum, mean, max, none };

enum class Format { float32, float16, bfloat16, int8, int4 };

struct Lookup {
  TensorView table, ids, offsets, weights;
  Mode mode;
  Format format;
  Dtype out_dtype;
  int64_t dim;
  bool has_offsets, has_weights;
  int64_t padding;  // -1: none
  int64_t bags;
  int64_t fixed;  // ids per bag without offsets
  int64_t count;  // ids
  // Without offsets, id i of bag b is at b * outer + i * inner; with offsets id i is at i * inner.
  int64_t outer, inner, weights_outer, weights_inner;
  char* out;
  int64_t out_stride;  // bytes from the row of one bag to that of the next
  int64_t* winner;

  int64_t used_bytes() const {
    switch (format) {
      case Format::float32:
        return dim * 4;
      case Format::int8:
        return dim + 8;
      case Format::int4:
        return (dim + 1) / 2 + 4;
      default:
        return dim * 2;
    }
  }
  int64_t element_bytes() const {
    if (table.dtype == Dtype::uint8) return 1;
    return table.dtype == Dtype::float32 ? 4 : 2;
  }
  int64_t out_bytes() const { return dim * (out_dtype == Dtype::float32 ? 4 : 2); }
};

// The lookups of one call, read from Python but not run yet. Another kernel may take them and read
// the rows itself.
struct Lookups {
  std::vector<Lookup> lookups;
};

inline int64_t load(const TensorView& ints, int64_t place) {
  return ints.dtype == Dtype::int64 ? reinterpret_cast<const int64_t*>(ints.data)[place]
                                    : reinterpret_cast<const int32_t*>(ints.data)[place];
}

inline bool is_int(const TensorView& view) {
  return view.dtype == Dtype::int64 || view.dtype == Dtype::int32;
}

// The stride with which a tensor of any dimensions is one run of elements; false if it is none.
inline bool flat_stride(const TensorView& view, int64_t& stride) {
  stride = 1;
  bool innermost = true;
  int64_t expected = 0;  // 0 too where an expanded dimension repeats one element
  for (int d = view.dims - 1; d >= 0; --d) {
    if (view.size[d] == 1) continue;
    if (innermost) {
      stride = view.stride[d];
    } else if (view.stride[d] != expected) {
      return false;
    }
    innermost = false;
    expected = view.stride[d] * view.size[d];
  }
  return true;
}

// The format and width of a table whose outputs are float32 whatever its storage.
struct Packed {
  Format format;
  int64_t dim;
};

// Fills in the format of the table: without `packed`, that of its dtype. False when the kernels do
// not read it.
inline bool read_format(Lookup& lookup, const Packed* packed) {
  const TensorView& table = lookup.table;
  if (table.dims != 2 || (table.size[1] > 1 && table.stride[1] != 1)) return false;
  lookup.dim = table.size[1];
  switch (table.dtype) {
    case Dtype::float32:
      lookup.format = Format::float32;
      break;
    case Dtype::float16:
      lookup.format = Format::float16;
      break;
    case Dtype::bfloat16:
      lookup.format = Format::bfloat16;
      break;
    case Dtype::uint8:
      if (packed == nullptr) return false;
      lookup.format = packed->format;
      lookup.dim = packed->dim;
      break;
    default:
      return false;
  }
  lookup.out_dtype = packed != nullptr ? Dtype::float32 : table.dtype;
  if (packed == nullptr) return true;
  const bool bytes = lookup.format == Format::int8 || lookup.format == Format::int4;
  return packed->format == lookup.format && packed->dim == lookup.dim &&
         (!bytes || (table.dtype == Dtype::uint8 && table.size[1] == lookup.used_bytes()));
}

// Fills in `lookup`; false when the kernels do not take it, or it is invalid: Python says why.
inline bool prepare(Lookup& lookup, int64_t padding, bool last_is_end) {
  const TensorView &table = lookup.table, &ids = lookup.ids;
  if (!is_int(ids)) return false;
  const int64_t rows = table.size[0];
  if (padding != INT64_MIN && (padding < -rows || padding >= rows)) return false;
  lookup.padding = padding == INT64_MIN ? -1 : padding < 0 ? padding + rows : padding;
  lookup.count = ids.numel();
  lookup.weights_outer = lookup.weights_inner = 0;
  if (lookup.has_weights) {
    if (lookup.mode != Mode::sum || lookup.weights.dtype != lookup.out_dtype) return false;
    if (lookup.weights.dims != ids.dims) return false;
    for (int d = 0; d < ids.dims; ++d)
      if (lookup.weights.size[d] != ids.size[d]) return false;
  }
  if (lookup.mode == Mode::none) {
    lookup.padding = -1;
    lookup.bags = lookup.count;
    lookup.fixed = 1;
    lookup.inner = 0;
    return !lookup.has_offsets && flat_stride(ids, lookup.outer);
  }
  if (lookup.has_offsets) {
    const TensorView& offsets = lookup.offsets;
    if (ids.dims != 1 || offsets.dims != 1 || !is_int(offsets)) return false;
    lookup.bags = offsets.size[0] - (last_is_end ? 1 : 0);
    lookup.fixed = lookup.outer = 0;
    lookup.inner = ids.stride[0];
    if (lookup.has_weights) lookup.weights_inner = lookup.weights.stride[0];
    return lookup.bags >= 0;
  }
  if (ids.dims != 2) return false;
  lookup.bags = ids.size[0];
  lookup.fixed = ids.size[1];
  lookup.outer = ids.stride[0];
  lookup.inner = ids.stride[1];
  if (lookup.has_weights) {
    lookup.weights_outer = lookup.weights.stride[0];
    lookup.weights_inner = lookup.weights.stride[1];
  }
  return true;
}

// Whether every bag is one float32 row, unchanged, and all lookups have equal numbers of bags and
// one width.
inline bool gives_rows(const Lookups& step) {
  for (const Lookup& lookup : step.lookups) {
    const Lookup& first = step.lookups[0];
    if (lookup.format != Format::float32 || lookup.out_dtype != Dtype::float32) return false;
    if (lookup.has_offsets || lookup.has_weights || lookup.padding >= 0) return false;
    if (lookup.fixed != 1 || lookup.bags != first.bags || lookup.dim != first.dim) return false;
    if (lookup.mode == Mode::none && lookup.ids.dims != 1) return false;
  }
  return !step.lookups.empty();
}

// The place of the first id outside the table, or -1; for lookups that give rows.
template <class Id>
int64_t first_wrong_of(const Lookup& lookup) {
  const auto* ids = reinterpret_cast<const Id*>(lookup.ids.data);
  const auto rows = static_cast<uint64_t>(lookup.table.size[0]);
  bool good = true;
  for (int64_t b = 0; b < lookup.bags; ++b)
    good &= static_cast<uint64_t>(int64_t{ids[b * lookup.outer]}) < rows;
  if (good) return -1;
  int64_t b = 0;
  while (static_cast<uint64_t>(int64_t{ids[b * lookup.outer]}) < rows) ++b;
  return b;
}

inline int64_t first_wrong(const Lookup& lookup) {
  return lookup.ids.dtype == Dtype::int64 ? first_wrong_of<int64_t>(lookup)
                                          : first_wrong_of<int32_t>(lookup);
}

}  // namespace recast::embedding
