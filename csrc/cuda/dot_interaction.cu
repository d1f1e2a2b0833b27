// Dot products of all or listed pairs of a sample's F feature vectors. With T (F, D) the vectors of
// a sample and Z = T T':
//   forward   out = [ dense | Z[i, j] of the pairs | zeros ]
//   backward  dT = (G + G') T with G[i, j] = the sum of the gradients of the pair's columns
//
// A block takes SAMPLES samples: it loads their vectors to shared memory straight from the separate
// feature tensors, without concatenating them first, multiplies there (by 4 x 4 tiles of a thread
// in fp32, by mma of a warp otherwise), and writes whole rows of the output.
//
// Macros:
//   RECAST_FEATURES, RECAST_DIM  F and D
//   RECAST_PAIRS    0: the pairs in a list; else all pairs in row-major order: 1: j < i,
//                   2: j <= i, 3: j > i
//   RECAST_IN       dtype of features and of their gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_ELEMENT  dtype of the operands: 0 fp32; on tensor cores 1 fp16, 2 bf16, 3 TF32. Features
//                   are rounded to it as they are read, G + G' as it is built; sums are fp32
//   RECAST_OUT      dtype of the dense part, the output and its gradient, as RECAST_IN
//   RECAST_VEC      elements read at once: divides D and all feature strides, and feature rows
//                   start at multiples of VEC elements; 1, 2, 4, and 8 for 16-bit features
//   RECAST_SAMPLES  samples of a block
//   RECAST_BLOCK    its threads, a multiple of 32
//
// Launch: grid = ceil(batch / SAMPLES), block = RECAST_BLOCK, dynamic shared memory as
// said at each kernel.
#include "intrinsics.cuh"
#include "pack.cuh"

#ifndef RECAST_GATHER
#define RECAST_GATHER 0  // 1 in dot_gathered.cu, where rows may be looked up
#endif

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Out = recast::Dtype<RECAST_OUT>::type;
#if RECAST_ELEMENT == 3
using Element = unsigned;  // the bits of a TF32 number
#else
using Element = recast::Dtype<RECAST_ELEMENT>::type;
#endif

#include "dot_pairs.cuh"

constexpr int kD = RECAST_DIM;
constexpr int kVec = RECAST_VEC;
constexpr int kSamples = RECAST_SAMPLES;
constexpr int kRound = RECAST_ELEMENT == 0 ? 4 : 16;
constexpr int kRows = (kF + kRound - 1) / kRound * kRound;  // padded with rows of zeros
constexpr int kDepth = (kD + kRound - 1) / kRound * kRound;

// Rows in shared memory are padded by 16 bytes against bank conflicts.
constexpr int kSpare = 16 / static_cast<int>(sizeof(Element));
constexpr int kStride = kDepth + kSpare;
constexpr int kSquare = kRows + kSpare;  // row stride of G + G'

constexpr int kReads = 4;  // loads of pair gradients that a thread has in flight

[[maybe_unused]] constexpr int kSums = kProducts > 0 ? kProducts : 1;  // never 0: a divisor

__device__ __forceinline__ constexpr int round_16(int bytes) { return (bytes + 15) / 16 * 16; }
constexpr int kRowsBytes = kRows * kStride * static_cast<int>(sizeof(Element));

__device__ __forceinline__ void narrow(float x, Element& to) {
#if RECAST_ELEMENT == 3
  to = recast::to_tf32(x);
#else
  recast::narrow(x, to);
#endif
}

struct Pair {
  int i, j;
};

// The w-th of all pairs that RECAST_PAIRS selects, in an order that needs neither a search nor a
// square root: of n rows, the i-th and the (n - i)-th have n pairs j < i together. Consecutive w
// are mostly consecutive columns of a row.
__device__ __forceinline__ Pair pair_of(int w) {
  constexpr int n = kF + (RECAST_PAIRS == 2);  // j <= i is j < i + 1
  const int i = w / n + 1, c = w % n;
  const Pair below = c < i ? Pair{i, c} : Pair{n - i, c - i};
  if (RECAST_PAIRS == 2) return {below.i - 1, below.j};
  if (RECAST_PAIRS == 3) return {kF - 1 - below.j, kF - 1 - below.i};
  return below;
}

