// Chains of linear layers and activations, forward and backward: one call for the whole chain.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gemm.h"
#include "panels.h"
#include "parallel.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::layers {
namespace {

constexpr int64_t kBlock = 192;  // rows that go through all layers at once, to stay in the caches
constexpr int64_t kWorthThreads = 1 << 19;  // multiply-adds of all layers
constexpr int64_t kNarrow = 4;              // columns up to which a layer is a few dot products
// Columns up to which sigmoid and tanh are done here: torch's vectorised ones are faster.
constexpr int64_t kActivated = 8;

// A contiguous float32 matrix; `data` is null if there is none.
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
  std::vector<float> scale, shift;  // of a batch norm behind the layer; empty if there is none
  char then = 'n';
};

// Reads a batch norm with running statistics: (mean, variance, weight or None, bias or None, eps).
bool read_norm(const py::handle& norm, Layer& layer) {
  if (norm.is_none()) return true;
  const int64_t width = layer.weight.rows;
  const auto parts = norm.cast<py::tuple>();
  Matrix found[4];
  for (size_t i = 0; i < 4; ++i)
    if (!(i >= 2 && parts[i].is_none()) && !read(parts[i], 1, width, found[i])) return false;
  const auto eps = parts[4].cast<float>();
  for (int64_t n = 0; n < width; ++n) {  // as torch computes them
    const float inverse = 1.0f / std::sqrt(found[1].data[n] + eps);
    const float scale = found[2].data == nullptr ? inverse : inverse * found[2].data[n];
    layer.scale.push_back(scale);
    layer.shift.push_back((found[3].data == nullptr ? 0.0f : found[3].data[n]) -
                          found[0].data[n] * scale);
  }
  return true;
}

// Reads the arguments of a chain; false when the kernels do not take them. `results`: one per
// layer, or only that of the last; `norms`: the batch norm behind each layer or None, or empty.
bool read_chain(const py::handle& input, const py::list& params, const std::string& thens,
                const py::list& results, const py::list& norms, std::vector<Layer>& layers) {
  Matrix x;
  if (!read(input, x)) return false;
  const bool all = results.size() == thens.size();
  if (params.size() != 2 * thens.size() || (!all && results.size() != 1)) return false;
  if (!norms.empty() && norms.size() != thens.size()) return false;
  for (size_t k = 0; k < thens.size(); ++k) {
    Layer layer;
    layer.then = thens[k];
    layer.input = x;
    const py::handle bias = params[2 * k + 1];
    if (!read(params[2 * k], layer.weight) || layer.weight.columns != x.columns) return false;
    const int64_t width = layer.weight.rows;
    if (!bias.is_none() && !read(bias, 1, width, layer.bias)) return false;
    if (!norms.empty() && !read_norm(norms[k], layer)) return false;
    if ((layer.then == 's' || layer.then == 't') && width > kActivated) return false;
    layer.result = {nullptr, x.rows, width};
    if ((all || k + 1 == thens.size()) && !read(results[all ? k : 0], x.rows, width, layer.result))
      return false;
    x = layer.result;
    layers.push_back(std::move(layer));
  }
  return !layers.empty();
}

// The activation after a layer, except relu, which the product does.
void activate(char then, float* y, int64_t count) {
  if (then == 's')
    for (int64_t i = 0; i < count; ++i) y[i] = 1.0f / (1.0f + std::exp(-y[i]));
  else if (then == 't')
    for (int64_t i = 0; i < count; ++i) y[i] = std::tanh(y[i]);
}

// Memory of one thread, kept between calls, aligned to a cache line.
class Room {
 public:
  float* at_least(int64_t count) {
    constexpr size_t kLine = 64;
    const size_t wanted = static_cast<size_t>(count) + kLine / sizeof(float);
    if (own_.size() < wanted) own_.resize(wanted);
    const auto at = reinterpret_cast<uintptr_t>(own_.data());
    return reinterpret_cast<float*>((at + kLine - 1) / kLine * kLine);
  }

 private:
  std::vector<float> own_;
};

// y = scale y + shift, for some rows.
void normalise(const Layer& layer, int64_t rows, float* y) {
  if (layer.scale.empty()) return;
  const int64_t width = layer.weight.rows;
  for (int64_t i = 0; i < rows; ++i, y += width)
    for (int64_t n = 0; n < width; ++n) y[n] = y[n] * layer.scale[n] + layer.shift[n];
}

