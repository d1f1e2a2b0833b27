// A cross network with vector weights, all layers at once (runtime/interactions/cross_vector.py has
// the formulas). A warp takes a sample: all its dot products in one pass over the row, and the
// result in another.
//
// Macros:
//   RECAST_LAYERS  layers, 1 to 8: their products are held in registers
//   RECAST_START   1: the network starts from rows of its own; 0: from the first features
//   RECAST_VEC     columns that a lane reads at once; divides the width and all strides, and rows
//                  start at multiples of VEC elements: 1 or 4
//   RECAST_BLOCK   threads of a block, a multiple of 32
//
// Launch: grid = ceil(batch / (BLOCK / 32)), block = RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"
#include "reductions.cuh"

namespace {

using recast::Index;
using recast::warp_sum;

constexpr int kVec = RECAST_VEC;
constexpr int kLayers = RECAST_LAYERS;
constexpr bool kStart = RECAST_START;

using Pack = recast::Pack<float, kVec>;

// A lane's share of x_0 · w_l, and of x · w_l where x is not x_0; after reduce(), the whole
// products.
struct Products {
  float first[kLayers] = {};
  float start[kStart ? kLayers : 1] = {};
};

__device__ __forceinline__ void add(Products& to, const Pack& x0, [[maybe_unused]] const Pack& x,
                                    const float* weights, int width, int c) {
#pragma unroll
  for (int l = 0; l < kLayers; ++l) {
    const auto w = recast::load<kVec>(weights + static_cast<Index>(l) * width + c);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      to.first[l] += x0.at[e] * w.at[e];
      if constexpr (kStart) to.start[l] += x.at[e] * w.at[e];
    }
  }
}

__device__ __forceinline__ void reduce(Products& products) {
#pragma unroll
  for (int l = 0; l < kLayers; ++l) {
    products.first[l] = warp_sum(products.first[l]);
    if constexpr (kStart) products.start[l] = warp_sum(products.start[l]);
  }
}

// The factor of x_0 after layer l, given that before it.
__device__ __forceinline__ float next(const Products& products, const float* offsets, int l,
                                      float a) {
  const float start = kStart ? products.start[kStart ? l : 0] : products.first[l];
  return a + a * products.first[l] + start + offsets[l];
}

}  // namespace

// out = a x_0 + x + beta; `x` is read where RECAST_START, `beta` (width,) where it is not null.
// weights: (LAYERS, width); offsets: (LAYERS,).
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    cross_forward(const float* __restrict__ x0, Index x0_stride, const float* __restrict__ x,
                  Index x_stride, const float* __restrict__ weights,
                  const float* __restrict__ offsets, const float* __restrict__ beta, int width,
                  int batch, float* __restrict__ out) {
  const int sample = blockIdx.x * (RECAST_BLOCK / 32) + threadIdx.x / 32;
  if (sample >= batch) return;
  const float* const row = x0 + sample * x0_stride;
  const float* const start = kStart ? x + sample * x_stride : row;
  const int first = threadIdx.x % 32 * kVec;
  Products products;
  for (int c = first; c < width; c += 32 * kVec) {
    const auto value = recast::load<kVec>(row + c);
    add(products, value, kStart ? recast::load<kVec>(start + c) : value, weights, width, c);
  }
  reduce(products);
  float a = 0.0f;
#pragma unroll
  for (int l = 0; l < kLayers; ++l) a = next(products, offsets, l, a);
  for (int c = first; c < width; c += 32 * kVec) {
    const auto value = recast::load<kVec>(row + c);
    const auto x_value = kStart ? recast::load<kVec>(start + c) : value;
    Pack result;
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      result.at[e] = a * value.at[e] + x_value.at[e] + (beta == nullptr ? 0.0f : beta[c + e]);
    recast::store<kVec>(out + static_cast<Index>(sample) * width + c, result);
  }
}
RECAST_KERNEL(cross_forward)

// dx0 and, with RECAST_START, dx are (batch, width) each; without it dx0 holds the gradient of
// both. The host finishes the parameters' gradients by two products: `of_first` (batch, LAYERS)
// with x_0, and `of_start` with x. `of_start` is also the gradient of the scalars.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    cross_backward(const float* __restrict__ x0, Index x0_stride, const float* __restrict__ x,
                   Index x_stride, const float* __restrict__ weights,
                   const float* __restrict__ offsets, const float* __restrict__ grad,
                   Index grad_stride, int width, int batch, float* __restrict__ dx0,
                   float* __restrict__ dx, float* __restrict__ of_first,
                   float* __restrict__ of_start) {
  const int sample = blockIdx.x * (RECAST_BLOCK / 32) + threadIdx.x / 32;
  if (sample >= batch) return;
  const float* const row = x0 + sample * x0_stride;
  const float* const start = kStart ? x + sample * x_stride : row;
  const float* const upstream = grad + sample * grad_stride;
  const int lane = threadIdx.x % 32, first = lane * kVec;
  Products products;
  float e = 0.0f;  // grad · x_0
  for (int c = first; c < width; c += 32 * kVec) {
    const auto value = recast::load<kVec>(row + c);
    const auto g = recast::load<kVec>(upstream + c);
    add(products, value, kStart ? recast::load<kVec>(start + c) : value, weights, width, c);
#pragma unroll
    for (int k = 0; k < kVec; ++k) e += g.at[k] * value.at[k];
  }
  reduce(products);
  e = warp_sum(e);
  float before[kLayers], a = 0.0f;  // the factor of x_0 before each layer
#pragma unroll
  for (int l = 0; l < kLayers; ++l) {
    before[l] = a;
    a = next(products, offsets, l, a);
  }
  float of_row[kLayers], of_x[kLayers];
#pragma unroll
  for (int l = kLayers - 1; l >= 0; --l) {
    of_x[l] = e;
    of_row[l] = e * (before[l] + (kStart ? 0.0f : 1.0f));
    e *= 1.0f + products.first[l];
  }
#pragma unroll
  for (int l = 0; l < kLayers; ++l)
    if (lane == l) {
      of_first[static_cast<Index>(sample) * kLayers + l] = of_row[l];
      of_start[static_cast<Index>(sample) * kLayers + l] = of_x[l];
    }
  if constexpr (!kStart) a += 1.0f;
  for (int c = first; c < width; c += 32 * kVec) {
    const auto g = recast::load<kVec>(upstream + c);
    Pack into;
    [[maybe_unused]] Pack into_start = g;
#pragma unroll
    for (int k = 0; k < kVec; ++k) into.at[k] = a * g.at[k];
#pragma unroll
    for (int l = 0; l < kLayers; ++l) {
      const auto w = recast::load<kVec>(weights + static_cast<Index>(l) * width + c);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        into.at[k] += of_row[l] * w.at[k];
        if constexpr (kStart) into_start.at[k] += of_x[l] * w.at[k];
      }
    }
    recast::store<kVec>(dx0 + static_cast<Index>(sample) * width + c, into);
    if constexpr (kStart)
      recast::store<kVec>(dx + static_cast<Index>(sample) * width + c, into_start);
  }
}
RECAST_KERNEL(cross_backward)