#include "dot_rows.cuh"

#if RECAST_ELEMENT != 0

#include "dot_mma.cuh"

constexpr int kAcross = 4;  // tiles of 8 columns that a warp multiplies by 16 rows
constexpr int kWord = 4 / static_cast<int>(sizeof(Element));  // elements

// Loads the left operand, 16 rows x 32 bytes. Tiles by (rows, columns): (low, low), (high, low) ...
__device__ __forceinline__ void left_factor(unsigned (&a)[4], const Element* from, int stride) {
  const int lane = threadIdx.x % 32;
  recast::load_tiles(a, from + lane % 16 * stride + lane / 16 * 4 * kWord);
}

#if RECAST_IN != 0 && RECAST_VEC == 8
// A 4 x 4 transpose over four lanes by shuffles. Before, lane t holds columns 2t, 2t+1 of four
// tiles of a row; afterwards all eight columns of tile t, which one instruction stores.
__device__ __forceinline__ recast::Pack<In, 8> transposed(
    const recast::Pack<In, 2> (&pairs)[kAcross]) {
  static_assert(kAcross == 4, "as many tiles as lanes of a row");
  __align__(16) unsigned words[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) words[n] = *reinterpret_cast<const unsigned*>(&pairs[n]);
#pragma unroll
  for (int lane_distance = 1; lane_distance < 4; lane_distance *= 2) {
    const bool upper = threadIdx.x & lane_distance;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & lane_distance) continue;
      const unsigned received =
          __shfl_xor_sync(0xffffffffu, upper ? words[n] : words[n + lane_distance], lane_distance);
      if (upper)
        words[n] = received;
      else
        words[n + lane_distance] = received;
    }
  }
  return *reinterpret_cast<const recast::Pack<In, 8>*>(words);
}
#endif

// Products of one sample by a warp: 16 rows by up to 8 * kAcross rows.
__device__ __forceinline__ void products(const Element* rows, float* to, int item) {
  constexpr int chunks = (kRows + 8 * kAcross - 1) / (8 * kAcross);
  const int top = item / chunks * 16, left = item % chunks * 8 * kAcross;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float c[kAcross][4] = {};
  for (int d = 0; d < kDepth; d += 8 * kWord) {
    unsigned a[4];
    left_factor(a, rows + top * kStride + d, kStride);
#pragma unroll
    for (int n = 0; n < kAcross; n += 2) {
      if (left + 8 * n > top)
        continue;  // both tiles are above the diagonal: left and top are multiples of 16
      // B' of two tiles: (rows, columns): (low, low), (low, high), (high, low) ...
      unsigned b[4];
      const int row = left + 8 * n + lane / 16 * 8 + lane % 8;
      recast::load_tiles(b, rows + row * kStride + d + lane / 8 % 2 * 4 * kWord);
      multiply(c[n], a, b[0], b[1]);
      multiply(c[n + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < kAcross; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = top + g + e / 2 * 8, j = left + 8 * n + 2 * t + e % 2;
      const int at = i < kF && j <= i ? place(i, j) : -1;
      if (at >= 0) to[at] = c[n][e];
    }
}
constexpr int kItems = kRows / 16 * ((kRows + 8 * kAcross - 1) / (8 * kAcross));

#else

constexpr int kSlices = kDepth >= 64 ? 4 : 1;  // neighbouring threads that divide a tile's sums
// Tiles of 4 x 4 products, on or below the diagonal.
constexpr int kItems = kRows / 4 * (kRows / 4 + 1) / 2 * kSlices;

// Products of one sample by a thread: a tile of 4 x 4.
__device__ __forceinline__ void products(const float* rows, float* to, int item) {
  const int tile = item / kSlices, slice = item % kSlices;
  int down = 0;
  while ((down + 1) * (down + 2) / 2 <= tile) ++down;
  const int top = down * 4, left = (tile - down * (down + 1) / 2) * 4;
  float sum[4][4] = {};
#pragma unroll 2
  for (int d = slice * 4; d < kDepth; d += kSlices * 4) {
    recast::Pack<float, 4> a[4], b[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      a[r] = recast::load<4>(rows + (top + r) * kStride + d);
      b[r] = recast::load<4>(rows + (left + r) * kStride + d);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j] += a[i].at[e] * b[j].at[e];
  }
  const unsigned mask = ((1u << kSlices) - 1) << (threadIdx.x % 32 / kSlices * kSlices);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int d = kSlices / 2; d > 0; d /= 2)
        sum[i][j] += __shfl_xor_sync(mask, sum[i][j], d, kSlices);
      if (slice != i % kSlices) continue;
      const int row = top + i, column = left + j;
      const int at = row < kF && column <= row ? place(row, column) : -1;
      if (at >= 0) to[at] = sum[i][j];
    }
}

#endif

}  // namespace

