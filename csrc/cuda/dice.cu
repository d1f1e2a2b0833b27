// Dice, a gated activation: out = x (p + (1 - p) alpha) with p = sigmoid(gate), and its gradients,
// each in one pass over rows of columns (runtime/layers/dice.py has the formulas).
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
// shared memory. `lanes` threads share a row: width / VEC of them, or a divisor of that, at most
// BLOCK. A block takes BLOCK / lanes rows at once and loads several such groups of rows ahead;
// these tiles of rows are assigned to the chunks round-robin.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Alpha = recast::Dtype<RECAST_ALPHA>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kInFlight = kVec > 4 ? 2 : 4;  // rows that a thread of dice_forward has in flight
constexpr int kThreads =
    kVec > 4 ? 512 : 1024;  // resident threads of dice_backward on a multiprocessor

// The rows of this thread: `first`, first + rows, ... as many as it has in flight; then the same
// from first + step on.
struct Place {
  int row, column;
  int rows;  // that a block takes at once; threads beyond them are idle
  Index first, step;
};

__device__ __forceinline__ Place place(int lanes, int ahead) {
  const int thread = threadIdx.x, row = thread / lanes, rows = RECAST_BLOCK / lanes;
  const int column = (static_cast<int>(blockIdx.y) * lanes + thread % lanes) * kVec;
  const Index tile = static_cast<Index>(rows) * ahead;
  return {row, column, rows, blockIdx.x * tile + row, gridDim.x * tile};
}

// Alpha of this thread's columns; `step` is 0 if all columns share one.
__device__ __forceinline__ void read_alpha(const Alpha* alpha, int step, int c, float* to) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) to[e] = recast::widen(alpha[(c + e) * step]);
}

// __fdividef, as an IEEE division is a function call, around which registers would be spilled. Its
// result is exact enough here, and 0 for expf(-x) = infinity.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

}  // namespace

// out = x (p + (1 - p) alpha) with p = sigmoid(gate); out is contiguous.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    dice_forward(const In* __restrict__ x, Index x_stride, const In* __restrict__ gate,
                 Index gate_stride, const Alpha* __restrict__ alpha, int alpha_step, int width,
                 Index rows, int lanes, Out* __restrict__ out) {
  const Place at_rows = place(lanes, kInFlight);
  const int c = at_rows.column;
  if (c >= width || at_rows.row >= at_rows.rows) return;
  float factor[kVec];
  read_alpha(alpha, alpha_step, c, factor);
  for (Index row = at_rows.first; row < rows; row += at_rows.step) {
    recast::Pack<In, kVec> value[kInFlight], gate_value[kInFlight];
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const Index r = row + a * at_rows.rows;
      if (r >= rows) continue;
      value[a] = recast::load<kVec>(x + r * x_stride + c);
      gate_value[a] = recast::load<kVec>(gate + r * gate_stride + c);
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const Index r = row + a * at_rows.rows;
      if (r >= rows) continue;
      recast::Pack<Out, kVec> result;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float p = sigmoid(recast::widen(gate_value[a].at[e])),
                    v = recast::widen(value[a].at[e]);
        recast::narrow(p * v + (1.0f - p) * factor[e] * v, result.at[e]);
      }
      recast::store<kVec>(out + r * width + c, result);
    }
  }
}
RECAST_KERNEL(dice_forward)

// of_x, of_gate: (rows, width), contiguous; of_alpha: (chunks, width), partial sums.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kThreads / RECAST_BLOCK)
    dice_backward(const Out* __restrict__ grad, Index grad_stride, const In* __restrict__ x,
                  Index x_stride, const In* __restrict__ gate, Index gate_stride,
                  const Alpha* __restrict__ alpha, int alpha_step, int width, Index rows, int lanes,
                  In* __restrict__ of_x, In* __restrict__ of_gate, float* __restrict__ of_alpha) {
  RECAST_SHARED(float[RECAST_BLOCK * RECAST_VEC], sums);
  constexpr int kInFlight = 2;  // more would spill registers
  const Place at_rows = place(lanes, kInFlight);
  const int c = at_rows.column;
  const bool has_work = c < width && at_rows.row < at_rows.rows;
  float sum[kVec] = {}, factor[kVec] = {};
  if (has_work) {
    read_alpha(alpha, alpha_step, c, factor);
#pragma unroll 1
    for (Index row = at_rows.first; row < rows; row += at_rows.step) {
      recast::Pack<Out, kVec> g[kInFlight];
      recast::Pack<In, kVec> value[kInFlight], gate_value[kInFlight];
#pragma unroll
      for (int a = 0; a < kInFlight; ++a) {
        const Index r = row + a * at_rows.rows;
        if (r >= rows) continue;
        g[a] = recast::load<kVec>(grad + r * grad_stride + c);
        value[a] = recast::load<kVec>(x + r * x_stride + c);
        gate_value[a] = recast::load<kVec>(gate + r * gate_stride + c);
      }
#pragma unroll
      for (int a = 0; a < kInFlight; ++a) {
        const Index r = row + a * at_rows.rows;
        if (r >= rows) continue;
        recast::Pack<In, kVec> into, into_gate;
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const float p = sigmoid(recast::widen(gate_value[a].at[e])), complement = 1.0f - p;
          const float up = recast::widen(g[a].at[e]);
          const float along = up * recast::widen(value[a].at[e]);
          recast::narrow(up * (p + complement * factor[e]), into.at[e]);
          recast::narrow(along * (1.0f - factor[e]) * p * complement, into_gate.at[e]);
          sum[e] += along * complement;
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
  if (at_rows.row != 0 || !has_work) return;
  // The thread of the first row adds the sums of the other rows to its own.
#pragma unroll 1
  for (int r = lanes; r < at_rows.rows * lanes; r += lanes)
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
  constexpr int kColumns = 8,
                kWarps = RECAST_BLOCK / 32;  // 8 columns: a 32-byte sector of each partial sum
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
