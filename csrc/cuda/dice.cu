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
// shared memory. `lanes` share a row, up to BLOCK: width / VEC, or an even part of it. A block
// works on BLOCK / lanes rows at once and reads some such lots ahead; these tiles of rows are dealt
// to the chunks in turn.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Alpha = recast::Dtype<RECAST_ALPHA>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kAhead = kVec > 4 ? 2 : 4;         // rows that a thread of dice_forward reads at once
constexpr int kThreads = kVec > 4 ? 512 : 1024;  // of dice_backward on a multiprocessor, at least

// Where this thread works: at rows `first`, `rows` later and so on, as many as it reads ahead; then
// `step` later again.
struct Place {
  int row, column;
  int rows;  // that a block works on at once; threads beyond them have nothing to do
  Index first, step;
};

__device__ __forceinline__ Place place(int lanes, int ahead) {
  const int thread = threadIdx.x, row = thread / lanes, rows = RECAST_BLOCK / lanes;
  const int column = (static_cast<int>(blockIdx.y) * lanes + thread % lanes) * kVec;
  const Index tile = static_cast<Index>(rows) * ahead;
  return {row, column, rows, blockIdx.x * tile + row, gridDim.x * tile};
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
  const Place my = place(lanes, kAhead);
  const int c = my.column;
  if (c >= width || my.row >= my.rows) return;
  float factor[kVec];
  read_alpha(alpha, alpha_step, c, factor);
  for (Index row = my.first; row < rows; row += my.step) {
    recast::Pack<In, kVec> value[kAhead], at[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const Index r = row + a * my.rows;
      if (r >= rows) continue;
      value[a] = recast::load<kVec>(x + r * x_stride + c);
      at[a] = recast::load<kVec>(gate + r * gate_stride + c);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const Index r = row + a * my.rows;
      if (r >= rows) continue;
      recast::Pack<Out, kVec> result;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float p = sigmoid(recast::widen(at[a].at[e])), v = recast::widen(value[a].at[e]);
        recast::narrow(p * v + (1.0f - p) * factor[e] * v, result.at[e]);
      }
      recast::store<kVec>(out + r * width + c, result);
    }
  }
}
RECAST_KERNEL(dice_forward)

// of_x, of_gate: (rows, width), contiguous; of_alpha: (chunks, width), the part of each.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kThreads / RECAST_BLOCK)
    dice_backward(const Out* __restrict__ grad, Index grad_stride, const In* __restrict__ x,
                  Index x_stride, const In* __restrict__ gate, Index gate_stride,
                  const Alpha* __restrict__ alpha, int alpha_step, int width, Index rows, int lanes,
                  In* __restrict__ of_x, In* __restrict__ of_gate, float* __restrict__ of_alpha) {
  RECAST_SHARED(float[RECAST_BLOCK * RECAST_VEC], sums);
  constexpr int kAhead = 2;  // more would not fit into registers
  const Place my = place(lanes, kAhead);
  const int c = my.column;
  const bool mine_to_do = c < width && my.row < my.rows;
  float sum[kVec] = {}, factor[kVec] = {};
  if (mine_to_do) {
    read_alpha(alpha, alpha_step, c, factor);
#pragma unroll 1
    for (Index row = my.first; row < rows; row += my.step) {
      recast::Pack<Out, kVec> g[kAhead];
      recast::Pack<In, kVec> value[kAhead], at[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const Index r = row + a * my.rows;
        if (r >= rows) continue;
        g[a] = recast::load<kVec>(grad + r * grad_stride + c);
        value[a] = recast::load<kVec>(x + r * x_stride + c);
        at[a] = recast::load<kVec>(gate + r * gate_stride + c);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const Index r = row + a * my.rows;
        if (r >= rows) continue;
        recast::Pack<In, kVec> into, into_gate;
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const float p = sigmoid(recast::widen(at[a].at[e])), off = 1.0f - p;
          const float up = recast::widen(g[a].at[e]);
          const float along = up * recast::widen(value[a].at[e]);
          recast::narrow(up * (p + off * factor[e]), into.at[e]);
          recast::narrow(along * (1.0f - factor[e]) * p * off, into_gate.at[e]);
          sum[e] += along * off;
        }
        recast::store<kVec>(of_x + r * width + c, into);
        recast::store<kVec>(of_gate + r * width + c, into_gate);
      }
    }
  }
  float* const mine = sums + threadIdx.x;
#pragma unroll
  for (int e = 0; e < kVec; ++e) mine[e * RECAST_BLOCK] = sum[e];
  __syncthreads();
  if (my.row != 0 || !mine_to_do) return;
  // Its own are those of the first row: they come first.
#pragma unroll 1
  for (int r = lanes; r < my.rows * lanes; r += lanes)
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[e] += mine[e * RECAST_BLOCK + r];
  float* const to = of_alpha + static_cast<Index>(blockIdx.x) * width + c;
#pragma unroll
  for (int e = 0; e < kVec; ++e) to[e] = sum[e];
}
RECAST_KERNEL(dice_backward)

// of_alpha[c] = the sum of parts (chunks, width) over the chunks. Launch: grid = ceil(width / 8),
// block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    dice_alpha(const float* __restrict__ parts, int chunks, int width,
               Alpha* __restrict__ of_alpha) {
  constexpr int kColumns = 8, kWarps = RECAST_BLOCK / 32;  // a sector of a chunk for 8 threads
  RECAST_SHARED(float[kWarps * kColumns], sums);
  const int thread = static_cast<int>(threadIdx.x), mine = thread % kColumns;
  const int c = static_cast<int>(blockIdx.x) * kColumns + mine;
  float sum = 0.0f;
  if (c < width) {
#pragma unroll 8
    for (int k = thread / kColumns; k < chunks; k += RECAST_BLOCK / kColumns)
      sum += parts[static_cast<Index>(k) * width + c];
  }
  for (int d = kColumns; d < 32; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (thread % 32 < kColumns) sums[thread / 32 * kColumns + mine] = sum;
  __syncthreads();
  if (thread >= kColumns || c >= width) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += sums[w * kColumns + mine];
  recast::narrow(sum, of_alpha[c]);
}
RECAST_KERNEL(dice_alpha)