// out (batch, width + n_pairs + pad) with any row stride; dense (batch, width), or null with width
// 0. With RECAST_PAIRS 0, pairs[p] = i * F + j with j <= i; else null, and n_pairs is that of all.
// Shared bytes: SAMPLES * (bytes of F padded rows + 4 * products), each part rounded up to 16:
//   rows: roundup(F, R) * (roundup(D, R) * size + 16) with R = 4, or 16 on tensor cores, and the
//   size of an element; products: F F with RECAST_PAIRS 0, else n_pairs.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    dot_forward(const Row* __restrict__ rows, const Out* __restrict__ dense, Index dense_stride,
                int width, const int* __restrict__ pairs, int n_pairs, int pad, int batch, Out* out,
                Index out_stride RECAST_SOURCES) {
  RECAST_DYNAMIC_SHARED(unsigned char, shared);
  constexpr int bytes = round_16(kRowsBytes) + round_16(4 * kProducts);
  const int first = blockIdx.x * kSamples;
  const int count = batch - first < kSamples ? batch - first : kSamples;
#if RECAST_GATHER
  gather(rows, first, count, shared, bytes, sources, errors);
#else
  gather(rows, first, count, shared, bytes);
#endif
  await_rows();
#if RECAST_ELEMENT != 0
  constexpr int step = RECAST_BLOCK / 32;
  const int worker = threadIdx.x / 32;  // a warp
#else
  constexpr int step = RECAST_BLOCK;
  const int worker = threadIdx.x;
#endif
  for (int w = worker; w < count * kItems; w += step) {
    unsigned char* const sample_rows = shared + w / kItems * bytes;
    products(reinterpret_cast<const Element*>(sample_rows),
             reinterpret_cast<float*>(sample_rows + round_16(kRowsBytes)), w % kItems);
  }
  __syncthreads();
  const int all = width + n_pairs + pad;
  int s = 0;
  for (int c = threadIdx.x; s < count; c += RECAST_BLOCK) {
    for (; s < count && c >= all; c -= all) ++s;
    if (s == count) break;
    const int p = c - width;
    float value = 0.0f;
    if (p < 0)
      value = recast::widen(dense[(first + s) * dense_stride + c]);
    else if (p < n_pairs)
      value = reinterpret_cast<const float*>(
          shared + s * bytes + round_16(kRowsBytes))[RECAST_PAIRS == 0 ? pairs[p] : p];
    recast::narrow(value, out[(first + s) * out_stride + c]);
  }
}
RECAST_KERNEL(dot_forward)

