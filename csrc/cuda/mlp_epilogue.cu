// What surrounds the matrix products of an mlp, one pass over memory each:
//   forward   y = dropout(relu(x)), and one bit an element: whether its gradient passes
//   backward  dx = scale * dy where the bit is set, else 0; and the column sums of dx, in two steps
//   backward of a layer with one output, of weight w and with the gradient g of its output: the
//             same with dy = g w, an outer product that is never written; and the sums g' x and of
//             g
//
// The bits lie as cublasLt's RELU_AUX and DRELU epilogues have them: row r's are the `row_bytes`
// bytes from r * row_bytes on, a multiple of 16; column c is bit c % 8, from the lowest, of byte
// c / 8. Bits behind the last column are 0.
//
// Macros:
//   RECAST_OF     dtype of x, y and the gradients: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM    dtype of the finished sums, likewise
//   RECAST_VEC    elements read at once: 1, 2, 4 or 8; divides n, and rows start at multiples of it
//   RECAST_LANES  neighbouring threads that share a row, each with 8 columns; a power of two to 32
//   RECAST_BLOCK  threads of a block, a multiple of 32
//   RECAST_AHEAD  rows of a thread whose reads are under way at a time
#include "intrinsics.cuh"
#include "pack.cuh"
#include "philox.cuh"

namespace {

using recast::Index;
using recast::Wide;
using T = recast::Dtype<RECAST_OF>::type;
using Sum = recast::Dtype<RECAST_SUM>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kGroup = 8;  // the columns of one byte
constexpr int kRows = RECAST_BLOCK / kLanes;
constexpr int kColumns = kLanes * kGroup;
constexpr int kAhead = RECAST_AHEAD;

// The columns of a group that are there, from memory; zeros behind column n.
__device__ __forceinline__ void read(const T* row, int column, int n, float (&to)[kGroup]) {
#pragma unroll
  for (int v = 0; v < kGroup; v += kVec) {
    const auto pack =
        column + v < n ? recast::load<kVec>(row + column + v) : recast::zeros<kVec, T>();
#pragma unroll
    for (int e = 0; e < kVec; ++e) to[v + e] = recast::widen(pack.at[e]);
  }
}

__device__ __forceinline__ void write(T* row, int column, int n, const float (&from)[kGroup]) {
#pragma unroll
  for (int v = 0; v < kGroup; v += kVec) {
    recast::Pack<T, kVec> pack;
#pragma unroll
    for (int e = 0; e < kVec; ++e) recast::narrow(from[v + e], pack.at[e]);
    if (column + v < n) recast::store(row + column + v, pack);
  }
}

// Bit e: whether the 32-bit random number of column 8 group + e is above `last_dropped`. Its upper
// 16 bits, half e of the four words of one call, decide for all but 1 in 65536 elements; only where
// they are equal the lower ones, of a second call, are computed. That halves the integer work, of
// which 10 rounds for every 4 elements were as much as the reads and writes take.
__device__ __forceinline__ unsigned drawn(Wide seed, int row, int group, int layer,
                                          unsigned last_dropped) {
  const unsigned limit = last_dropped >> 16;
  const recast::RandomWords upper = recast::philox(seed, 2 * group, row, layer, 0);
  unsigned kept = 0, open = 0;
#pragma unroll
  for (int e = 0; e < kGroup; ++e) {
    const unsigned half = e % 2 ? upper.at[e / 2] >> 16 : upper.at[e / 2] & 0xffffu;
    kept |= half > limit ? 1u << e : 0u;
    open |= half == limit ? 1u << e : 0u;
  }
  if (open != 0) {
    const recast::RandomWords lower = recast::philox(seed, 2 * group + 1, row, layer, 0);
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      const unsigned half = e % 2 ? lower.at[e / 2] >> 16 : lower.at[e / 2] & 0xffffu;
      kept |= (open >> e & 1u) && half > (last_dropped & 0xffffu) ? 1u << e : 0u;
    }
  }
  return kept;
}

// The sum of column blockIdx.x * 32 + threadIdx.x of the `count` rows of parts (count, n), in a
// fixed order, for the first 32 threads; the whole block calls it.
__device__ __forceinline__ float summed(const float* parts, int count, int n) {
  constexpr int slices = RECAST_BLOCK / 32;
  RECAST_SHARED(float[slices][32], sums);
  const int slice = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < n) {
#pragma unroll 4
    for (int p = slice; p < count; p += slices) sum += parts[static_cast<Index>(p) * n + column];
  }
  sums[slice][lane] = sum;
  __syncthreads();
  float total = 0.0f;
  if (slice == 0) {
#pragma unroll
    for (int s = 0; s < slices; ++s) total += sums[s][lane];
  }
  return total;
}

}  // namespace

