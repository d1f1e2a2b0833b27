// A chain of layers on one to four rows, as in serving: one call, no memory of its own.

#include <pybind11/pybind11.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::small_mlp {
constexpr int64_t kMostRows = 4;
constexpr int64_t kOutputs = 4;  // rows of a weight read side by side
}  // namespace recast::small_mlp

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "small_mlp_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::small_mlp {
namespace {

// Size of a weight from which a second thread pays: each then keeps its part in its own cache.
constexpr int64_t kWorthThreads = 1 << 16;

struct Layer {
  char kind = 'r';
  const float* weight = nullptr;
  const float* bias = nullptr;
  int64_t in = 0, out = 0;
};

bool plain(const TensorView& view) {
  if (view.dtype != Dtype::float32) return false;
  int64_t step = 1;
  for (int d = view.dims - 1; d >= 0; --d) {
    if (view.size[d] != 1 && view.stride[d] != step) return false;
    step *= view.size[d];
  }
  return true;
}

// Whether the kernels take these params; `width`: of the input, then of the result.
bool read(const std::string& kinds, const py::list& params, int64_t& width,
          std::vector<Layer>& layers) {
  const TensorReader& reader = TensorReader::get();
  size_t next = 0;
  for (const char kind : kinds) {
    Layer layer;
    layer.kind = kind;
    if (kind == 'l') {
      if (next + 2 > params.size()) return false;
      TensorView weight, bias;
      const py::handle w = params[next], b = params[next + 1];
      next += 2;
      if (w.is_none() || !reader.read(w.ptr(), weight) || !plain(weight)) return false;
      if (weight.dims != 2 || weight.size[1] != width) return false;
      layer.weight = reinterpret_cast<const float*>(weight.data);
      layer.in = width;
      layer.out = width = weight.size[0];
      if (!b.is_none()) {
        if (!reader.read(b.ptr(), bias) || !plain(bias) || bias.numel() != width) return false;
        layer.bias = reinterpret_cast<const float*>(bias.data);
      }
    }
    layers.push_back(layer);
  }
  return next == params.size();
}

void activate(char kind, float* x, int64_t count) {
  if (kind == 'r')  // as torch's: NaN stays
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
  else if (kind == 's')
    for (int64_t i = 0; i < count; ++i) x[i] = 1.0f / (1.0f + std::exp(-x[i]));
  else
    for (int64_t i = 0; i < count; ++i) x[i] = std::tanh(x[i]);
}

// out (count, width) = x (count, in) wᵀ + bias. The same bits for any number of threads.
void linear(const Layer& layer, const float* x, int64_t count, float* out, int threads) {
  const auto part = [&](int64_t first, int64_t last) {
    RECAST_CHOOSE(linear)(x, count, layer.weight, layer.bias, layer.in, layer.out, first, last,
                          out);
  };
  const int64_t groups = (layer.out + kOutputs - 1) / kOutputs;
  threads = static_cast<int>(std::min<int64_t>(threads, layer.in * layer.out / kWorthThreads));
  if (threads <= 1) return part(0, layer.out);
  parallel_static(threads, threads, [&](int64_t t, int) {
    part(groups * t / threads * kOutputs,
         std::min(layer.out, groups * (t + 1) / threads * kOutputs));
  });
}

// `kinds`: one letter per layer: l linear (its weight and bias are the next two of `params`), r
// relu, s sigmoid, t tanh; at least one is linear. Writes `result`; false when the kernels do not
// take these arguments.
bool run(const py::handle& input, const py::list& params, const std::string& kinds,
         const py::handle& result, int threads) {
  const TensorReader& reader = TensorReader::get();
  TensorView x, out;
  if (!reader.read(input.ptr(), x) || !plain(x) || x.dims < 1) return false;
  int64_t width = x.size[x.dims - 1];
  const int64_t count = width == 0 ? 0 : x.numel() / width;
  if (count < 1 || count > kMostRows || kinds.find('l') == std::string::npos) return false;
  static thread_local std::vector<Layer> layers;
  layers.clear();
  if (!read(kinds, params, width, layers)) return false;
  if (!reader.read(result.ptr(), out) || !plain(out) || out.numel() != count * width)
    throw py::value_error("small_mlp: the result does not fit");
  width = x.size[x.dims - 1];  // from here on, of the intermediate value
  const py::gil_scoped_release release;
  static thread_local std::vector<float> scratch[2];
  const float* from = reinterpret_cast<const float*>(x.data);
  float* into = nullptr;
  auto last = layers.size();
  while (layers[last - 1].kind != 'l') --last;
  for (size_t k = 0, turn = 0; k < layers.size(); ++k) {
    const Layer& layer = layers[k];
    if (layer.kind != 'l') {
      if (into == nullptr) {  // the caller's input must not change
        auto& own = scratch[turn ^= 1];
        own.assign(from, from + count * width);
        from = into = own.data();
      }
      activate(layer.kind, into, count * width);
      continue;
    }
    width = layer.out;
    auto& own = scratch[turn ^= 1];
    if (k + 1 == last) {
      into = reinterpret_cast<float*>(out.data);
    } else {
      own.resize(static_cast<size_t>(count * width));
      into = own.data();
    }
    linear(layer, from, count, into, threads);
    from = into;
  }
  return true;
}

}  // namespace
}  // namespace recast::small_mlp

void bind_small_mlp(py::module_& m) { m.def("small_mlp", &recast::small_mlp::run); }
