// Linear layers and what follows each, forward and backward: one call for the whole chain.

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gemm.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::layers {
namespace {

constexpr int64_t kNarrow = 4;  // columns up to which a layer is a few dot products
// Columns up to which sigmoid and tanh are done here: torch's vectorised ones are faster.
constexpr int64_t kActivated = 8;

// A contiguous float32 matrix; `data` is null where there is none.
struct Matrix {
  float* data = nullptr;
  int64_t rows = 0, columns = 0;
};

bool contiguous(const TensorView& view) {
  if (view.dtype != Dtype::float32) return false;
  int64_t step = 1;
  for (int d = view.dims - 1; d >= 0; --d) {
    if (view.size[d] != 1 && view.stride[d] != step) return false;
    step *= view.size[d];
  }
  return true;
}

// A matrix, or a vector as a row; false when the kernels do not read it.
bool read(const py::handle& tensor, Matrix& into) {
  TensorView view;
  if (!TensorReader::get().read(tensor.ptr(), view) || !contiguous(view)) return false;
  if (view.dims != 1 && view.dims != 2) return false;
  into.data = reinterpret_cast<float*>(view.data);
  into.rows = view.dims == 2 ? view.size[0] : 1;
  into.columns = view.size[view.dims - 1];
  return true;
}

bool read(const py::handle& tensor, int64_t rows, int64_t columns, Matrix& into) {
  return read(tensor, into) && into.rows == rows && into.columns == columns;
}

struct Layer {
  Matrix weight, bias, input, result;
  char then = 'n';
};

// What `thens` and the lists say; false when it is not for these kernels.
bool read_chain(const py::handle& input, const py::list& params, const std::string& thens,
                const py::list& results, std::vector<Layer>& layers) {
  Matrix x;
  if (!read(input, x)) return false;
  if (params.size() != 2 * thens.size() || results.size() != thens.size()) return false;
  for (size_t k = 0; k < thens.size(); ++k) {
    Layer layer;
    layer.then = thens[k];
    layer.input = x;
    const py::handle bias = params[2 * k + 1];
    if (!read(params[2 * k], layer.weight) || layer.weight.columns != x.columns) return false;
    const int64_t width = layer.weight.rows;
    if (!bias.is_none() && !read(bias, 1, width, layer.bias)) return false;
    if ((layer.then == 's' || layer.then == 't') && width > kActivated) return false;
    if (!read(results[k], x.rows, width, layer.result)) return false;
    x = layer.result;
    layers.push_back(layer);
  }
  return !layers.empty();
}

// `thens`: for each linear layer what follows it: n nothing, r relu, s sigmoid, t tanh. `params`:
// weight and bias of each, the bias may be None. Fills `results`, one for each layer.
bool forward(const py::handle& input, const py::list& params, const std::string& thens,
             const py::list& results, int threads) {
  std::vector<Layer> layers;
  if (!read_chain(input, params, thens, results, layers)) return false;
  const py::gil_scoped_release release;
  for (const Layer& layer : layers) {
    const Matrix &x = layer.input, &w = layer.weight, &y = layer.result;
    if (y.columns <= kNarrow) {
      gemm::dots(x.data, x.rows, x.columns, w.data, layer.bias.data, y.columns, y.data, threads);
      if (layer.then == 'r') gemm::gate(y.data, y.data, y.rows * y.columns, y.data);
    } else {
      gemm::Product product{x.rows, y.columns, x.columns, x.data, x.columns, 1,
                            w.data, 1,         x.columns, y.data, y.columns};
      product.bias = layer.bias.data;
      product.relu = layer.then == 'r';
      gemm::multiply(product, threads);
    }
    const int64_t count = y.rows * y.columns;
    if (layer.then == 's')
      for (int64_t i = 0; i < count; ++i) y.data[i] = 1.0f / (1.0f + std::exp(-y.data[i]));
    else if (layer.then == 't')
      for (int64_t i = 0; i < count; ++i) y.data[i] = std::tanh(y.data[i]);
  }
  return true;
}

// into = the gradient before what follows a layer whose result is y.
void unthen(char then, const float* g, const float* y, int64_t count, float* into) {
  if (then == 'r') return gemm::gate(g, y, count, into);
  if (then == 's')
    for (int64_t i = 0; i < count; ++i) into[i] = g[i] * (1.0f - y[i]) * y[i];
  else
    for (int64_t i = 0; i < count; ++i) into[i] = g[i] * (1.0f - y[i] * y[i]);
}

// The gradients for `grad` of the last result: of the parameters into `grads`, as `params`, of the
// input into `of_input`; None where one is not wanted. `room`: two times (rows, widest layer).
bool backward(const py::handle& grad, const py::handle& input, const py::list& params,
              const std::string& thens, const py::list& results, const py::list& grads,
              const py::handle& of_input, const py::list& room, int threads) {
  std::vector<Layer> layers;
  Matrix g, into, spare[2];
  if (!read_chain(input, params, thens, results, layers)) return false;
  const Layer& top = layers.back();
  if (!read(grad, top.result.rows, top.result.columns, g)) return false;
  if (!of_input.is_none() && !read(of_input, layers[0].input.rows, layers[0].input.columns, into))
    return false;
  if (grads.size() != params.size() || room.size() != 2) return false;
  std::vector<Matrix> wanted(params.size());
  size_t lowest = layers.size();
  for (size_t k = params.size(); k-- > 0;) {
    if (grads[k].is_none()) continue;
    const Matrix& w = layers[k / 2].weight;
    if (!read(grads[k], k % 2 == 0 ? w.rows : 1, k % 2 == 0 ? w.columns : w.rows, wanted[k]))
      throw py::value_error("layers: a gradient does not fit");
    lowest = k / 2;
  }
  if (into.data != nullptr) lowest = 0;
  for (int k = 0; k < 2; ++k) {
    if (!read(room[static_cast<size_t>(k)], spare[k])) return false;
    for (const Layer& layer : layers)
      if (spare[k].rows * spare[k].columns < layer.result.rows * layer.result.columns)
        throw py::value_error("layers: no room for a gradient");
  }
  const py::gil_scoped_release release;
  const float* now = g.data;
  int turn = 0;
  if (top.then != 'n') {
    unthen(top.then, now, top.result.data, top.result.rows * top.result.columns, spare[0].data);
    now = spare[0].data;
    turn = 1;
  }
  for (size_t k = layers.size(); k-- > lowest;) {
    const Layer& layer = layers[k];
    const Matrix &x = layer.input, &w = layer.weight;
    if (wanted[2 * k + 1].data != nullptr)
      gemm::sum_rows(now, x.rows, w.rows, wanted[2 * k + 1].data, threads);
    if (wanted[2 * k].data != nullptr)
      gemm::multiply({w.rows, w.columns, x.rows, now, 1, w.rows, x.data, x.columns, 1,
                      wanted[2 * k].data, w.columns},
                     threads);
    if (k == lowest && into.data == nullptr) break;
    float* below = k == 0 ? into.data : spare[turn].data;
    gemm::Product product{x.rows, w.columns, w.rows, now,   w.rows,   1,
                          w.data, w.columns, 1,      below, w.columns};
    const char then = k == 0 ? 'n' : layers[k - 1].then;
    if (then == 'r') {
      product.gate = x.data;
      product.gate_row = x.columns;
    }
    gemm::multiply(product, threads);
    if (then == 's' || then == 't') unthen(then, below, x.data, x.rows * x.columns, below);
    now = below;
    turn ^= 1;
  }
  return true;
}

}  // namespace
}  // namespace recast::layers

void bind_layers(py::module_& m) {
  m.def("layers_forward", &recast::layers::forward);
  m.def("layers_backward", &recast::layers::backward);
}