// x, y (rows, n), which may be one. y null: only the bits; bits null: only y.
// With `seed`, one number on the device, an element is kept where its random number is above
// `last_dropped`, and then multiplied by `scale`; null: no dropout. Equal (seed, layer) draw equal
// numbers. The gradient passes relu where its output is not <= 0, torch's own rule.
// Launch: grid = (ceil(rows / (AHEAD BLOCK / LANES)), ceil(groups / LANES)), block = RECAST_BLOCK,
// with groups = row_bytes, or ceil(n / 8) without bits.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_activate(const T* x, T* y, unsigned char* __restrict__ bits, int row_bytes,
                 const Wide* __restrict__ seed, int layer, unsigned last_dropped, float scale,
                 int relu, int rows, int n) {
  const int first = blockIdx.x * kRows * kAhead + threadIdx.x / kLanes;
  const int group = blockIdx.y * kLanes + threadIdx.x % kLanes;
  const int column = group * kGroup;
  const bool is_there = column < n;
  float value[kAhead][kGroup];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int row = first + a * kRows;
    if (is_there && row < rows) read(x + static_cast<Index>(row) * n, column, n, value[a]);
  }
  const Wide key = seed != nullptr ? *seed : 0;
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int row = first + a * kRows;
    if (row >= rows) return;
    unsigned passes = 0;
    if (is_there) {
      passes = n - column < kGroup ? (1u << (n - column)) - 1 : 0xffu;
      if (relu) {
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
          if (value[a][e] <= 0.0f) {
            value[a][e] = 0.0f;
            passes &= ~(1u << e);
          }
        }
      }
      if (seed != nullptr) {
        const unsigned kept = drawn(key, row, group, layer, last_dropped);
        passes &= kept;
#pragma unroll
        for (int e = 0; e < kGroup; ++e) value[a][e] *= kept >> e & 1u ? scale : 0.0f;
      }
      if (y != nullptr) write(y + static_cast<Index>(row) * n, column, n, value[a]);
    }
    if (bits != nullptr && group < row_bytes)
      bits[static_cast<Index>(row) * row_bytes + group] = static_cast<unsigned char>(passes);
  }
}
RECAST_KERNEL(mlp_activate)

// dy, dx (rows, n), which may be one. parts (gridDim.y, n): column sums of dx over each block's
// `rows_a_block` rows, before dx is rounded; or null. The order of the sums is fixed.
// Launch: grid = (ceil(n / (8 LANES)), ceil(rows / rows_a_block)), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_mask_gradient(const T* dy, const unsigned char* __restrict__ bits, int row_bytes,
                      float scale, T* dx, float* __restrict__ parts, int rows, int n,
                      int rows_a_block) {
  RECAST_SHARED(float[kRows][kColumns], sums);
  const int lane = threadIdx.x % kLanes;
  const int group = blockIdx.x * kLanes + lane, column = group * kGroup;
  const int first = blockIdx.y * rows_a_block;
  const int last = rows - first < rows_a_block ? rows : first + rows_a_block;
  float sum[kGroup] = {};
  if (column < n) {
    for (int at = first + threadIdx.x / kLanes; at < last; at += kAhead * kRows) {
      float value[kAhead][kGroup];
      unsigned passes[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int row = at + a * kRows;
        if (row >= last) break;
        read(dy + static_cast<Index>(row) * n, column, n, value[a]);
        passes[a] = bits[static_cast<Index>(row) * row_bytes + group];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int row = at + a * kRows;
        if (row >= last) break;
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
          value[a][e] = passes[a] >> e & 1u ? value[a][e] * scale : 0.0f;
          sum[e] += value[a][e];
        }
        write(dx + static_cast<Index>(row) * n, column, n, value[a]);
      }
    }
  }
  if (parts == nullptr) return;
#pragma unroll
  for (int e = 0; e < kGroup; ++e) sums[threadIdx.x / kLanes][lane * kGroup + e] = sum[e];
  __syncthreads();
  for (int c = threadIdx.x; c < kColumns; c += RECAST_BLOCK) {
    float total = 0.0f;
#pragma unroll 4
    for (int r = 0; r < kRows; ++r) total += sums[r][c];
    const int to = blockIdx.x * kColumns + c;
    if (to < n) parts[static_cast<Index>(blockIdx.y) * n + to] = total;
  }
}
RECAST_KERNEL(mlp_mask_gradient)

