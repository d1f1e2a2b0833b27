// The elementwise steps between the matrix products of a mixture of experts in a cross layer
// (runtime/interactions/mixture_cuda.py): activations, the softmax of gates, and their gradients. A
// row of z is the first product of all experts, then the logits of their gates, then zero padding.
//
// Macros:
//   RECAST_ACT    the activation: 0 none, 1 relu, 2 sigmoid, 3 tanh
//   RECAST_VEC    columns that a thread reads at once; divides the rank, and rows start at
//                 multiples of VEC elements: 1, 2 or 4
//   RECAST_BLOCK  threads of a block, a multiple of 32
//
// Launch: grid and block as said at each kernel, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"
#include "reductions.cuh"

namespace {

using recast::Index;
using recast::warp_max;
using recast::warp_sum;

constexpr int kVec = RECAST_VEC;
constexpr int kWarps = RECAST_BLOCK / 32;

using Pack = recast::Pack<float, kVec>;

__device__ __forceinline__ float activated(float x) {
  if constexpr (RECAST_ACT == 1) return x < 0.0f ? 0.0f : x;  // NaN propagates
  if constexpr (RECAST_ACT == 2) return 1.0f / (1.0f + expf(-x));
  if constexpr (RECAST_ACT == 3) return tanhf(x);
  return x;
}

// The derivative, from the activation's value y.
__device__ __forceinline__ float slope(float y) {
  if constexpr (RECAST_ACT == 1) return y <= 0.0f ? 0.0f : 1.0f;  // NaN passes
  if constexpr (RECAST_ACT == 2) return y * (1.0f - y);
  if constexpr (RECAST_ACT == 3) return 1.0f - y * y;
  return 1.0f;
}

// The gate of expert `lane`: the softmax of the logits; 1 without logits.
__device__ __forceinline__ float gate(const float* logits, const float* bias, int experts) {
  const int lane = threadIdx.x % 32;
  if (logits == nullptr) return 1.0f;
  const bool in_range = lane < experts;
  float x = in_range ? logits[lane] : __uint_as_float(0xff800000u);
  if (in_range && bias != nullptr) x += bias[lane];
  const float e = expf(x - warp_max(x));
  return e / warp_sum(in_range ? e : 0.0f);
}

}  // namespace

// Applies the activation to the first `wide` columns of z, in place. Launch: grid = ceil(batch *
// wide / VEC / BLOCK), block = BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mixture_activate(float* __restrict__ z, int stride, int wide, int batch) {
  const int packs = wide / kVec;
  const Index at = static_cast<Index>(blockIdx.x) * RECAST_BLOCK + threadIdx.x;
  if (at >= static_cast<Index>(batch) * packs) return;
  float* const to = z + at / packs * stride + at % packs * kVec;
  Pack values = recast::load<kVec>(to);
#pragma unroll
  for (int e = 0; e < kVec; ++e) values.at[e] = activated(values.at[e]);
  recast::store<kVec>(to, values);
}
RECAST_KERNEL(mixture_activate)

// dz = dh slope(h) in the first `wide` columns, with h those of z and dh (experts, batch, rank).
// Launch: as mixture_activate.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mixture_through(const float* __restrict__ z, int stride, const float* __restrict__ dh, int rank,
                    int wide, int batch, float* __restrict__ dz) {
  const int packs = wide / kVec;
  const Index at = static_cast<Index>(blockIdx.x) * RECAST_BLOCK + threadIdx.x;
  if (at >= static_cast<Index>(batch) * packs) return;
  const Index row = at / packs;
  const int column = static_cast<int>(at % packs) * kVec;
  const Index from = (static_cast<Index>(column / rank) * batch + row) * rank + column % rank;
  const Pack h = recast::load<kVec>(z + row * stride + column);
  Pack values = recast::load<kVec>(dh + from);
#pragma unroll
  for (int e = 0; e < kVec; ++e) values.at[e] *= slope(h.at[e]);
  recast::store<kVec>(dz + row * stride + column, values);
}
RECAST_KERNEL(mixture_through)

// weighed[b, e * rank + k] = gate_e activation(c[e, b, k]), with c at c + e * c_expert + b * c_row.
// logits: the first row's, `stride` apart, or null; at most 32 experts. Launch: grid = ceil(batch /
// (BLOCK / 32)), block = BLOCK: a warp a row.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 1024 / RECAST_BLOCK)
    mixture_weigh(const float* __restrict__ c, Index c_expert, Index c_row,
                  const float* __restrict__ logits, int stride, const float* __restrict__ bias,
                  int experts, int rank, int batch, float* __restrict__ weighed) {
  const int lane = threadIdx.x % 32;
  const Index row = static_cast<Index>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= batch) return;
  const float own_gate = gate(logits == nullptr ? nullptr : logits + row * stride, bias, experts);
  float* const to = weighed + row * experts * rank;
#pragma unroll 4
  for (int e = 0; e < experts; ++e) {
    const float share = __shfl_sync(0xffffffffu, own_gate, e);
    const float* const from = c + e * c_expert + row * c_row;
    for (int k = lane * kVec; k < rank; k += 32 * kVec) {
      Pack values = recast::load<kVec>(from + k);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values.at[i] = share * activated(values.at[i]);
      recast::store<kVec>(to + e * rank + k, values);
    }
  }
}
RECAST_KERNEL(mixture_weigh)

// From the gradient of what mixture_weigh gives those of c, (dc_expert, dc_row) apart, and of the
// logits, at dlogits; `spare` columns of padding behind these become zeros. Launch: as
// mixture_weigh.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 1024 / RECAST_BLOCK)
    mixture_unweigh(const float* __restrict__ c, Index c_expert, Index c_row,
                    const float* __restrict__ logits, int stride, const float* __restrict__ bias,
                    const float* __restrict__ grad, int experts, int rank, int batch,
                    float* __restrict__ dc, Index dc_expert, Index dc_row,
                    float* __restrict__ dlogits, int spare) {
  const int lane = threadIdx.x % 32;
  const Index row = static_cast<Index>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= batch) return;
  const float own_gate = gate(logits == nullptr ? nullptr : logits + row * stride, bias, experts);
  const float* const up = grad + row * experts * rank;
  float value_dot_grad = 0.0f;  // of expert `lane`: Σ value * gradient
#pragma unroll 2
  for (int e = 0; e < experts; ++e) {
    const float share = __shfl_sync(0xffffffffu, own_gate, e);
    const float* const from = c + e * c_expert + row * c_row;
    float* const to = dc + e * dc_expert + row * dc_row;
    float sum = 0.0f;
    for (int k = lane * kVec; k < rank; k += 32 * kVec) {
      Pack values = recast::load<kVec>(from + k);
      const Pack g = recast::load<kVec>(up + e * rank + k);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float y = activated(values.at[i]);
        sum += y * g.at[i];
        values.at[i] = share * g.at[i] * slope(y);
      }
      recast::store<kVec>(to + k, values);
    }
    sum = warp_sum(sum);
    if (lane == e) value_dot_grad = sum;
  }
  if (logits == nullptr) experts = 0;
  const bool in_range = lane < experts;
  const float all = warp_sum(in_range ? own_gate * value_dot_grad : 0.0f);
  if (in_range) dlogits[row * stride + lane] = own_gate * (value_dot_grad - all);
  if (lane < spare) dlogits[row * stride + experts + lane] = 0.0f;
}
RECAST_KERNEL(mixture_unweigh)
