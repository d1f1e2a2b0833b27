// Dice, a gated activation, forward and backward (runtime/layers/dice.py has the formulas), each in
// one pass over rows of columns.
//
// Macros:
//   RECAST_IN     dtype of x, the gate and their gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_ALPHA  dtype of alpha, likewise
//   RECAST_OUT    dtype of the result and its gradient, likewise; arithmetic is fp32
//   RECAST_VEC    columns that a lane reads at once; divides the width and all strides, and rows
//                 start at multiples of VEC elements: 1, 4, and 8 for 16-bit rows
//   RECAST_BLOCK  threads of a block, a multiple of 32
//
// Launch: grid = (chunks of rows, ceil(width / VEC / lanes)), block = RECAST_BLOCK, no dynamic
// shared memory. `lanes` share a row, a power of two up to 32: about width / VEC. Rows are dealt to
// the chunks in turn.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Alpha = recast::Dtype<RECAST_ALPHA>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

constexpr int kVec = RECAST_VEC;

// Where this thread works.
struct Place {
  int lane, row, column;
  int rows;  // that a block works on at once
  Index first, step;
};

__device__ __forceinline__ Place place(int lanes) {
  const int thread = threadIdx.x, lane = thread % lanes, rows = RECAST_BLOCK / lanes;
  const int column = (static_cast<int>(blockIdx.y) * lanes + lane) * kVec;
  return {lane,
          thread / lanes,
          column,
          rows,
          static_cast<Index>(blockIdx.x) * rows + thread / lanes,
          static_cast<Index>(gridDim.x) * rows};
}

// Alpha of this thread's columns; `step` is 0 where there is one for all.
__device__ __forceinline__ void read_alpha(const Alpha* alpha, int step, int c, float* to) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) to[e] = recast::widen(alpha[(c + e) * step]);
}

// A full division calls a function, around which registers would be spilled.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

}  // namespace

// out = x (p + (1 - p) alpha) with p = sigmoid(gate); out is contiguous.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    dice_forward(const In* __restrict__ x, Index x_stride, const In* __restrict__ gate,
                 Index gate_stride, const Alpha* __restrict__ alpha, int alpha_step, int width,
                 Index rows, int lanes, Out* __restrict__ out) {
  const Place my = place(lanes);
  const int c = my.column;
  if (c >= width) return;
  float factor[kVec];
  read_alpha(alpha, alpha_step, c, factor);
  for (Index row = my.first; row < rows; row += my.step) {
    const auto value = recast::load<kVec>(x + row * x_stride + c);
    const auto at = recast::load<kVec>(gate + row * gate_stride + c);
    recast::Pack<Out, kVec> result;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float p = sigmoid(recast::widen(at.at[e])), v = recast::widen(value.at[e]);
      recast::narrow(p * v + (1.0f - p) * factor[e] * v, result.at[e]);
    }
    recast::store<kVec>(out + row * width + c, result);
  }
}
RECAST_KERNEL(dice_forward)

// of_x, of_gate: (rows, width), contiguous; of_alpha: (chunks, width), the part of each.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    dice_backward(const Out* __restrict__ grad, Index grad_stride, const In* __restrict__ x,
                  Index x_stride, const In* __restrict__ gate, Index gate_stride,
                  const Alpha* __restrict__ alpha, int alpha_step, int width, Index rows, int lanes,
                  In* __restrict__ of_x, In* __restrict__ of_gate, float* __restrict__ of_alpha) {
  RECAST_SHARED(float[RECAST_BLOCK * RECAST_VEC], sums);
  const Place my = place(lanes);
  const int c = my.column;
  float sum[kVec] = {}, factor[kVec] = {};
  if (c < width) {
    read_alpha(alpha, alpha_step, c, factor);
#pragma unroll 1  // more would not fit into registers
    for (Index row = my.first; row < rows; row += my.step) {
      const auto g = recast::load<kVec>(grad + row * grad_stride + c);
      const auto value = recast::load<kVec>(x + row * x_stride + c);
      const auto at = recast::load<kVec>(gate + row * gate_stride + c);
      recast::Pack<In, kVec> into, into_gate;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float p = sigmoid(recast::widen(at.at[e])), off = 1.0f - p;
        const float up = recast::widen(g.at[e]), along = up * recast::widen(value.at[e]);
        recast::narrow(up * (p + off * factor[e]), into.at[e]);
        recast::narrow(along * (1.0f - factor[e]) * p * off, into_gate.at[e]);
        sum[e] += along * off;
      }
      recast::store<kVec>(of_x + row * width + c, into);
      recast::store<kVec>(of_gate + row * width + c, into_gate);
    }
  }
  float* const mine = sums + threadIdx.x;
#pragma unroll
  for (int e = 0; e < kVec; ++e) mine[e * RECAST_BLOCK] = sum[e];
  __syncthreads();
  if (my.row != 0 || c >= width) return;
  // Its own are those of the first row: they come first.
#pragma unroll 1
  for (int r = lanes; r < RECAST_BLOCK; r += lanes)
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[e] += mine[e * RECAST_BLOCK + r];
  float* const to = of_alpha + static_cast<Index>(blockIdx.x) * width + c;
#pragma unroll
  for (int e = 0; e < kVec; ++e) to[e] = sum[e];
}
RECAST_KERNEL(dice_backward)
