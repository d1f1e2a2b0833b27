// What surrounds the matrix products of an mlp, one pass over memory each:
//     mlp_activate         y = dropout(relu(x)), and a bit an element: whether its gradient passes
//     mlp_mask_gradient    dx = scale * dy where the bit is set, else 0
//     mlp_output_gradient  dx = dy, but 0 where the output y of the relu is <= 0
//     mlp_sum_parts        the column sums of dx, from partial sums of the two kernels before
// A block takes tiles of rows; a thread 8 columns of some rows. mlp_rows.cuh has the mask's layout.
//
// Macros:
//   RECAST_OF     dtype of x, y and the gradients: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM    dtype of the finished sums, likewise
//   RECAST_VEC    elements read at once: 1, 2, 4 or 8; divides n, and rows start at multiples of it
//   RECAST_LANES  neighbouring threads that share a row, each with 8 columns; a power of two to 32
//   RECAST_BLOCK  threads of a block, a multiple of 32
//   RECAST_AHEAD  rows of a thread whose loads are in flight together
#include "mlp_rows.cuh"
#include "philox.cuh"

namespace {

// Dropout keeps the elements whose 32-bit random number is above `last`.
struct Dropout {
  UInt64 seed;
  int layer;
  unsigned last;
};

// Seven rounds, the fewest that pass all of BigCrush: the integer work is a bottleneck here.
__device__ __forceinline__ recast::RandomWords random(const Dropout& by, int row, int group,
                                                      unsigned half) {
  return recast::philox<7>(by.seed, 2 * group + half, row, by.layer, 0);
}

// The e-th 16-bit half of four words, in the upper half of the result; the lower half is undefined.
__device__ __forceinline__ unsigned half_of(const recast::RandomWords& words, int e) {
  return e % 2 ? words.at[e / 2] : words.at[e / 2] << 16;
}

// Random numbers for 8 elements, 16 bits each: element e is kept if half e of the result is above
// keep_limit. The upper 16 bits of an element's 32-bit number, from one Philox call for 8 elements,
// decide for all but 1 in 65536 elements. Only if some are equal to the upper bits of `last` the
// lower 16 bits are drawn by a second call; such halves become 0 or 0xffff. This halves the integer
// work, which otherwise takes as long as the memory accesses.
__device__ __forceinline__ recast::RandomWords draw(const Dropout& by, int row, int group) {
  const unsigned limit = by.last >> 16;
  recast::RandomWords upper = random(by, row, group, 0);
  unsigned open = 0;
#pragma unroll
  for (int w = 0; w < kGroup / 2; ++w) {
    const unsigned differ =
        upper.at[w] ^
        limit * 0x10001u;  // finds halves that are 0, as subtracting 1 from those borrows
    open |= (differ - 0x10001u) & ~differ;
  }
  if ((open & 0x80008000u) != 0) {
    const recast::RandomWords lower = random(by, row, group, 1);
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      const unsigned mask = 0xffffu << 16 * (e % 2);
      if (half_of(upper, e) >> 16 != limit) continue;
      const bool is_kept = half_of(lower, e) >> 16 > (by.last & 0xffffu);
      upper.at[e / 2] = (upper.at[e / 2] & ~mask) | (is_kept ? mask : 0);
    }
  }
  return upper;
}

// The limit that the half of a kept element exceeds, in its upper 16 bits. At most 0xfffe, since no
// half exceeds 0xffff.
__device__ __forceinline__ unsigned keep_limit(const Dropout& by) {
  return by.last >> 16 == 0xffffu ? 0xfffeffffu : by.last | 0xffffu;
}

}  // namespace

// x, y: (rows, n), and may be the same. y null: writes the bits only; bits null: y only.
// With `seed`, a scalar on the device, an element is kept if its random number is above
// `last_dropped`, and then multiplied by `scale`; null: no dropout. The random numbers depend on
// (seed, layer, row, column) only. The gradient of relu passes where its output is not <= 0, as in
// torch. Launch: grid = (ceil(groups / LANES), to ceil(rows / (AHEAD BLOCK / LANES))), block =
// RECAST_BLOCK, with groups = row_bytes, or ceil(n / 8) without bits.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_activate(const T* x, T* y, unsigned char* __restrict__ bits, int row_bytes,
                 const UInt64* __restrict__ seed, int layer, unsigned last_dropped, float scale,
                 int relu, int rows, int n) {
  const int group = blockIdx.x * kLanes + threadIdx.x % kLanes;
  const int column = group * kGroup;
  const bool is_there = column < n;
  const unsigned all = n - column < kGroup ? (1u << (is_there ? n - column : 0)) - 1 : 0xffu;
  const Dropout dropout = {seed != nullptr ? *seed : 0, layer, last_dropped};
  const unsigned above = keep_limit(dropout);
  const float lowest = relu_limit(relu);
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int tile = tiles - 1 - static_cast<int>(blockIdx.y); tile >= 0;
       tile -= static_cast<int>(gridDim.y)) {
    const int first = tile * kTileRows + threadIdx.x / kLanes;
    Chunk value[kInFlight][kChunks];
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int row = first + a * kRows;
#pragma unroll
      for (int p = 0; p < kChunks; ++p) {
        const int at = column + p * kChunk;
        if (at < n && row < rows) value[a][p].load(x + static_cast<Index>(row) * n + at);
      }
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int row = first + a * kRows;
      if (row >= rows) break;
      unsigned passes = 0;
      if (is_there) {
        recast::RandomWords words = {{~0u, ~0u, ~0u, ~0u}};
        if (seed != nullptr) words = draw(dropout, row, group);
#pragma unroll
        for (int p = 0; p < kChunks; ++p) {
          float made[kChunk];
          value[a][p].get(made);
#pragma unroll
          for (int e = 0; e < kChunk; ++e) {
            const int number = p * kChunk + e;
            const float now = made[e];
            const bool is_zero = now <= lowest;
            const bool keeps = !is_zero && half_of(words, number) > above;
            passes |= keeps ? 1u << number : 0u;
            made[e] = (is_zero ? 0.0f : now) * (keeps ? scale : 0.0f);
          }
          value[a][p].put(made);
          const int at = column + p * kChunk;
          if (y != nullptr && at < n) value[a][p].store(y + static_cast<Index>(row) * n + at);
        }
        passes &= all;
      }
      if (bits != nullptr && group < row_bytes)
        bits[static_cast<Index>(row) * row_bytes + group] = static_cast<unsigned char>(passes);
    }
  }
}
RECAST_KERNEL(mlp_activate)

