// The gradient of the weight of a scaled product, on tensor cores
// (runtime/interactions/scaled_tiles.py):
//
//     dW[n, j] = Σ_r scale[r, i] g[r, n] x[r, j]        n = e inner + i
//
// A block sums a range of rows for some n and all j, a warp for 32 n and up to 64 j. The threads
// load both operands, scale the first, and store them to double-buffered shared memory as operand
// registers (of one row in TF32, of two rows in 16 bits), while they multiply the rows before. Tile
// positions are assigned to n and j such that a lane's four elements are contiguous in memory.
//
// Macros:
//   RECAST_IN      dtype of all inputs: 0 fp32, multiplied in TF32; 1 fp16, 2 bf16; sums are fp32
//   RECAST_HALVES  groups of 32 j: ceil(depth / 32), as 1, 2 or 4
//
// Lengths of i and j, and strides of rows, are multiples of 4; four elements are read at once, and
// tensors aligned to that.
#include "scaled_tiles.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWide = RECAST_HALVES * 32;           // j of a block
constexpr int kAcross = RECAST_HALVES > 2 ? 2 : 1;  // warps along j
constexpr int kOwn = RECAST_HALVES / kAcross;       // groups of 32 j of a warp
constexpr int kHigh = kWarps / kAcross * 32;        // n of a block
constexpr int kDeep = 16;                           // operand words of a step, for each n and j
constexpr int kPitchHigh = kHigh + 8, kPitchWide = kWide + 8;  // avoid bank conflicts
constexpr int kOfHigh = kDeep * kHigh / 4 / kThreads;  // groups of four words that a thread makes
constexpr int kOfWide = (kDeep * kWide / 4 + kThreads - 1) / kThreads;
constexpr int kBufferWords = kDeep * (kPitchHigh + kPitchWide);

// Stores four operand words: of `first`, and in 16 bits of the `next` row too.
__device__ __forceinline__ void store_words(unsigned* to, const float (&first)[4],
                                            const float (&next)[4]) {
  recast::Pack<unsigned, 4> words;
#pragma unroll
  for (int c = 0; c < 4; ++c) words.at[c] = pack_operand(first[c], next[c]);
  recast::store<4>(to, words);
}

}  // namespace

// sums: (parts, count, depth). Rows come in steps of 16, of 32 for 16 bits; a part has `steps` of
// them. Launch: grid = (ceil(count / (HALVES > 2 ? 128 : 256)), parts), block = 256, dynamic shared
// memory: two buffers.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    scaled_weight(const In* __restrict__ x, Index x_stride, const In* __restrict__ scale,
                  const In* __restrict__ grad, Index rows, int count, int inner, int depth,
                  Index steps, float* __restrict__ sums) {
  RECAST_DYNAMIC_SHARED(unsigned, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, g = lane / 4, t = lane % 4;
  const int top = thread / 32 / kAcross * 32, left = thread / 32 % kAcross * kOwn * 32;
  const int first_n = static_cast<int>(blockIdx.x) * kHigh;
  constexpr Index step = kDeep * kEach;  // rows
  const Index begin = blockIdx.y * steps * step;
  const Index end = begin + steps * step < rows ? begin + steps * step : rows;

  // A thread reads the same columns all the time.
  constexpr int kFoursHigh = kHigh / 4, kFoursWide = kWide / 4;
  const int high = thread % kFoursHigh * 4, n = first_n + high, i = n % inner;
  const int wide = thread % kFoursWide * 4;
  const int high_word = thread / kFoursHigh, wide_word = thread / kFoursWide;
  Four of_grad[kOfHigh][kEach], of_scale[kOfHigh][kEach], of_x[kOfWide][kEach];
  const auto read = [&](Index from) {
#pragma unroll
    for (int a = 0; a < kOfHigh; ++a)
#pragma unroll
      for (int b = 0; b < kEach; ++b) {
        const Index row = from + (high_word + a * (kThreads / kFoursHigh)) * kEach + b;
        const bool in_range = row < end && n < count;
        of_grad[a][b] = four_at(grad + row * count + n, in_range);
        of_scale[a][b] = four_at(scale + row * inner + i, in_range);
      }
#pragma unroll
    for (int a = 0; a < kOfWide; ++a)
#pragma unroll
      for (int b = 0; b < kEach; ++b) {
        const int at = wide_word + a * (kThreads / kFoursWide);
        const Index row = from + at * kEach + b;
        of_x[a][b] = four_at(x + row * x_stride + wide, at < kDeep && row < end && wide < depth);
      }
  };
  const auto write = [&](unsigned* buffer) {
    float two[2][4];
#pragma unroll
    for (int a = 0; a < kOfHigh; ++a) {
#pragma unroll
      for (int b = 0; b < kEach; ++b)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          two[b][c] = recast::widen(of_grad[a][b].at[c]) * recast::widen(of_scale[a][b].at[c]);
      const int at = high_word + a * (kThreads / kFoursHigh);
      store_words(buffer + at * kPitchHigh + high, two[0], two[kEach - 1]);
    }
#pragma unroll
    for (int a = 0; a < kOfWide; ++a) {
#pragma unroll
      for (int b = 0; b < kEach; ++b) widen(of_x[a][b], two[b]);
      const int at = wide_word + a * (kThreads / kFoursWide);
      if (at < kDeep)
        store_words(buffer + kDeep * kPitchHigh + at * kPitchWide + wide, two[0], two[kEach - 1]);
    }
  };

  // Tile m has n 4 g + 2 m and, as rows g + 8, 4 g + 2 m + 1; tile 4 h + u has j 32 h + 4 g + u.
  float sums_of_warp[2][4 * kOwn][4] = {};
  read(begin);
  int buffer = 0;
#pragma unroll 1
  for (Index from = begin; from < end; from += step, buffer ^= 1) {
    unsigned* const own = shared + buffer * kBufferWords;
    write(own);
    __syncthreads();  // all is stored, and all threads are done with the other buffer
    if (from + step < end) read(from + step);
#pragma unroll
    for (int k = 0; k < kDeep; k += 8) {
      unsigned a[2][4], b[4 * kOwn][2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int at = k + t + 4 * q;
        const auto of_a = recast::load<4>(own + at * kPitchHigh + top + 4 * g);
#pragma unroll
        for (int m = 0; m < 4; ++m) a[m / 2][2 * q + m % 2] = of_a.at[m];
#pragma unroll
        for (int h = 0; h < kOwn; ++h) {
          const auto of_b =
              recast::load<4>(own + kDeep * kPitchHigh + at * kPitchWide + left + 32 * h + 4 * g);
#pragma unroll
          for (int u = 0; u < 4; ++u) b[4 * h + u][q] = of_b.at[u];
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int tile = 0; tile < 4 * kOwn; ++tile) multiply(sums_of_warp[m][tile], a[m], b[tile]);
    }
  }
  float* const into = sums + static_cast<Index>(blockIdx.y) * count * depth;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_n + top + 4 * g + 2 * m + r;
      if (row >= count) continue;
#pragma unroll
      for (int h = 0; h < kOwn; ++h)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const int column = left + 32 * h + 8 * t + 4 * q;
          if (column >= depth) continue;
          recast::Pack<float, 4> pack;
#pragma unroll
          for (int u = 0; u < 4; ++u) pack.at[u] = sums_of_warp[m][4 * h + u][2 * r + q];
          recast::store<4>(into + static_cast<Index>(row) * depth + column, pack);
        }
    }
}
RECAST_KERNEL(scaled_weight)
