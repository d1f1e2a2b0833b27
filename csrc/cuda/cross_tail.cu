// The elementwise tail of a cross layer after its matrix products, forward and backward
// (runtime/interactions/cross_tail.py has the formulas), in one pass over rows. A thread takes VEC
// columns of one row.
//
// Macros:
//   RECAST_GATED  1: there is a gate
//   RECAST_VEC    columns that a thread reads at once; divides the width and all strides, and rows
//                 start at multiples of VEC elements: 1 or 4
//   RECAST_BLOCK  threads of a block
//
// Launch: grid = ceil(batch * width / VEC / BLOCK), block = RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;

constexpr int kVec = RECAST_VEC;
constexpr bool kGated = RECAST_GATED;

using Pack = recast::Pack<float, kVec>;

// The row and column of this thread; row >= batch: none.
struct Place {
  Index row;
  int column;
};

__device__ __forceinline__ Place place(int width) {
  const Index at = static_cast<Index>(blockIdx.x) * RECAST_BLOCK + threadIdx.x;
  const int packs = width / kVec;
  return {at / packs, static_cast<int>(at % packs) * kVec};
}

__device__ __forceinline__ Pack read(const float* rows, Index stride, const Place& at) {
  return recast::load<kVec>(rows + at.row * stride + at.column);
}

__device__ __forceinline__ void write(float* rows, int width, const Place& at, const Pack& values) {
  recast::store<kVec>(rows + at.row * width + at.column, values);
}

// Loaded one by one, as the bias may be unaligned.
__device__ __forceinline__ float bias(const float* of, int column) {
  return of == nullptr ? 0.0f : of[column];
}

}  // namespace

// out = x0 (m + inner) gate + outer + x; inner and outer (width,) or null; out is contiguous.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    tail_forward(const float* __restrict__ x0, Index x0_stride, const float* __restrict__ m,
                 Index m_stride, const float* __restrict__ inner, const float* __restrict__ gate,
                 Index gate_stride, const float* __restrict__ x, Index x_stride,
                 const float* __restrict__ outer, int width, Index batch, float* __restrict__ out) {
  const Place at = place(width);
  if (at.row >= batch) return;
  Pack value = read(m, m_stride, at);
  const Pack first = read(x0, x0_stride, at), start = read(x, x_stride, at);
  [[maybe_unused]] const Pack s = kGated ? read(gate, gate_stride, at) : first;
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const int c = at.column + e;
    float v = (value.at[e] + bias(inner, c)) * first.at[e];
    if constexpr (kGated) v *= s.at[e];
    value.at[e] = v + bias(outer, c) + start.at[e];
  }
  write(out, width, at, value);
}
RECAST_KERNEL(tail_forward)

// into_m, into_x0, into_gate: (batch, width), contiguous. into_x0 is accumulated unless `fresh`,
// and includes grad itself if `whole`; into_gate is the gradient at the sigmoid's input.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    tail_backward(const float* __restrict__ x0, Index x0_stride, const float* __restrict__ m,
                  Index m_stride, const float* __restrict__ inner, const float* __restrict__ gate,
                  Index gate_stride, const float* __restrict__ grad, Index grad_stride, int fresh,
                  int whole, int width, Index batch, float* __restrict__ into_m,
                  float* __restrict__ into_x0, float* __restrict__ into_gate) {
  const Place at = place(width);
  if (at.row >= batch) return;
  const Pack product = read(m, m_stride, at), first = read(x0, x0_stride, at);
  const Pack g = read(grad, grad_stride, at);
  [[maybe_unused]] const Pack s = kGated ? read(gate, gate_stride, at) : first;
  Pack of_m, of_x0;
  [[maybe_unused]] Pack of_gate;
  if (!fresh) of_x0 = read(into_x0, width, at);
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const float p = product.at[e] + bias(inner, at.column + e);
    of_m.at[e] = g.at[e] * first.at[e];
    float v = g.at[e] * p;
    if constexpr (kGated) {
      of_m.at[e] *= s.at[e];
      v *= s.at[e];
      of_gate.at[e] = of_m.at[e] * p * (1.0f - s.at[e]);
    }
    if (whole) v += g.at[e];
    of_x0.at[e] = fresh ? v : v + of_x0.at[e];
  }
  write(into_m, width, at, of_m);
  write(into_x0, width, at, of_x0);
  if constexpr (kGated) write(into_gate, width, at, of_gate);
}
RECAST_KERNEL(tail_backward)
