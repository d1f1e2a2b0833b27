// RMS norm of rows: one pass over memory forward, one backward.

#include <pybind11/pybind11.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

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

constexpr int64_t kRows = 256;  // rows whose gradients of the weight are summed in float
constexpr int64_t kWorthThreads = 1 << 16;  // elements from which a second thread pays

// A (rows, columns) tensor of float32 with contiguous rows.
TensorView rows_of(const py::handle& tensor, int64_t rows, int64_t columns) {
  TensorView view;
  if (!read_rows(tensor, rows, view) || view.size[1] != columns)
    throw py::value_error("rms_norm: a tensor does not fit");
  return view;
}

float* row(const TensorView& view, int64_t r) {
  return reinterpret_cast<float*>(view.data) + r * view.stride[0];
}

// `count` neighbouring numbers; null for None.
float* vector_of(const py::handle& tensor, int64_t count) {
  if (tensor.is_none()) return nullptr;
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dims == 1 &&
                    view.dtype == Dtype::float32 && view.size[0] == count && unit_stride(view);
  if (!read) throw py::value_error("rms_norm: a vector does not fit");
  return reinterpret_cast<float*>(view.data);
}

TensorView shape_of(const py::handle& tensor) {
  TensorView view;
  if (!TensorReader::get().read(tensor.ptr(), view) || view.dims != 2)
    throw py::value_error("rms_norm: a tensor does not fit");
  return view;
}

template <class Function>
void each_block(int64_t rows, int64_t columns, int threads, const Function& function) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  if (blocks <= 1 || rows * columns < kWorthThreads) threads = 1;
  parallel_dynamic(threads, blocks, [&](int64_t i, int) {
    function(i, i * kRows, std::min(rows, (i + 1) * kRows));
  });
}

// `inverse`: one number per row, or None.
void forward(const py::handle& x, const py::handle& weight, float eps, const py::handle& out,
             const py::handle& inverse, int threads) {
  const TensorView xs = shape_of(x);
  const int64_t rows = xs.size[0], columns = xs.size[1];
  rows_of(x, rows, columns);
  const TensorView to = rows_of(out, rows, columns);
  const float* const w = vector_of(weight, columns);
  float* const kept = vector_of(inverse, rows);
  const py::gil_scoped_release release;
  each_block(rows, columns, threads, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float found = RECAST_CHOOSE(forward)(row(xs, r), w, columns, eps, row(to, r));
      if (kept != nullptr) kept[r] = found;
    }
  });
}

// `of_x`: like x, or None; `of_weight`: (columns,), or None.
void backward(const py::handle& grad, const py::handle& x, const py::handle& weight,
              const py::handle& inverse, const py::handle& of_x, const py::handle& of_weight,
              int threads) {
  const TensorView xs = shape_of(x);
  const int64_t rows = xs.size[0], columns = xs.size[1];
  rows_of(x, rows, columns);
  const TensorView gs = rows_of(grad, rows, columns);
  const float* const w = vector_of(weight, columns);
  const float* const kept = vector_of(inverse, rows);
  TensorView into;
  if (!of_x.is_none()) into = rows_of(of_x, rows, columns);
  float* const sums = vector_of(of_weight, columns);
  if (kept == nullptr) throw py::value_error("rms_norm: the inverse roots are missing");
  const py::gil_scoped_release release;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  std::vector<float> found(sums == nullptr ? 0 : static_cast<size_t>(blocks * columns), 0.0f);
  each_block(rows, columns, threads, [&](int64_t block, int64_t first, int64_t last) {
    float* const part = sums == nullptr ? nullptr : found.data() + block * columns;
    for (int64_t r = first; r < last; ++r) RECAST_CHOOSE(backward)
    (row(gs, r), row(xs, r), w, kept[r], columns, into.data == nullptr ? nullptr : row(into, r),
     part);
  });
  if (sums == nullptr) return;
  for (int64_t c = 0; c < columns; ++c) {
    double sum = 0.0;
    for (int64_t i = 0; i < blocks; ++i) sum += found[static_cast<size_t>(i * columns + c)];
    sums[c] = static_cast<float>(sum);
  }
}

}  // namespace
}  // namespace recast::rms_norm

void bind_rms_norm(py::module_& m) {
  m.def("rms_norm_forward", &recast::rms_norm::forward);
  m.def("rms_norm_backward", &recast::rms_norm::backward);
}
