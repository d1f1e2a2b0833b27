// Dot interaction, one sample or a few at a time. Features are read in place, without a
// concatenation; they may also be rows of embedding tables.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "embedding_lookup.h"
#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::dot {

// Which elements of Z are wanted: a triangle in row-major order, or a list of places.
enum class Pairs { lower, lower_self, upper, any };

// Columns of T transposed at a time: the block stays in L1 / L2.
constexpr int64_t kDims = 128;
constexpr int kTogether = 8;     // samples in a group, when several are processed at once
constexpr int64_t kTurned = 16;  // columns of a group at a time: all features stay in L1

// Feature rows of the next samples, to be prefetched.
struct Coming {
  const float* const* rows;
  int64_t count;
};

struct Shape {
  int64_t features, dim;
  int64_t stride;  // features rounded up to whole registers
  Pairs pairs;
  int64_t count;          // pairs
  const int64_t* place;   // of pair p in the lower half of Z (i >= j), row-major with `stride`
  const int64_t* mirror;  // of pair p in the upper half
  const float* zeros;     // at least kDims + 16 of them
};

}  // namespace recast::dot

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's own _mm512_undefined_ps()
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define RECAST_KERNEL "dot_interaction_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::dot {
namespace {

// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

struct Block {
  char* data;
  int64_t count;  // feature rows of this tensor
  int64_t batch_stride, feature_stride;
  const embedding::Lookup* lookup = nullptr;  // if set, the rows are looked up in a table
};

// The pairs of an interaction, classified once per call.
struct PairList {
  Pairs kind = Pairs::any;
  std::vector<int64_t> place, mirror;
  int64_t count = 0;
};

int64_t load(const TensorView& ints, int64_t p) {
  return reinterpret_cast<int64_t*>(ints.data)[p * ints.stride[0]];
}

bool is_triangle(const TensorView& li, const TensorView& lj, int64_t n, Pairs kind) {
  int64_t p = 0;
  const int64_t count = li.size[0];
  const int64_t wanted = kind == Pairs::lower_self ? n * (n + 1) / 2 : n * (n - 1) / 2;
  if (count != wanted) return false;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = kind == Pairs::upper ? i + 1 : 0;
    const int64_t end = kind == Pairs::upper ? n : kind == Pairs::lower ? i : i + 1;
    for (int64_t j = begin; j < end; ++j, ++p)
      if (load(li, p) != i || load(lj, p) != j) return false;
  }
  return true;
}

// False when a pair names a feature that does not exist.
bool read_pairs(const TensorView& li, const TensorView& lj, int64_t n, int64_t stride,
                PairList& pairs) {
  pairs.count = li.size[0];
  for (const Pairs kind : {Pairs::lower, Pairs::lower_self, Pairs::upper})
    if (is_triangle(li, lj, n, kind)) {
      pairs.kind = kind;
      return true;
    }
  for (int64_t p = 0; p < pairs.count; ++p) {
    int64_t i = load(li, p), j = load(lj, p);
    i = i < 0 ? i + n : i;
    j = j < 0 ? j + n : j;
    if (i < 0 || j < 0 || i >= n || j >= n) return false;
    pairs.place.push_back(std::max(i, j) * stride + std::min(i, j));
    pairs.mirror.push_back(std::min(i, j) * stride + std::max(i, j));
  }
  return true;
}

// The lookups in an object, whose rows are the features; null when it holds none.
const embedding::Lookups* as_lookups(const py::handle& object) {
  static const auto* type =
      reinterpret_cast<PyTypeObject*>(py::type::of<embedding::Lookups>().release().ptr());
  if (PyObject_TypeCheck(object.ptr(), const_cast<PyTypeObject*>(type)) == 0) return nullptr;
  return object.cast<const embedding::Lookups*>();
}