namespace {

// dx and its column sums; ByBits: by the mask of mlp_activate, else by the output y of the relu.
template <bool ByBits>
__device__ __forceinline__ void gradient(const T* dy, const unsigned char* __restrict__ bits,
                                         int row_bytes, const T* __restrict__ y, float scale, T* dx,
                                         float* __restrict__ parts, int rows, int n) {
  RECAST_SHARED(float[kRows][kColumns], sums);
  const int lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const int left = blockIdx.x * kColumns;
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  float sum[kChunks][kChunk] = {};
  for (int tile = tiles - 1 - static_cast<int>(blockIdx.y); tile >= 0;
       tile -= static_cast<int>(gridDim.y)) {
    const int first = tile * kTileRows + down;
    Chunk given[kInFlight][kChunks], out[kInFlight][kChunks];
    unsigned passes[kInFlight] = {};
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int row = first + a * kRows;
#pragma unroll
      for (int p = 0; p < kChunks; ++p) {
        const int column = left + chunk_column(lane, p);
        if (row < rows && column < n) {
          const Index at = static_cast<Index>(row) * n + column;
          given[a][p].load(dy + at);
          if constexpr (ByBits) {
            passes[a] |= mask_bits(bits + static_cast<Index>(row) * row_bytes, column, p);
          } else {
            out[a][p].load(y + at);
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int row = first + a * kRows;
#pragma unroll
      for (int p = 0; p < kChunks; ++p) {
        const int column = left + chunk_column(lane, p);
        if (row < rows && column < n) {
          float made[kChunk], by[kChunk];
          given[a][p].get(made);
          if constexpr (!ByBits) out[a][p].get(by);
#pragma unroll
          for (int e = 0; e < kChunk; ++e) {
            if constexpr (ByBits) {
              made[e] = passes[a] >> (p * kChunk + e) & 1u ? made[e] * scale : 0.0f;
            } else {
              made[e] = by[e] <= 0.0f ? 0.0f : made[e];
            }
            sum[p][e] += made[e];
          }
          given[a][p].put(made);
          given[a][p].store(dx + static_cast<Index>(row) * n + column);
        }
      }
    }
  }
  if (parts == nullptr) return;
#pragma unroll
  for (int p = 0; p < kChunks; ++p) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) sums[down][chunk_column(lane, p) + e] = sum[p][e];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < kColumns; c += RECAST_BLOCK) {
    float total = 0.0f;
#pragma unroll 4
    for (int r = 0; r < kRows; ++r) total += sums[r][c];
    if (left + c < n) parts[static_cast<Index>(blockIdx.y) * n + left + c] = total;
  }
}

}  // namespace

// dy, dx: (rows, n), and may be the same. parts: (gridDim.y, n), the column sums of dx over each
// block's rows, before dx is rounded; or null. The order of the sums is fixed by the grid.
// Launch: grid = (ceil(n / (8 LANES)), to ceil(rows / (AHEAD BLOCK / LANES))), block =
// RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_mask_gradient(const T* dy, const unsigned char* __restrict__ bits, int row_bytes,
                      float scale, T* dx, float* __restrict__ parts, int rows, int n) {
  gradient<true>(dy, bits, row_bytes, nullptr, scale, dx, parts, rows, n);
}
RECAST_KERNEL(mlp_mask_gradient)

// The same for a relu without dropout, by its output y (rows, n), which must not be dx.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_output_gradient(const T* dy, const T* __restrict__ y, T* dx, float* __restrict__ parts,
                        int rows, int n) {
  gradient<false>(dy, nullptr, 0, y, 1.0f, dx, parts, rows, n);
}
RECAST_KERNEL(mlp_output_gradient)

// out (n,) = the sum of the `count` rows of parts (count, n), in a fixed order.
// Launch: grid = ceil(n / 32), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_sum_parts(const float* __restrict__ parts, int count, int n, Sum* out) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float total = sum_of_parts(parts, count, n);
  if (threadIdx.x < 32 && column < n) recast::narrow(total, out[column]);
}
RECAST_KERNEL(mlp_sum_parts)
