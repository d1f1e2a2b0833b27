// A linear layer with one output, of weight w (n,), reading its input once each way:
//     mlp_one_output_forward   y = x w + b
//     mlp_one_output           with g the gradient of y: dx = scale * g w where the mask of the
//                              layer below passes, else 0 (the outer product g w is never
//                              written); and partial sums of dx over rows, of g' x and of g
//     mlp_one_output_sums      those sums, added up in a fixed order
// A block takes tiles of rows; groups of LANES threads share a row. mlp_rows.cuh has the mask's
// layout.
//
// Macros:
//   RECAST_OF     dtype of x, y and the gradients: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM    dtype of the finished sums, likewise
//   RECAST_VEC    elements read at once: 1, 2, 4 or 8; divides n, and rows start at multiples of it
//   RECAST_LANES  neighbouring threads that share a row, each with 8 columns; a power of two to 32
//   RECAST_BLOCK  threads of a block, a multiple of 32
//   RECAST_AHEAD  rows of a thread whose loads are in flight together
#include "mlp_rows.cuh"

namespace {

// Resident blocks of mlp_one_output on a multiprocessor, as registers allow for this number of
// rows.
constexpr int kResident = kInFlight * sizeof(T) <= 8 ? 3 : 2;

}  // namespace

// Forward of a layer with one output: y (rows) = x w + b, summed in fp32 in a fixed order. x (rows,
// n) with rows `x_stride` apart; w (n,); b one element, or null.
// Launch: grid = (1, to ceil(rows / (AHEAD BLOCK / LANES))), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_one_output_forward(const T* __restrict__ x, Index x_stride, const T* __restrict__ w,
                           const T* __restrict__ b, T* __restrict__ y, int rows, int n) {
  const int lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const float added = b != nullptr ? recast::widen(*b) : 0.0f;
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int tile = tiles - 1 - static_cast<int>(blockIdx.y); tile >= 0;
       tile -= static_cast<int>(gridDim.y)) {
    const int first = tile * kTileRows + down;
    float sum[kInFlight] = {};
    for (int left = 0; left < n; left += kColumns) {
      Chunk given[kInFlight][kChunks], factor[kChunks];
#pragma unroll
      for (int p = 0; p < kChunks; ++p) {
        const int column = left + chunk_column(lane, p);
        if (column < n) factor[p].load(w + column);
#pragma unroll
        for (int a = 0; a < kInFlight; ++a) {
          const int row = first + a * kRows;
          if (row < rows && column < n) given[a][p].load(x + row * x_stride + column);
        }
      }
#pragma unroll
      for (int p = 0; p < kChunks; ++p) {
        const int column = left + chunk_column(lane, p);
        float by[kChunk];
        factor[p].get(by);
#pragma unroll
        for (int a = 0; a < kInFlight; ++a) {
          float of_x[kChunk];
          given[a][p].get(of_x);
          if (first + a * kRows < rows && column < n) {
#pragma unroll
            for (int e = 0; e < kChunk; ++e) sum[a] += of_x[e] * by[e];
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2)
        sum[a] += __shfl_xor_sync(0xffffffffu, sum[a], distance);
      const int row = first + a * kRows;
      if (lane == 0 && row < rows) recast::narrow(sum[a] + added, y[row]);
    }
  }
}
RECAST_KERNEL(mlp_one_output_forward)

// Backward of a layer with one output. g (rows), `g_stride` elements from one to the next; w (n,);
// x (rows, n) with rows `x_stride` apart; dx (rows, n) contiguous. `by`: 0 all of dx passes, 1 by
// `bits`, 2 by x, which is the output of a relu. parts (gridDim.y, 2 n + 1): over each block's
// rows, the column sums of dx before it is rounded, those of g x, and the sum of g. The order of
// all sums is fixed by the grid. Launch: as of mlp_mask_gradient.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    mlp_one_output(const T* __restrict__ g, Index g_stride, const T* __restrict__ w,
                   const T* __restrict__ x, Index x_stride, int by,
                   const unsigned char* __restrict__ bits, int row_bytes, float scale,
                   T* __restrict__ dx, float* __restrict__ parts, int rows, int n) {
  RECAST_SHARED(float[2][kRows][kColumns], sums);
  RECAST_SHARED(float[kRows], g_of_row);
  const int lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const int left = blockIdx.x * kColumns;
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  float dx_sum[kChunks][kChunk] = {}, gx_sum[kChunks][kChunk] = {}, g_sum = 0.0f;
  float factor[kChunks][kChunk] = {};
  const float lowest = relu_limit(by == 2);
#pragma unroll
  for (int p = 0; p < kChunks; ++p) {
    const int column = left + chunk_column(lane, p);
    if (column < n) {
      Chunk of_w;
      of_w.load(w + column);
      of_w.get(factor[p]);
    }
  }
  for (int tile = tiles - 1 - static_cast<int>(blockIdx.y); tile >= 0;
       tile -= static_cast<int>(gridDim.y)) {
    const int first = tile * kTileRows + down;
    Chunk given[kInFlight][kChunks];
    T gradient[kInFlight];
    unsigned passes[kInFlight];
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int row = first + a * kRows;
      if (row < rows) gradient[a] = g[row * g_stride];
      passes[a] = by == 1 ? 0 : ~0u;
#pragma unroll
      for (int p = 0; p < kChunks; ++p) {
        const int column = left + chunk_column(lane, p);
        if (row < rows && column < n) {
          given[a][p].load(x + row * x_stride + column);
          if (by == 1)
            passes[a] |= mask_bits(bits + static_cast<Index>(row) * row_bytes, column, p);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int row = first + a * kRows;
      if (row >= rows) break;
      const float of_row = recast::widen(gradient[a]);
      g_sum += of_row;
#pragma unroll
      for (int p = 0; p < kChunks; ++p) {
        const int column = left + chunk_column(lane, p);
        if (column < n) {
          float made[kChunk];
          given[a][p].get(made);
#pragma unroll
          for (int e = 0; e < kChunk; ++e) {
            const float input = made[e];
            gx_sum[p][e] += of_row * input;
            const bool is_zero = input <= lowest || !(passes[a] >> (p * kChunk + e) & 1u);
            made[e] = is_zero ? 0.0f : of_row * factor[p][e] * scale;
            dx_sum[p][e] += made[e];
          }
          given[a][p].put(made);
          given[a][p].store(dx + static_cast<Index>(row) * n + column);
        }
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kChunks; ++p) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      sums[0][down][chunk_column(lane, p) + e] = dx_sum[p][e];
      sums[1][down][chunk_column(lane, p) + e] = gx_sum[p][e];
    }
  }
  if (lane == 0) g_of_row[down] = g_sum;
  __syncthreads();
  float* const to = parts + static_cast<Index>(blockIdx.y) * (2 * n + 1);
  for (int c = threadIdx.x; c < 2 * kColumns; c += RECAST_BLOCK) {
    const int which = c / kColumns, at = left + c % kColumns;
    float total = 0.0f;
#pragma unroll 4
    for (int r = 0; r < kRows; ++r) total += sums[which][r][c % kColumns];
    if (at < n) to[which * n + at] = total;
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  float total = 0.0f;
  for (int r = 0; r < kRows; ++r) total += g_of_row[r];
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
  const float total = sum_of_parts(parts, count, 2 * n + 1);
  if (threadIdx.x >= 32 || column > 2 * n) return;
  Sum* const to = column < n ? of_dx : column < 2 * n ? of_gx : of_g;
  if (to != nullptr) recast::narrow(total, to[column < n ? column : (column - n) % n]);
}
RECAST_KERNEL(mlp_one_output_sums)
