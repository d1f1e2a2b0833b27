// Stacks of rows: lookups of one id per bag whose rows are written side by side. All lookups of a
// few bags take turns, so that ids that are columns of one matrix are read, and rows written, in
// the order of memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "embedding_lookup.h"

namespace recast::embedding {

// Rows whose addresses are found, and which are requested, before the first of them is copied.
constexpr int64_t kRowsAhead = 256;
// Bytes of tables above which one lookup after the other is faster: taking turns, hardly a row is
// on a page whose address is at hand. On a Xeon, for 2048 bags of 39 tables of 16 columns, turns
// took 1.1, 2.0 and 5.1 ms with tables of 5, 25 and 250 MB in all; one after the other 1.7, 2.1
// and 3.8.
constexpr int64_t kMostBytes = 1 << 25;

// Whether a lookup copies one row of its table, as it is, for each bag.
inline bool copies_rows(const Lookup& lookup) {
  const bool one = !lookup.has_offsets && lookup.fixed == 1 && lookup.padding < 0;
  const bool same = lookup.used_bytes() == lookup.out_bytes() && lookup.format != Format::int8 &&
                    lookup.format != Format::int4;
  return one && same && !lookup.has_weights && lookup.mode != Mode::max;
}

// Whether all lookups of a stack copy rows, of tables so small that taking turns is faster.
inline bool takes_turns(const std::vector<Lookup>& lookups, const std::vector<size_t>& stack) {
  int64_t bytes = 0;
  for (const size_t k : stack) {
    const Lookup& lookup = lookups[k];
    if (!copies_rows(lookup)) return false;
    bytes += lookup.table.size[0] * lookup.table.stride[0] * lookup.element_bytes();
  }
  return bytes <= kMostBytes;
}

// The addresses of the rows of bags [first, last), bag by bag, for lookup number `k` of `count`;
// false if an id is outside the table.
template <class Id>
bool find_rows(const Lookup& lookup, int64_t first, int64_t last, size_t k, size_t count,
               std::vector<const char*>& found) {
  const auto* ids = reinterpret_cast<const Id*>(lookup.ids.data) + first * lookup.outer;
  const auto rows = static_cast<uint64_t>(lookup.table.size[0]);
  const int64_t row_bytes = lookup.table.stride[0] * lookup.element_bytes();
  const int64_t bytes = lookup.out_bytes();
  const char** place = found.data() + k;
  for (int64_t b = 0; b < last - first; ++b, place += count) {
    const auto id = static_cast<int64_t>(ids[b * lookup.outer]);
    if (static_cast<uint64_t>(id) >= rows) return false;
    const char* row = lookup.table.data + id * row_bytes;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    *place = row;
  }
  return true;
}

template <int Bytes>
void copy_rows_of(const std::vector<const char*>& rows, int64_t count, char* out) {
  for (int64_t i = 0; i < count; ++i, out += Bytes) std::memcpy(out, rows[i], Bytes);
}

inline void copy_rows(const std::vector<const char*>& rows, int64_t count, int64_t bytes,
                      char* out) {
  switch (bytes) {
    case 4:
      return copy_rows_of<4>(rows, count, out);
    case 16:
      return copy_rows_of<16>(rows, count, out);
    case 32:
      return copy_rows_of<32>(rows, count, out);
    case 64:
      return copy_rows_of<64>(rows, count, out);
    case 128:
      return copy_rows_of<128>(rows, count, out);
    case 256:
      return copy_rows_of<256>(rows, count, out);
    default:
      for (int64_t i = 0; i < count; ++i, out += bytes)
        std::memcpy(out, rows[i], static_cast<size_t>(bytes));
  }
}

// Copies the rows of bags [first, last) of the lookups at `places`; false if an id is outside its
// table.
inline bool copy_stack(const std::vector<Lookup>& lookups, const std::vector<size_t>& places,
                       int64_t first, int64_t last) {
  static thread_local std::vector<const char*> now, next;
  const Lookup& lead = lookups[places[0]];
  const auto count = static_cast<int64_t>(places.size());
  const int64_t step = std::max<int64_t>(1, kRowsAhead / count);
  const auto find = [&](int64_t from) {
    const int64_t to = std::min(from + step, last);
    next.resize(static_cast<size_t>((to - from) * count));
    for (size_t k = 0; k < places.size(); ++k) {
      const Lookup& lookup = lookups[places[k]];
      const bool good = lookup.ids.dtype == Dtype::int64
                            ? find_rows<int64_t>(lookup, from, to, k, places.size(), next)
                            : find_rows<int32_t>(lookup, from, to, k, places.size(), next);
      if (!good) return false;
    }
    return true;
  };
  if (first < last && !find(first)) return false;
  for (int64_t from = first; from < last; from += step) {
    std::swap(now, next);
    if (from + step < last && !find(from + step)) return false;
    copy_rows(now, static_cast<int64_t>(now.size()), lead.out_bytes(),
              lead.out + from * lead.out_stride);
  }
  return true;
}

}  // namespace recast::embedding
