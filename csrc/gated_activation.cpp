// act(gate) * value, as in SwiGLU and GEGLU: one pass over memory forward, one backward.

#include <pybind11/pybind11.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <string>

#include "isa.h"
#include "row_blocks.h"

namespace py = pybind11;

namespace recast::gated_activation {

enum class Kind { silu, gelu, gelu_tanh };

}  // namespace recast::gated_activation

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "gated_activation_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::gated_activation {
namespace {

constexpr char kOp[] = "gated_activation";
constexpr int64_t kBlock = 1 << 14;         // elements of one task
constexpr int64_t kWorthThreads = 1 << 15;  // elements from which a second thread pays

Kind kind_of(const std::string& name) {
  if (name == "silu") return Kind::silu;
  if (name == "gelu") return Kind::gelu;
  if (name == "gelu_tanh") return Kind::gelu_tanh;
  throw py::value_error("gated_activation: unknown activation '" + name + "'");
}

bool packed(const TensorView& view) {
  return view.data == nullptr || view.size[0] <= 1 || view.stride[0] == view.size[1];
}

// From its column `first`; null where there is no tensor.
float* row(const TensorView& view, int64_t r, int64_t first) {
  if (view.data == nullptr) return nullptr;
  return row_of(view, r) + first;
}

// function(row, first column, columns) for parts of rows; where all is packed, as of one long row:
// short rows cost much of a register each.
template <class Function>
void each_part(int64_t rows, int64_t columns, bool all_packed, int threads,
               const Function& function) {
  if (all_packed) columns *= rows, rows = 1;
  const int64_t together = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, columns));
  const int64_t blocks = (rows + together - 1) / together;
  const int64_t parts = (columns + kBlock - 1) / kBlock;  // of a row
  if (blocks * parts <= 1 || rows * columns < kWorthThreads) threads = 1;
  parallel_dynamic(threads, blocks * parts, [&](int64_t i, int) {
    const int64_t first = i % parts * kBlock, count = std::min(columns - first, kBlock);
    const int64_t start = i / parts * together, end = std::min(rows, start + together);
    for (int64_t r = start; r < end; ++r) function(r, first, count);
  });
}

void forward(const std::string& kind, const py::handle& gate, const py::handle& value,
             const py::handle& out, int threads) {
  const Kind which = kind_of(kind);
  const TensorView xs = matrix_of(kOp, gate);
  const int64_t rows = xs.size[0], columns = xs.size[1];
  const TensorView vs = matrix_of(kOp, value, rows, columns),
                   to = matrix_of(kOp, out, rows, columns);
  const bool all_packed = packed(xs) && packed(vs) && packed(to);
  const py::gil_scoped_release release;
  each_part(rows, columns, all_packed, threads, [&](int64_t r, int64_t first, int64_t count) {
    RECAST_CHOOSE(forward)
    (which, row(xs, r, first), row(vs, r, first), count, row(to, r, first));
  });
}

// `of_gate, of_value`: like gate, or None.
void backward(const std::string& kind, const py::handle& grad, const py::handle& gate,
              const py::handle& value, const py::handle& of_gate, const py::handle& of_value,
              int threads) {
  const Kind which = kind_of(kind);
  const TensorView xs = matrix_of(kOp, gate);
  const int64_t rows = xs.size[0], columns = xs.size[1];
  const TensorView vs = matrix_of(kOp, value, rows, columns),
                   gs = matrix_of(kOp, grad, rows, columns);
  TensorView of_x, of_v;
  if (!of_gate.is_none()) of_x = matrix_of(kOp, of_gate, rows, columns);
  if (!of_value.is_none()) of_v = matrix_of(kOp, of_value, rows, columns);
  const bool all_packed = packed(xs) && packed(vs) && packed(gs) && packed(of_x) && packed(of_v);
  const py::gil_scoped_release release;
  each_part(rows, columns, all_packed, threads, [&](int64_t r, int64_t first, int64_t count) {
    RECAST_CHOOSE(backward)
    (which, row(gs, r, first), row(xs, r, first), row(vs, r, first), count, row(of_x, r, first),
     row(of_v, r, first));
  });
}

}  // namespace
}  // namespace recast::gated_activation

void bind_gated_activation(py::module_& m) {
  m.def("gated_activation_forward", &recast::gated_activation::forward);
  m.def("gated_activation_backward", &recast::gated_activation::backward);
}