// grad (batch, width + n_pairs + pad) with any row stride. grads[r].at is null where row r needs no
// gradient; `same` >= 0: row `same` is also the dense part, and gets the gradient of the
// first columns too.
// With RECAST_PAIRS 0, cells[c] = i * F + j with j <= i are the n_cells distinct pairs, and
// columns[starts[c] .. starts[c + 1]) say which of the n_pairs columns are theirs; else null.
// Shared bytes: SAMPLES * (bytes of the padded rows, as above + roundup(F, R) *
// (roundup(F, R) * size + 16)), each part rounded up to 16.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    dot_backward(const Row* __restrict__ rows, const Out* __restrict__ grad, Index grad_stride,
                 int width, const int* __restrict__ cells, const int* __restrict__ starts,
                 const int* __restrict__ columns, int n_cells, int batch, int same,
                 const Row* __restrict__ grads RECAST_SOURCES) {
  RECAST_DYNAMIC_SHARED(unsigned char, shared);
  constexpr int square_bytes = kRows * kSquare * static_cast<int>(sizeof(Element));
  constexpr int bytes = round_16(kRowsBytes) + round_16(square_bytes);
  const int first = blockIdx.x * kSamples;
  const int count = batch - first < kSamples ? batch - first : kSamples;
  unsigned char* const squares = shared + round_16(kRowsBytes);
  clear<square_bytes>(squares, count, bytes);
#if RECAST_GATHER
  gather(rows, first, count, shared, bytes, sources, errors);
#else
  gather(rows, first, count, shared, bytes);
#endif
  __syncthreads();
  const auto set_pair = [&](int s, int i, int j, float value) {
    Element* const square = reinterpret_cast<Element*>(squares + s * bytes);
    narrow(value, square[i * kSquare + j]);
    if (i != j) narrow(value, square[j * kSquare + i]);
  };
  if constexpr (RECAST_PAIRS != 0) {
    // Each gradient is loaded once, kReads in flight, while the copies of the rows complete.
    const int all = count * kProducts;
    for (int from = threadIdx.x; from < all; from += kReads * RECAST_BLOCK) {
      Out read[kReads];
#pragma unroll
      for (int k = 0; k < kReads; ++k) {
        const int w = from + k * RECAST_BLOCK;
        const Pair pair = pair_of(w % kSums);
        if (w < all)
          read[k] = grad[(first + w / kSums) * grad_stride + width + place(pair.i, pair.j)];
      }
#pragma unroll
      for (int k = 0; k < kReads; ++k) {
        const int w = from + k * RECAST_BLOCK;
        const Pair pair = pair_of(w % kSums);
        const float times = pair.i == pair.j ? 2.0f : 1.0f;
        if (w < all) set_pair(w / kSums, pair.i, pair.j, times * recast::widen(read[k]));
      }
    }
  } else {
    for (int w = threadIdx.x; w < count * n_cells; w += RECAST_BLOCK) {
      const int s = w / n_cells, c = w % n_cells, i = cells[c] / kF, j = cells[c] % kF;
      const Out* const from = grad + (first + s) * grad_stride + width;
      float sum = 0.0f;
      for (int k = starts[c]; k < starts[c + 1]; ++k) sum += recast::widen(from[columns[k]]);
      set_pair(s, i, j, i == j ? 2.0f * sum : sum);
    }
  }
  await_rows();
#if RECAST_ELEMENT != 0
  // A warp for each 16 rows and 8 * kAcross columns of dT.
  constexpr int chunks = (kDepth + 8 * kAcross - 1) / (8 * kAcross);
  constexpr int items = kRows / 16 * chunks;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int w = threadIdx.x / 32; w < count * items; w += RECAST_BLOCK / 32) {
    const int s = w / items, top = w % items / chunks * 16, left = w % chunks * 8 * kAcross;
    const Element* const sample_rows = reinterpret_cast<const Element*>(shared + s * bytes);
    const Element* const square =
        reinterpret_cast<const Element*>(shared + s * bytes + round_16(kRowsBytes));
    float sum[kAcross][4] = {};
    for (int k = 0; k < kRows; k += 8 * kWord) {
      unsigned a[4];
      left_factor(a, square + top * kSquare + k, kSquare);
#pragma unroll
      for (int n = 0; n < kAcross; n += 2) {
        if (left + 8 * n >= kDepth) continue;
#if RECAST_ELEMENT == 3
        const Element* const from = sample_rows + (k + t) * kStride + left + 8 * n + g;
        multiply(sum[n], a, from[0], from[4 * kStride]);
        multiply(sum[n + 1], a, from[8], from[4 * kStride + 8]);
#else
        // B of two tiles: (rows, columns): (low, low), (high, low), (low, high) ...
        unsigned b[4];
        recast::load_transposed_tiles(
            b, sample_rows + (k + lane % 16) * kStride + left + 8 * n + lane / 16 * 8);
        multiply(sum[n], a, b[0], b[1]);
        multiply(sum[n + 1], a, b[2], b[3]);
#endif
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = top + g + half * 8;
      const Row into = row < kF ? grads[row] : Row{nullptr, 0};
      In* const to = into.at + (into.at == nullptr ? 0 : (first + s) * into.stride);
      const Out* const dense_grad = grad + (first + s) * grad_stride;
      if (row == same) {
#pragma unroll
        for (int n = 0; n < kAcross; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int c = left + 8 * n + 2 * t + e;
            if (c < kD) sum[n][2 * half + e] += recast::widen(dense_grad[c]);
          }
      }
      recast::Pack<In, 2> pairs[kAcross];
#pragma unroll
      for (int n = 0; n < kAcross; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) recast::narrow(sum[n][2 * half + e], pairs[n].at[e]);
#if RECAST_IN != 0 && RECAST_VEC == 8
      const auto columns = transposed(pairs);
      if (to != nullptr && left + 8 * t < kD) recast::store<8>(to + left + 8 * t, columns);
#else
      if (to == nullptr) continue;
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
        const int c = left + 8 * n + 2 * t;
        if (kVec > 1 && c < kD) recast::store<2>(to + c, pairs[n]);
        if (kVec == 1 && c < kD) to[c] = pairs[n].at[0];
        if (kVec == 1 && c + 1 < kD) to[c + 1] = pairs[n].at[1];
      }
#endif
    }
  }