// out (n,) = the sum of the `count` rows of parts (count, n), in a fixed order.
// Launch: grid = ceil(n / 32), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_sum_parts(const float* __restrict__ parts, int count, int n, Sum* out) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float total = summed(parts, count, n);
  if (threadIdx.x < 32 && column < n) recast::narrow(total, out[column]);
}
RECAST_KERNEL(mlp_sum_parts)

// Backward of a layer with one output. g (rows), `g_stride` elements from one to the next; w (n,);
// x (rows, n) with rows `x_stride` apart; dx (rows, n) contiguous; bits null: all of it passes.
// parts (gridDim.y, 2 n + 1): over each block's `rows_a_block` rows, the column sums of dx before
// it is rounded, those of g x, and the sum of g. The order of all sums is fixed. Launch: as of
// mlp_mask_gradient.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    mlp_one_output(const T* __restrict__ g, Index g_stride, const T* __restrict__ w,
                   const T* __restrict__ x, Index x_stride, const unsigned char* __restrict__ bits,
                   int row_bytes, float scale, T* __restrict__ dx, float* __restrict__ parts,
                   int rows, int n, int rows_a_block) {
  RECAST_SHARED(float[2][kRows][kColumns], sums);
  RECAST_SHARED(float[kRows], of_g);
  const int lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const int group = blockIdx.x * kLanes + lane, column = group * kGroup;
  const int first = blockIdx.y * rows_a_block;
  const int last = rows - first < rows_a_block ? rows : first + rows_a_block;
  float dx_sum[kGroup] = {}, gx_sum[kGroup] = {}, g_sum = 0.0f;
  if (column < n) {
    float factor[kGroup];
    read(w, column, n, factor);
    for (int at = first + down; at < last; at += kAhead * kRows) {
      float value[kAhead][kGroup], gradient[kAhead];
      unsigned passes[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int row = at + a * kRows;
        if (row >= last) break;
        read(x + row * x_stride, column, n, value[a]);
        gradient[a] = recast::widen(g[row * g_stride]);
        passes[a] = bits != nullptr ? bits[static_cast<Index>(row) * row_bytes + group]
                                    : (1u << kGroup) - 1;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int row = at + a * kRows;
        if (row >= last) break;
        g_sum += gradient[a];
#pragma unroll
        for (int e = 0; e < kGroup; ++e) {
          gx_sum[e] += gradient[a] * value[a][e];
          value[a][e] = passes[a] >> e & 1u ? gradient[a] * factor[e] * scale : 0.0f;
          dx_sum[e] += value[a][e];
        }
        write(dx + static_cast<Index>(row) * n, column, n, value[a]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kGroup; ++e) {
    sums[0][down][lane * kGroup + e] = dx_sum[e];
    sums[1][down][lane * kGroup + e] = gx_sum[e];
  }
  if (lane == 0) of_g[down] = g_sum;
  __syncthreads();
  float* const to = parts + static_cast<Index>(blockIdx.y) * (2 * n + 1);
  for (int c = threadIdx.x; c < 2 * kColumns; c += RECAST_BLOCK) {
    const int which = c / kColumns, at = blockIdx.x * kColumns + c % kColumns;
    float total = 0.0f;
#pragma unroll 4
    for (int r = 0; r < kRows; ++r) total += sums[which][r][c % kColumns];
    if (at < n) to[which * n + at] = total;
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  float total = 0.0f;
  for (int r = 0; r < kRows; ++r) total += of_g[r];
  to[2 * n] = total;
}
RECAST_KERNEL(mlp_one_output)

// The sums of the `count` parts of mlp_one_output: of_dx, of_gx (n,), of_g (1,). The first and the
// last may be null.
// Launch: grid = ceil((2 n + 1) / 32), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_one_output_sums(const float* __restrict__ parts, int count, int n, Sum* of_dx, Sum* of_gx,
                        Sum* of_g) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float total = summed(parts, count, 2 * n + 1);
  if (threadIdx.x >= 32 || column > 2 * n) return;
  Sum* const to = column < n ? of_dx : column < 2 * n ? of_gx : of_g;
  if (to != nullptr) recast::narrow(total, to[column < n ? column : (column - n) % n]);
}
RECAST_KERNEL(mlp_one_output_sums)