// Reads a list of (B, D) or (B, f, D) tensors, or lookups; false when the kernels do not take them.
bool read_blocks(const py::list& tensors, int64_t& batch, int64_t& dim, int64_t& features,
                 std::vector<Block>& blocks) {
  const TensorReader& reader = TensorReader::get();
  features = 0;
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (const auto* step = as_lookups(tensors[k])) {
      if (!embedding::gives_rows(*step)) return false;
      if (k == 0) {
        batch = step->lookups[0].bags;
        dim = step->lookups[0].dim;
      }
      if (step->lookups[0].bags != batch || step->lookups[0].dim != dim) return false;
      for (const embedding::Lookup& lookup : step->lookups)
        blocks.push_back({lookup.table.data, 1, 0, 0, &lookup});
      features += static_cast<int64_t>(step->lookups.size());
      continue;
    }
    TensorView view;
    if (!reader.read(tensors[k].ptr(), view) || view.dtype != Dtype::float32) return false;
    if (view.dims != 2 && view.dims != 3) return false;
    const int last = view.dims - 1;
    if (k == 0) {
      batch = view.size[0];
      dim = view.size[last];
    }
    if (view.size[0] != batch || view.size[last] != dim) return false;
    if (!unit_stride(view)) return false;
    const int64_t count = view.dims == 3 ? view.size[1] : 1;
    blocks.push_back({view.data, count, view.stride[0], view.dims == 3 ? view.stride[1] : 0});
    features += count;
  }
  return features > 0;
}

bool is_index(const TensorView& view) { return view.dtype == Dtype::int64 && view.dims == 1; }

class Interaction {
 public:
  // Null when the kernels do not take these arguments.
  static std::unique_ptr<Interaction> make(const py::list& features, const py::object& dense,
                                           const py::handle& li, const py::handle& lj) {
    auto self = std::make_unique<Interaction>();
    const TensorReader& reader = TensorReader::get();
    if (!read_blocks(features, self->batch_, self->dim_, self->features_, self->blocks_))
      return nullptr;
    TensorView first, second;
    if (!reader.read(li.ptr(), first) || !reader.read(lj.ptr(), second)) return nullptr;
    if (!is_index(first) || !is_index(second) || first.size[0] != second.size[0]) return nullptr;
    self->has_dense_ = !dense.is_none();
    if (self->has_dense_ && !read_rows(dense, self->batch_, self->dense_)) return nullptr;
    self->stride_ = (self->features_ + 15) / 16 * 16;
    if (!read_pairs(first, second, self->features_, self->stride_, self->pairs_)) return nullptr;
    return self;
  }

  int64_t dense_width() const { return has_dense_ ? dense_.size[1] : 0; }

  void forward(const py::handle& result, int threads) const {
    TensorView out;
    if (!read_rows(result, batch_, out) || out.size[1] < dense_width() + pairs_.count)
      throw py::value_error("dot_interaction: the output does not fit");
    const py::gil_scoped_release release;
    const int64_t width = dense_width(), end = width + pairs_.count;
    auto* const whole = reinterpret_cast<float*>(out.data);
    const int64_t together = pairs_.kind == Pairs::any ? 1 : RECAST_CHOOSE(together)();
    each_group(
        threads, together,
        [&](const Shape& shape, int64_t b, int64_t count, const float* const* rows,
            const Coming& coming, Scratch& scratch) {
          float* row = whole + b * out.stride[0];
          for (int64_t s = 0; s < count; ++s, row += out.stride[0]) {
            if (width > 0)
              std::memcpy(row,
                          reinterpret_cast<const float*>(dense_.data) + (b + s) * dense_.stride[0],
                          static_cast<size_t>(width) * sizeof(float));
            if (together == 1 || count < together)
              RECAST_CHOOSE(forward)(shape, rows + s * features_, scratch.z.data(),
                                     scratch.columns.data(), row + width);
            std::fill(row + end, row + out.size[1], 0.0f);
          }
          if (together > 1 && count == together)
            RECAST_CHOOSE(forward_together)(shape, rows, coming, scratch.columns.data(),
                                            scratch.z.data(), whole + b * out.stride[0] + width,
                                            out.stride[0]);
        });
  }

  // `into`: (B, F, D), the gradients of all feature rows; the dense columns of `upstream` are added
  // to that of feature `dense_at`, unless it is negative.
  void backward(const py::handle& upstream, const py::list& into, int64_t dense_at,
                int threads) const {
    TensorView grad;
    std::vector<Block> gradients;
    int64_t batch = 0, dim = 0, features = 0;
    if (!read_rows(upstream, batch_, grad) || !read_blocks(into, batch, dim, features, gradients) ||
        batch != batch_ || dim != dim_ || features != features_)
      throw py::value_error("dot_interaction: a gradient does not fit");
    const py::gil_scoped_release release;
    each_group(threads, 1,
               [&](const Shape& shape, int64_t b, int64_t, const float* const* rows, const Coming&,
                   Scratch& scratch) {
                 const float* row = reinterpret_cast<const float*>(grad.data) + b * grad.stride[0];
                 point(gradients, b, scratch.into.data());
                 RECAST_CHOOSE(backward)(shape, row + dense_width(), rows, scratch.z.data(),
                                         scratch.into.data());
                 if (dense_at < 0) return;
                 float* sum = scratch.into[static_cast<size_t>(dense_at)];
                 for (int64_t c = 0; c < dense_width(); ++c) sum[c] += row[c];
               });
  }