// y = activation(x wᵀ + b), for some rows; a batch norm between them only in narrow layers.
void run(const Layer& layer, const float* x, int64_t rows, float* y, int threads) {
  const int64_t depth = layer.weight.columns, width = layer.weight.rows, count = rows * width;
  const float* w = layer.weight.data;
  if (width <= kNarrow) {
    gemm::dots(x, rows, depth, w, layer.bias.data, width, y, threads);
    normalise(layer, rows, y);
    if (layer.then == 'r') gemm::gate(y, y, count, y);
  } else {
    gemm::Product product{rows, width, depth, x, depth, 1, w, 1, depth, y, width};
    product.bias = layer.bias.data;
    product.relu = layer.then == 'r';
    gemm::multiply(product, threads);
  }
  activate(layer.then, y, count);
}

// The whole chain for rows [first, last) of the input; only the last layer's result is kept. Works
// on panels, so that no weight is packed, except in narrow layers, which read rows.
void run_rows(const std::vector<Layer>& layers, int64_t first, int64_t last) {
  static thread_local Room own[2];
  const int64_t rows = last - first, each = panels::samples(), count = (rows + each - 1) / each;
  const Matrix &input = layers.front().input, &result = layers.back().result;
  float* const out = result.data + first * result.columns;
  float* x = input.data + first * input.columns;
  bool in_panels = false;
  int turn = 0;
  const auto room = [&](int64_t width) { return own[turn ^= 1].at_least(count * each * width); };
  for (const Layer& layer : layers) {
    const int64_t width = layer.weight.rows, depth = layer.weight.columns;
    const bool narrow = width <= kNarrow;
    if (narrow == in_panels) {
      float* turned = room(depth);
      (narrow ? panels::unpack : panels::pack)(x, rows, depth, turned);
      x = turned;
      in_panels = !narrow;
    }
    float* y = narrow && &layer == &layers.back() ? out : room(width);
    if (narrow) {
      run(layer, x, rows, y, 1);
    } else {
      const bool normed = !layer.scale.empty();
      panels::layer({layer.weight.data, layer.bias.data, normed ? layer.scale.data() : nullptr,
                     normed ? layer.shift.data() : nullptr, width, depth, layer.then == 'r'},
                    x, count, y);
      activate(layer.then, y, count * each * width);
    }
    x = y;
  }
  if (in_panels) panels::unpack(x, rows, result.columns, out);
}

// `thens`: one letter per linear layer, its activation: n none, r relu, s sigmoid, t tanh.
// `params`: weight and bias of each; the bias may be None. Fills `results`: one per layer, or only
// that of the last. `norms`: see read_chain; only with the result of the last.
bool forward(const py::handle& input, const py::list& params, const std::string& thens,
             const py::list& results, const py::list& norms, int threads) {
  std::vector<Layer> layers;
  if (!read_chain(input, params, thens, results, norms, layers)) return false;
  if (!norms.empty() && results.size() == thens.size() && layers.size() > 1)
    throw py::value_error("layers: batch norms between results that are kept");
  const py::gil_scoped_release release;
  const bool narrow = layers.size() == 1 && layers[0].weight.rows <= kNarrow;
  if (narrow || (results.size() == thens.size() && layers.size() > 1)) {
    for (const Layer& layer : layers)
      run(layer, layer.input.data, layer.input.rows, layer.result.data, threads);
    return true;
  }
  const int64_t rows = layers[0].input.rows, each = panels::samples();
  const int64_t count = (rows + each - 1) / each;
  int64_t work = 0;
  for (const Layer& layer : layers) work += rows * layer.weight.rows * layer.weight.columns;
  if (work < kWorthThreads) threads = 1;
  // Equally many blocks per thread, of whole panels.
  int64_t blocks = std::max<int64_t>(1, (rows + kBlock / 2) / kBlock);
  blocks = std::min((blocks + threads - 1) / threads * threads, count);
  const auto start = [&](int64_t k) { return std::min(count * k / blocks * each, rows); };
  parallel_dynamic(blocks < 2 ? 1 : threads, blocks,
                   [&](int64_t k, int) { run_rows(layers, start(k), start(k + 1)); });
  return true;
}

// into = the gradient before an activation whose result is y.
void unthen(char then, const float* g, const float* y, int64_t count, float* into) {
  if (then == 'r') return gemm::gate(g, y, count, into);
  if (then == 's')
    for (int64_t i = 0; i < count; ++i) into[i] = g[i] * (1.0f - y[i]) * y[i];
  else
    for (int64_t i = 0; i < count; ++i) into[i] = g[i] * (1.0f - y[i] * y[i]);
}

// Where the gradients of `params` and of the input go; null: not wanted.
struct Wanted {
  std::vector<Matrix> params;
  Matrix input;
  size_t lowest;  // the first layer that needs a gradient
};

