// The activation Dice, element by element: one pass over memory forward, one backward.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

namespace py = pybind11;

#define RECAST_KERNEL "dice_kernel.h"
#include "each_isa.h"

namespace recast::dice {
namespace {

constexpr int64_t kRows = 256;  // rows whose gradients of alpha are summed in float, then in double
constexpr int64_t kWorthThreads = 1 << 16;  // elements from which a second thread pays

// A (rows, columns) tensor of float32 with contiguous rows.
TensorView rows_of(const py::handle& tensor, int64_t rows, int64_t columns) {
  TensorView view;
  if (!read_rows(tensor, rows, view) || view.size[1] != columns)
    throw py::value_error("dice: a tensor does not fit");
  return view;
}

const float* row(const TensorView& view, int64_t r) {
  return reinterpret_cast<const float*>(view.data) + r * view.stride[0];
}
float* row(TensorView& view, int64_t r) {
  return reinterpret_cast<float*>(view.data) + r * view.stride[0];
}

struct Alpha {
  const float* data;
  int64_t step;
};

Alpha alpha_of(const py::handle& tensor, int64_t columns) {
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dims == 1 &&
                    view.dtype == Dtype::float32 && unit_stride(view);
  if (!read || (view.size[0] != 1 && view.size[0] != columns))
    throw py::value_error("dice: alpha does not fit");
  return {reinterpret_cast<const float*>(view.data), view.size[0] == 1 ? 0 : 1};
}

template <class Function>
void each_block(int64_t rows, int64_t columns, int threads, const Function& function) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  if (blocks <= 1 || rows * columns < kWorthThreads) threads = 1;
  parallel_dynamic(threads, blocks, [&](int64_t i, int) {
    function(i, i * kRows, std::min(rows, (i + 1) * kRows));
  });
}

void forward(const py::handle& x, const py::handle& p, const py::handle& alpha,
             const py::handle& out, int threads) {
  TensorView to;
  if (!TensorReader::get().read(out.ptr(), to) || to.dims != 2)
    throw py::value_error("dice: a tensor does not fit");
  const int64_t rows = to.size[0], columns = to.size[1];
  to = rows_of(out, rows, columns);
  const TensorView xs = rows_of(x, rows, columns), ps = rows_of(p, rows, columns);
  const Alpha a = alpha_of(alpha, columns);
  const py::gil_scoped_release release;
  each_block(rows, columns, threads, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      RECAST_CHOOSE(forward)(row(xs, r), row(ps, r), a.data, a.step, columns, row(to, r));
  });
}

// `of_alpha`: (1, columns).
void backward(const py::handle& grad, const py::handle& x, const py::handle& p,
              const py::handle& alpha, const py::handle& of_x, const py::handle& of_gate,
              const py::handle& of_alpha, int threads) {
  TensorView into;
  if (!TensorReader::get().read(of_x.ptr(), into) || into.dims != 2)
    throw py::value_error("dice: a tensor does not fit");
  const int64_t rows = into.size[0], columns = into.size[1];
  into = rows_of(of_x, rows, columns);
  TensorView gate = rows_of(of_gate, rows, columns);
  TensorView sums = rows_of(of_alpha, 1, columns);
  const TensorView gs = rows_of(grad, rows, columns), xs = rows_of(x, rows, columns),
                   ps = rows_of(p, rows, columns);
  const Alpha a = alpha_of(alpha, columns);
  const py::gil_scoped_release release;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  std::vector<float> found(static_cast<size_t>(blocks * columns), 0.0f);
  each_block(rows, columns, threads, [&](int64_t block, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) RECAST_CHOOSE(backward)
    (row(gs, r), row(xs, r), row(ps, r), a.data, a.step, columns, row(into, r), row(gate, r),
     found.data() + block * columns);
  });
  float* const total = row(sums, 0);
  for (int64_t c = 0; c < columns; ++c) {
    double sum = 0.0;
    for (int64_t i = 0; i < blocks; ++i) sum += found[static_cast<size_t>(i * columns + c)];
    total[c] = static_cast<float>(sum);
  }
}

}  // namespace
}  // namespace recast::dice

void bind_dice(py::module_& m) {
  m.def("dice_forward", &recast::dice::forward);
  m.def("dice_backward", &recast::dice::backward);
}