 private:
  // Memory of one thread.
  struct Scratch {
    std::vector<float> z, columns;
    std::vector<const float*> rows, coming;
    std::vector<float*> into;
  };

  template <class Pointer>
  static void point(const std::vector<Block>& blocks, int64_t b, Pointer* rows) {
    for (const Block& block : blocks) {
      if (const auto* lookup = block.lookup) {
        const int64_t id = embedding::load(lookup->ids, b * lookup->outer);
        *rows++ = reinterpret_cast<float*>(block.data) + id * lookup->table.stride[0];
        continue;
      }
      auto* row = reinterpret_cast<float*>(block.data) + b * block.batch_stride;
      for (int64_t f = 0; f < block.count; ++f) *rows++ = row + f * block.feature_stride;
    }
  }

  // Prefetches rows, which lie scattered, before their turn comes.
  void fetch(const Coming& coming) const {
    for (int64_t r = 0; r < coming.count; ++r)
      for (int64_t c = 0; c < dim_; c += 16) __builtin_prefetch(coming.rows[r] + c, 0, 2);
  }

  // Calls `function` with `together` samples at a time, the last time with what is left.
  template <class Function>
  void each_group(int threads, int64_t together, const Function& function) const {
    static const std::vector<float> zeros(kDims + 32, 0.0f);
    const Shape shape{features_,
                      dim_,
                      stride_,
                      pairs_.kind,
                      pairs_.count,
                      pairs_.place.data(),
                      pairs_.mirror.data(),
                      zeros.data()};
    const auto run = [&](int64_t first, int64_t last) {
      static thread_local Scratch scratch;
      const auto n = static_cast<size_t>(features_), width = static_cast<size_t>(stride_);
      const auto many = static_cast<size_t>(together);
      const auto turned = together > 1 ? n * many * static_cast<size_t>(kTurned) : 0;
      scratch.z.resize(n * width * many);
      scratch.columns.resize(std::max(static_cast<size_t>(std::min(dim_, kDims)) * width, turned));
      scratch.rows.resize(n * many);
      scratch.coming.resize(n * many);
      scratch.into.resize(n);
      // Fills in the rows of the samples from b on; returns how many samples there are.
      const auto point_all = [&](int64_t b, std::vector<const float*>& rows) {
        const int64_t count = std::clamp<int64_t>(last - b, 0, together);
        for (int64_t s = 0; s < count; ++s) point(blocks_, b + s, rows.data() + s * features_);
        return count;
      };
      int64_t count = point_all(first, scratch.coming);
      fetch({scratch.coming.data(), count * features_});
      for (int64_t b = first; b < last; b += together) {
        scratch.rows.swap(scratch.coming);
        const int64_t here = count;
        count = point_all(b + here, scratch.coming);
        const Coming coming{scratch.coming.data(), count * features_};
        if (together == 1 || here < together) fetch(coming);
        function(shape, b, here, scratch.rows.data(), coming, scratch);
      }
    };
    const int64_t work = batch_ * features_ * features_ * dim_;
    if (threads <= 1 || batch_ <= together || work < kWorthThreads) return run(0, batch_);
    const int64_t groups = (batch_ + together - 1) / together;
    const int64_t pieces = std::min<int64_t>(groups, int64_t{threads} * 4);
    parallel_dynamic(threads, pieces, [&](int64_t i, int) {
      run(groups * i / pieces * together, std::min(groups * (i + 1) / pieces * together, batch_));
    });
  }

  int64_t batch_ = 0, dim_ = 0, features_ = 0, stride_ = 0;
  std::vector<Block> blocks_;
  bool has_dense_ = false;
  TensorView dense_;
  PairList pairs_;
};

}  // namespace
}  // namespace recast::dot

void bind_dot_interaction(py::module_& m) {
  using recast::dot::Interaction;
  py::class_<Interaction>(m, "DotInteraction")
      .def("forward", &Interaction::forward)
      .def("backward", &Interaction::backward);
  m.def("dot_interaction", &Interaction::make);
}
