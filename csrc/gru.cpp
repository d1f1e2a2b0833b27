// The steps of a gated recurrent unit, forward and backward. Products that do not depend on the
// previous step are left out: the caller does them for all steps at once.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "feature_rows.h"
#include "gru_steps.h"
#include "isa.h"

namespace py = pybind11;

#define RECAST_KERNEL "gru_kernel.h"
#include "each_isa.h"

namespace recast::gru {
namespace {

// The data of a contiguous float32 tensor of this shape; null for None.
float* dense(const py::handle& tensor, int64_t rows, int64_t columns) {
  if (tensor.is_none()) return nullptr;
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dtype == Dtype::float32 &&
                    view.dims == 2 && view.size[0] == rows && view.size[1] == columns &&
                    unit_stride(view) && (rows <= 1 || view.stride[0] == columns);
  if (!read) throw py::value_error("gru: a tensor does not fit");
  return reinterpret_cast<float*>(view.data);
}

// `size` in whole registers of the instruction set in force.
int64_t padded(int64_t size) {
  const int64_t lanes = isa() == Isa::avx512 ? 16 : isa() == Isa::avx2 ? 8 : 4;
  return (size + lanes - 1) / lanes * lanes;
}

int64_t columns(const py::handle& out) {
  TensorView view;
  if (!TensorReader::get().read(out.ptr(), view) || view.dims != 2)
    throw py::value_error("gru: a tensor does not fit");
  return view.size[1];
}

// `gates` (rows, 3 H): what x adds to the gates, overwritten by the gates; `weight` (3 H, H);
// `bias` (1, 3 H), `start` (B, H), `scores` (homes, 1) and `kept` (rows, H) may be None. Writes
// `out` (homes, H), with `padding` beyond lengths, and `last` (B, H).
void forward(const py::tuple& given, const py::handle& weight, const py::handle& bias,
             const py::handle& start, const py::handle& scores, bool keeps, float padding,
             const py::handle& gates, const py::handle& kept, const py::handle& out,
             const py::handle& last, int threads) {
  const Layout layout(given);
  const int64_t size = columns(out);
  Steps all(layout, size, padded(size), keeps);
  Call& call = all.call;
  call.padding = padding;
  call.gates = dense(gates, all.rows, 3 * size);
  call.kept = dense(kept, all.rows, size);
  call.out = dense(out, all.homes, size);
  call.last = dense(last, layout.sequences, size);
  call.start = dense(start, layout.sequences, size);
  call.scores = dense(scores, all.homes, 1);
  const float *const w = dense(weight, 3 * size, size), *const b = dense(bias, 1, 3 * size);
  const py::gil_scoped_release release;
  const int64_t width = call.width;
  std::vector<float> turned(static_cast<size_t>(size * 3 * width), 0.0f);
  std::vector<float> shift(static_cast<size_t>(3 * width), 0.0f);
  for (int64_t g = 0; g < 3; ++g)
    for (int64_t j = 0; j < size; ++j) {
      if (b != nullptr) shift[static_cast<size_t>(g * width + j)] = b[g * size + j];
      for (int64_t k = 0; k < size; ++k)
        turned[static_cast<size_t>((k * 3 + g) * width + j)] = w[(g * size + j) * size + k];
    }
  call.weight = turned.data();
  call.bias = shift.data();
  all.each(threads,
           [&](int64_t first, float* scratch) { RECAST_CHOOSE(forward)(call, first, scratch); });
}

// Writes `of_gates` and `of_inner` (rows, 3 H), the gradients of what x and h add to the gates, and
// `before` (rows, H), the h that each step began with; `of_scores` (homes, 1) within lengths, and
// `of_start` (B, H), where they are not None.
void backward(const py::tuple& given, const py::handle& weight, const py::handle& start,
              const py::handle& scores, bool keeps, const py::handle& gates, const py::handle& kept,
              const py::handle& out, const py::handle& of_out, const py::handle& of_last,
              const py::handle& of_gates, const py::handle& of_inner, const py::handle& before,
              const py::handle& of_scores, const py::handle& of_start, int threads) {
  const Layout layout(given);
  const int64_t size = columns(out);
  Steps all(layout, size, padded(size), keeps);
  Call& call = all.call;
  call.gates = dense(gates, all.rows, 3 * size);
  call.kept = dense(kept, all.rows, size);
  call.out = dense(out, all.homes, size);
  call.start = dense(start, layout.sequences, size);
  call.scores = dense(scores, all.homes, 1);
  call.of_out = dense(of_out, all.homes, size);
  call.of_last = dense(of_last, layout.sequences, size);
  call.of_gates = dense(of_gates, all.rows, 3 * size);
  call.of_inner = dense(of_inner, all.rows, 3 * size);
  call.before = dense(before, all.rows, size);
  call.of_scores = dense(of_scores, all.homes, 1);
  call.of_start = dense(of_start, layout.sequences, size);
  const float* const w = dense(weight, 3 * size, size);
  const py::gil_scoped_release release;
  const int64_t width = call.width;
  std::vector<float> wide(static_cast<size_t>(3 * width * width), 0.0f);
  for (int64_t g = 0; g < 3; ++g)
    for (int64_t j = 0; j < size; ++j)
      for (int64_t k = 0; k < size; ++k)
        wide[static_cast<size_t>((g * width + j) * width + k)] = w[(g * size + j) * size + k];
  call.weight = wide.data();
  all.each(threads,
           [&](int64_t first, float* scratch) { RECAST_CHOOSE(backward)(call, first, scratch); });
}

// Copies the rows of padded sequences to `rows` (Σ lengths, D), one sequence after the other; with
// `back` the other way, with zeros beyond the lengths. `sequences`: (B, T, D) of float32, each row
// contiguous; `lengths`: B whole numbers in [0, T] that sum up to the number of rows.
void move_rows(const py::handle& sequences, const py::handle& lengths_tensor,
               const py::handle& rows, bool back) {
  TensorView view;
  const bool read = TensorReader::get().read(sequences.ptr(), view) && view.dims == 3 &&
                    view.dtype == Dtype::float32 && unit_stride(view);
  if (!read) throw py::value_error("gru: the sequences do not fit");
  const std::vector<int64_t> lengths = Steps::numbers(lengths_tensor, view.size[0]);
  const int64_t steps = view.size[1], width = view.size[2];
  int64_t count = 0;
  for (const int64_t length : lengths) {
    if (length < 0 || length > steps) throw py::value_error("gru: a length does not fit");
    count += length;
  }
  float* row = dense(rows, count, width);
  const py::gil_scoped_release release;
  for (size_t s = 0; s < lengths.size(); ++s)
    for (int64_t t = 0; t < steps; ++t) {
      float* const home = reinterpret_cast<float*>(view.data) +
                          static_cast<int64_t>(s) * view.stride[0] + t * view.stride[1];
      if (t >= lengths[s]) {
        if (!back) break;
        std::fill(home, home + width, 0.0f);
        continue;
      }
      if (back)
        std::copy(row, row + width, home);
      else
        std::copy(home, home + width, row);
      row += width;
    }
}

}  // namespace
}  // namespace recast::gru

void bind_gru(py::module_& m) {
  m.def("gru_forward", &recast::gru::forward);
  m.def("gru_backward", &recast::gru::backward);
  m.def("gru_move_rows", &recast::gru::move_rows);
}
