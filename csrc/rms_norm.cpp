// RMS norm of rows: one pass over memory forward, one backward.

#include <pybind11/pybind11.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <vector>

#include "isa.h"
#include "row_blocks.h"

namespace py = pybind11;

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "rms_norm_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::rms_norm {
namespace {

constexpr char kOp[] = "rms_norm";

// `count` neighbouring numbers; null for None.
float* vector_of(const py::handle& tensor, int64_t count) {
  if (tensor.is_none()) return nullptr;
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dims == 1 &&
                    view.dtype == Dtype::float32 && view.size[0] == count && unit_stride(view);
  if (!read) throw py::value_error("rms_norm: a vector does not fit");
  return reinterpret_cast<float*>(view.data);
}

// `inverse`: one number per row, or None.
void forward(const py::handle& x, const py::handle& weight, float eps, const py::handle& out,
             const py::handle& inverse, int threads) {
  const TensorView xs = matrix_of(kOp, x);
  const int64_t rows = xs.size[0], columns = xs.size[1];
  const TensorView to = matrix_of(kOp, out, rows, columns);
  const float* const w = vector_of(weight, columns);
  float* const kept = vector_of(inverse, rows);
  const py::gil_scoped_release release;
  each_row_block(rows, columns, threads, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float found = RECAST_CHOOSE(forward)(row_of(xs, r), w, columns, eps, row_of(to, r));
      if (kept != nullptr) kept[r] = found;
    }
  });
}

// `of_x`: like x, or None; `of_weight`: (columns,), or None.
void backward(const py::handle& grad, const py::handle& x, const py::handle& weight,
              const py::handle& inverse, const py::handle& of_x, const py::handle& of_weight,
              int threads) {
  const TensorView xs = matrix_of(kOp, x);
  const int64_t rows = xs.size[0], columns = xs.size[1];
  const TensorView gs = matrix_of(kOp, grad, rows, columns);
  const float* const w = vector_of(weight, columns);
  const float* const kept = vector_of(inverse, rows);
  TensorView into;
  if (!of_x.is_none()) into = matrix_of(kOp, of_x, rows, columns);
  float* const sums = vector_of(of_weight, columns);
  if (kept == nullptr) throw py::value_error("rms_norm: the inverse roots are missing");
  const py::gil_scoped_release release;
  const int64_t kept_sums = sums == nullptr ? 0 : row_blocks(rows) * columns;
  std::vector<float> found(static_cast<size_t>(kept_sums), 0.0f);
  each_row_block(rows, columns, threads, [&](int64_t block, int64_t first, int64_t last) {
    float* const part = sums == nullptr ? nullptr : found.data() + block * columns;
    for (int64_t r = first; r < last; ++r) RECAST_CHOOSE(backward)
    (row_of(gs, r), row_of(xs, r), w, kept[r], columns,
     into.data == nullptr ? nullptr : row_of(into, r), part);
  });
  if (sums != nullptr) sum_blocks(found, columns, sums);
}

}  // namespace
}  // namespace recast::rms_norm

void bind_rms_norm(py::module_& m) {
  m.def("rms_norm_forward", &recast::rms_norm::forward);
  m.def("rms_norm_backward", &recast::rms_norm::backward);
}
