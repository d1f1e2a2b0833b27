// The activation Dice, element by element: one pass over memory forward, one backward.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "isa.h"
#include "row_blocks.h"

namespace py = pybind11;

#define RECAST_KERNEL "dice_kernel.h"
#include "each_isa.h"

namespace recast::dice {
namespace {

constexpr char kOp[] = "dice";

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

void forward(const py::handle& x, const py::handle& p, const py::handle& alpha,
             const py::handle& out, int threads) {
  const TensorView to = matrix_of(kOp, out);
  const int64_t rows = to.size[0], columns = to.size[1];
  const TensorView xs = matrix_of(kOp, x, rows, columns), ps = matrix_of(kOp, p, rows, columns);
  const Alpha a = alpha_of(alpha, columns);
  const py::gil_scoped_release release;
  each_row_block(rows, columns, threads, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      RECAST_CHOOSE(forward)(row_of(xs, r), row_of(ps, r), a.data, a.step, columns, row_of(to, r));
  });
}

// `of_alpha`: (1, columns).
void backward(const py::handle& grad, const py::handle& x, const py::handle& p,
              const py::handle& alpha, const py::handle& of_x, const py::handle& of_gate,
              const py::handle& of_alpha, int threads) {
  const TensorView into = matrix_of(kOp, of_x);
  const int64_t rows = into.size[0], columns = into.size[1];
  const TensorView gate = matrix_of(kOp, of_gate, rows, columns);
  const TensorView sums = matrix_of(kOp, of_alpha, 1, columns);
  const TensorView gs = matrix_of(kOp, grad, rows, columns), xs = matrix_of(kOp, x, rows, columns),
                   ps = matrix_of(kOp, p, rows, columns);
  const Alpha a = alpha_of(alpha, columns);
  const py::gil_scoped_release release;
  std::vector<float> found(static_cast<size_t>(row_blocks(rows) * columns), 0.0f);
  each_row_block(rows, columns, threads, [&](int64_t block, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) RECAST_CHOOSE(backward)
    (row_of(gs, r), row_of(xs, r), row_of(ps, r), a.data, a.step, columns, row_of(into, r),
     row_of(gate, r), found.data() + block * columns);
  });
  sum_blocks(found, columns, row_of(sums, 0));
}

}  // namespace
}  // namespace recast::dice

void bind_dice(py::module_& m) {
  m.def("dice_forward", &recast::dice::forward);
  m.def("dice_backward", &recast::dice::backward);
}