#else
  // A thread for each 4 rows and 4 columns of dT; neighbours take neighbouring columns.
  constexpr int across = kDepth / 4, items = kRows / 4 * across;
  for (int w = threadIdx.x; w < count * items; w += RECAST_BLOCK) {
    const int s = w / items, top = w % items / across * 4, left = w % across * 4;
    const Element* const sample_rows = reinterpret_cast<const Element*>(shared + s * bytes);
    const Element* const square =
        reinterpret_cast<const Element*>(shared + s * bytes + round_16(kRowsBytes));
    float sum[4][4] = {};
#pragma unroll 4
    for (int k = 0; k < kF; ++k) {
      const auto factor = recast::load<4>(square + k * kSquare + top);  // symmetric
      const auto row = recast::load<4>(sample_rows + k * kStride + left);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[r][e] += factor.at[r] * row.at[e];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (top + r >= kF || grads[top + r].at == nullptr) continue;
      In* const to = grads[top + r].at + (first + s) * grads[top + r].stride + left;
      const Out* const dense_grad = grad + (first + s) * grad_stride + left;
      recast::Pack<In, 4> pack;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (left + e < kD)
          recast::narrow(sum[r][e] + (top + r == same ? recast::widen(dense_grad[e]) : 0.0f),
                         pack.at[e]);
      if (kVec >= 4) {
        recast::store<4>(to, pack);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (left + e < kD) to[e] = pack.at[e];
      }
    }
  }
#endif
}
RECAST_KERNEL(dot_backward)