// The gradients from rows [first, last); those of params are added to those from earlier rows.
// `spare`: room for two gradients of that many rows.
void backward_rows(const std::vector<Layer>& layers, const float* grad, const Wanted& wanted,
                   int64_t first, int64_t last, float* const* spare, int threads) {
  const int64_t rows = last - first;
  const bool add = first > 0;
  const Layer& top = layers.back();
  const float* now = grad + first * top.result.columns;
  int turn = 0;
  if (top.then != 'n') {
    const int64_t width = top.result.columns;
    unthen(top.then, now, top.result.data + first * width, rows * width, spare[0]);
    now = spare[0];
    turn = 1;
  }
  for (size_t k = layers.size(); k-- > wanted.lowest;) {
    const Matrix& w = layers[k].weight;
    const float* x = layers[k].input.data + first * w.columns;
    if (wanted.params[2 * k + 1].data != nullptr)
      gemm::sum_rows(now, rows, w.rows, wanted.params[2 * k + 1].data, add, threads);
    if (wanted.params[2 * k].data != nullptr) {
      gemm::Product product{w.rows,   w.columns, rows,      now, 1,
                            w.rows,   x,         w.columns, 1,   wanted.params[2 * k].data,
                            w.columns};
      product.add = add;
      gemm::multiply(product, threads);
    }
    if (k == wanted.lowest && wanted.input.data == nullptr) break;
    float* below = k == 0 ? wanted.input.data + first * w.columns : spare[turn];
    gemm::Product product{rows,   w.columns, w.rows, now,   w.rows,   1,
                          w.data, w.columns, 1,      below, w.columns};
    const char then = k == 0 ? 'n' : layers[k - 1].then;
    if (then == 'r') {
      product.gate = x;
      product.gate_row = w.columns;
    }
    gemm::multiply(product, threads);
    if (then == 's' || then == 't') unthen(then, below, x, rows * w.columns, below);
    now = below;
    turn ^= 1;
  }
}

// The gradients, given `grad`, that of the last result: those of `params` into `grads`, that of the
// input into `of_input`; None: not wanted. `room`: two matrices (rows, widest layer), with as many
// rows as are to be done at once.
bool backward(const py::handle& grad, const py::handle& input, const py::list& params,
              const std::string& thens, const py::list& results, const py::list& grads,
              const py::handle& of_input, const py::list& room, int threads) {
  std::vector<Layer> layers;
  Matrix g, spare[2];
  Wanted wanted;
  if (results.size() != thens.size() ||
      !read_chain(input, params, thens, results, py::list(), layers))
    return false;
  const Layer& top = layers.back();
  const int64_t rows = top.result.rows;
  if (!read(grad, rows, top.result.columns, g)) return false;
  if (!of_input.is_none() && !read(of_input, rows, layers[0].input.columns, wanted.input))
    return false;
  if (grads.size() != params.size() || room.size() != 2) return false;
  wanted.params.resize(params.size());
  wanted.lowest = layers.size();
  for (size_t k = params.size(); k-- > 0;) {
    if (grads[k].is_none()) continue;
    const Matrix& w = layers[k / 2].weight;
    if (!read(grads[k], k % 2 == 0 ? w.rows : 1, k % 2 == 0 ? w.columns : w.rows, wanted.params[k]))
      throw py::value_error("layers: a gradient does not fit");
    wanted.lowest = k / 2;
  }
  if (wanted.input.data != nullptr) wanted.lowest = 0;
  int64_t widest = 1, most = INT64_MAX;
  for (const Layer& layer : layers) widest = std::max(widest, layer.result.columns);
  for (int k = 0; k < 2; ++k) {
    if (!read(room[static_cast<size_t>(k)], spare[k])) return false;
    most = std::min(most, spare[k].rows * spare[k].columns / widest);
  }
  if (most < 1 && rows > 0) throw py::value_error("layers: no room for a gradient");
  float* const spares[2] = {spare[0].data, spare[1].data};
  const py::gil_scoped_release release;
  const int64_t blocks = rows == 0 ? 1 : (rows + most - 1) / most;
  for (int64_t k = 0; k < blocks; ++k)
    backward_rows(layers, g.data, wanted, rows * k / blocks, rows * (k + 1) / blocks, spares,
                  threads);
  return true;
}

}  // namespace
}  // namespace recast::layers

void bind_layers(py::module_& m) {
  m.def("layers_forward", &recast::layers::forward);
  m.def("layers_backward", &recast::layers::backward);
}
