// Dot products of pairs of feature vectors, one sample or several a block; no concatenation of the
// features is ever written. With T = the F rows of a sample, (F, D), and Z = T T':
//   forward   out = [ dense | Z[i, j] of the pairs | zeros ]
//   backward  dT = (G + G') T with G[i, j] = the sum of the gradients of the pair's columns
//
// Macros:
//   RECAST_FEATURES, RECAST_DIM  F and D
//   RECAST_PAIRS    0: any pairs, from lists; else all pairs in row-major order: 1: j < i, 2: j <=
//   i,
//                   3: j > i
//   RECAST_IN       dtype of features, dense part and their gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_OUT      dtype of the output and its gradient, likewise; sums are fp32
//   RECAST_VEC      elements read at once: divides D and all feature strides, and feature rows
//   start
//                   at multiples of VEC elements; 1, 2, 4, and 8 for 16-bit features
//   RECAST_TENSOR   1: on tensor cores, for 16-bit features with D a multiple of 16, IN == OUT
//   RECAST_SAMPLES  samples of a block
//   RECAST_BLOCK    its threads, a multiple of 32
//
// Launch: grid = ceil(batch / SAMPLES), block = RECAST_BLOCK, dynamic shared memory as
// said at each kernel.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

constexpr int kF = RECAST_FEATURES;
constexpr int kD = RECAST_DIM;
constexpr int kVec = RECAST_VEC;
constexpr int kSamples = RECAST_SAMPLES;
constexpr int kRound = RECAST_TENSOR ? 16 : 4;
constexpr int kRows = (kF + kRound - 1) / kRound * kRound;  // those behind F are zeros
constexpr int kDepth = (kD + 3) / 4 * 4;

// In shared memory rows lie so far apart that neighbouring rows fall into other banks.
#if RECAST_TENSOR
using Element = In;
constexpr int kStride = kDepth + 8;
constexpr int kSquare = kRows + 8;  // row stride of G + G'
#else
using Element = float;
constexpr int kStride = kDepth + 4;
constexpr int kSquare = kRows + 4;
#endif

constexpr int kProducts = RECAST_PAIRS == 0   ? kF * kF
                          : RECAST_PAIRS == 2 ? kF * (kF + 1) / 2
                                              : kF * (kF - 1) / 2;

// One row of all samples: where sample 0's starts, and elements from one sample's to the next.
struct Row {
  In* at;
  Index stride;
};

__device__ __forceinline__ constexpr int round_16(int bytes) { return (bytes + 15) / 16 * 16; }
constexpr int kRowsBytes = kRows * kStride * static_cast<int>(sizeof(Element));

// Place of the pair (i, j) with j <= i among the products; -1: not asked for.
__device__ __forceinline__ int place(int i, int j) {
#if RECAST_PAIRS == 0
  return i * kF + j;
#elif RECAST_PAIRS == 1
  return i == j ? -1 : i * (i - 1) / 2 + j;
#elif RECAST_PAIRS == 2
  return i * (i + 1) / 2 + j;
#else
  return i == j ? -1 : j * kF - j * (j + 1) / 2 + i - j - 1;
#endif
}

// Rows of one sample into shared memory; the space behind them is zero.
__device__ __forceinline__ void gather(const Row* rows, Index sample, Element* to, int first,
                                       int threads) {
  constexpr int packs = kD / kVec;
  for (int w = first; w < kF * packs; w += threads) {
    const int r = w / packs, c = w % packs * kVec;
    const auto read = recast::load<kVec>(rows[r].at + sample * rows[r].stride + c);
    recast::Pack<Element, kVec> pack;
#pragma unroll
    for (int e = 0; e < kVec; ++e) recast::narrow(recast::widen(read.at[e]), pack.at[e]);
    recast::store<kVec>(to + r * kStride + c, pack);
  }
  for (int r = first; r < kF; r += threads)
    for (int c = kD; c < kDepth; ++c) recast::narrow(0.0f, to[r * kStride + c]);
  for (int w = first; w < (kRows - kF) * kDepth; w += threads)
    recast::narrow(0.0f, to[(kF + w / kDepth) * kStride + w % kDepth]);
}

#if RECAST_TENSOR

__device__ __forceinline__ unsigned pair_at(const In* from) {
  return *reinterpret_cast<const unsigned*>(from);
}

// A[row .., column ..] and, for b, the transpose of a stretch of 8 rows: see mma_bf16.
__device__ __forceinline__ void fragment_a(const In* from, int stride, unsigned (&a)[4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const In* const low = from + g * stride + 2 * t;
  a[0] = pair_at(low);
  a[1] = pair_at(low + 8 * stride);
  a[2] = pair_at(low + 8);
  a[3] = pair_at(low + 8 * stride + 8);
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
#if RECAST_IN == 1
  recast::mma_fp16(c, a, b, c);
#else
  recast::mma_bf16(c, a, b, c);
#endif
}

// The products of one sample's rows, a warp for each 16 x 8 of them.
__device__ __forceinline__ void products(const In* rows, float* to, int warp, int warps) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  constexpr int columns = kRows / 8;
  for (int w = warp; w < kRows / 16 * columns; w += warps) {
    const int top = w / columns * 16, left = w % columns * 8;
    if (left > top + 15) continue;
    float c[4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; d += 16) {
      unsigned a[4], b[2];
      fragment_a(rows + top * kStride + d, kStride, a);
      const In* const right = rows + (left + g) * kStride + d + 2 * t;
      b[0] = pair_at(right);
      b[1] = pair_at(right + 8);
      multiply(c, a, b);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = top + g + e / 2 * 8, j = left + 2 * t + e % 2;
      const int at = i < kF && j <= i ? place(i, j) : -1;
      if (at >= 0) to[at] = c[e];
    }
  }
}

#else

constexpr int kTiles = kRows / 4 * (kRows / 4 + 1) / 2;  // 4 x 4 products, on or below the diagonal
constexpr int kSlices = kDepth >= 64 ? 4 : 1;            // neighbours that share a tile's sums

// The products of one sample's rows.
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
//   rows: roundup(F, R) * (roundup(D, 4) + S) * element with R, S, element = 4, 4, 4 bytes, or on
//   tensor cores 16, 8, 2 bytes; products: F F with RECAST_PAIRS 0, else n_pairs.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    dot_forward(const Row* __restrict__ rows, const In* __restrict__ dense, Index dense_stride,
                int width, const int* __restrict__ pairs, int n_pairs, int pad, int batch, Out* out,
                Index out_stride) {
  RECAST_DYNAMIC_SHARED(unsigned char, shared);
  constexpr int bytes = round_16(kRowsBytes) + round_16(4 * kProducts);
  const int first = blockIdx.x * kSamples;
  const int count = batch - first < kSamples ? batch - first : kSamples;
  for (int s = 0; s < count; ++s)
    gather(rows, first + s, reinterpret_cast<Element*>(shared + s * bytes), threadIdx.x,
           RECAST_BLOCK);
  __syncthreads();
#if RECAST_TENSOR
  for (int s = 0; s < count; ++s)
    products(reinterpret_cast<const Element*>(shared + s * bytes),
             reinterpret_cast<float*>(shared + s * bytes + round_16(kRowsBytes)), threadIdx.x / 32,
             RECAST_BLOCK / 32);
#else
  for (int w = threadIdx.x; w < count * kTiles * kSlices; w += RECAST_BLOCK) {
    unsigned char* const mine = shared + w / (kTiles * kSlices) * bytes;
    products(reinterpret_cast<const Element*>(mine),
             reinterpret_cast<float*>(mine + round_16(kRowsBytes)), w % (kTiles * kSlices));
  }
#endif
  __syncthreads();
  const int all = width + n_pairs + pad;
  for (int s = 0; s < count; ++s) {
    const float* const found =
        reinterpret_cast<const float*>(shared + s * bytes + round_16(kRowsBytes));
    Out* const to = out + (first + s) * out_stride;
    for (int c = threadIdx.x; c < all; c += RECAST_BLOCK) {
      const int p = c - width;
      float value = 0.0f;
      if (p < 0)
        value = recast::widen(dense[(first + s) * dense_stride + c]);
      else if (p < n_pairs)
        value = found[RECAST_PAIRS == 0 ? pairs[p] : p];
      recast::narrow(value, to[c]);
    }
  }
}
RECAST_KERNEL(dot_forward)

// grad (batch, width + n_pairs + pad) with any row stride. grads[r].at is null where row r needs no
// gradient. `same` >= 0: the dense part is that row, which gets the sum of both gradients;
// else dense_grad (batch, width) gets a copy of the first columns, or is null.
// With RECAST_PAIRS 0, cells[c] = i * F + j with j <= i are the n_cells distinct pairs, and
// columns[starts[c] .. starts[c + 1]) say which of the n_pairs columns are theirs; else null.
// Shared bytes: SAMPLES * (bytes of the padded rows, as above + roundup(F, R) *
// (roundup(F, R) + S) * element), each part rounded up to 16.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    dot_backward(const Row* __restrict__ rows, const Out* __restrict__ grad, Index grad_stride,
                 int width, const int* __restrict__ cells, const int* __restrict__ starts,
                 const int* __restrict__ columns, int n_cells, int batch, int same,
                 const Row* __restrict__ grads, In* dense_grad, Index dense_grad_stride) {
  RECAST_DYNAMIC_SHARED(unsigned char, shared);
  constexpr int square_bytes = kRows * kSquare * static_cast<int>(sizeof(Element));
  constexpr int bytes = round_16(kRowsBytes) + round_16(square_bytes);
  const int first = blockIdx.x * kSamples;
  const int count = batch - first < kSamples ? batch - first : kSamples;
  for (int s = 0; s < count; ++s) {
    gather(rows, first + s, reinterpret_cast<Element*>(shared + s * bytes), threadIdx.x,
           RECAST_BLOCK);
    Element* const square = reinterpret_cast<Element*>(shared + s * bytes + round_16(kRowsBytes));
    const Out* const from = grad + (first + s) * grad_stride;
    for (int w = threadIdx.x; w < kRows * kRows; w += RECAST_BLOCK) {
      const int i = w / kRows, j = w % kRows;
      float value = 0.0f;
#if RECAST_PAIRS != 0
      const int at = i < kF && j < kF ? place(i > j ? i : j, i > j ? j : i) : -1;
      if (at >= 0) value = (i == j ? 2.0f : 1.0f) * recast::widen(from[width + at]);
#endif
      recast::narrow(value, square[i * kSquare + j]);
    }
    for (int c = threadIdx.x; c < width && dense_grad != nullptr; c += RECAST_BLOCK)
      recast::narrow(recast::widen(from[c]), dense_grad[(first + s) * dense_grad_stride + c]);
  }
  __syncthreads();
  if (RECAST_PAIRS == 0) {
    for (int w = threadIdx.x; w < count * n_cells; w += RECAST_BLOCK) {
      const int s = w / n_cells, c = w % n_cells, i = cells[c] / kF, j = cells[c] % kF;
      Element* const square = reinterpret_cast<Element*>(shared + s * bytes + round_16(kRowsBytes));
      const Out* const from = grad + (first + s) * grad_stride + width;
      float sum = 0.0f;
      for (int k = starts[c]; k < starts[c + 1]; ++k) sum += recast::widen(from[columns[k]]);
      if (i == j) sum *= 2.0f;
      recast::narrow(sum, square[i * kSquare + j]);
      if (i != j) recast::narrow(sum, square[j * kSquare + i]);
    }
    __syncthreads();
  }
#if RECAST_TENSOR
  // A warp for each 16 rows and 8 columns of dT.
  constexpr int across = kDepth / 8, items = kRows / 16 * across;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int w = threadIdx.x / 32; w < count * items; w += RECAST_BLOCK / 32) {
    const int s = w / items, top = w % items / across * 16, left = w % across * 8;
    const Element* const mine = reinterpret_cast<const Element*>(shared + s * bytes);
    const Element* const square =
        reinterpret_cast<const Element*>(shared + s * bytes + round_16(kRowsBytes));
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < kRows; k += 16) {
      unsigned a[4], b[2];
      fragment_a(square + top * kSquare + k, kSquare, a);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        recast::Pack<In, 2> both;
        both.at[0] = mine[(k + half * 8 + 2 * t) * kStride + left + g];
        both.at[1] = mine[(k + half * 8 + 2 * t + 1) * kStride + left + g];
        b[half] = *reinterpret_cast<const unsigned*>(&both);
      }
      multiply(sum, a, b);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = top + g + e / 2 * 8, c = left + 2 * t + e % 2;
      if (row >= kF || c >= kD || grads[row].at == nullptr) continue;
      const float more = row == same ? recast::widen(grad[(first + s) * grad_stride + c]) : 0.0f;
      recast::narrow(sum[e] + more, grads[row].at[(first + s) * grads[row].stride + c]);
    }
  }
#else
  // A thread for each 4 rows and 4 columns of dT; neighbours take neighbouring columns.
  constexpr int across = kDepth / 4, items = kRows / 4 * across;
  for (int w = threadIdx.x; w < count * items; w += RECAST_BLOCK) {
    const int s = w / items, top = w % items / across * 4, left = w % across * 4;
    const Element* const mine = reinterpret_cast<const Element*>(shared + s * bytes);
    const Element* const square =
        reinterpret_cast<const Element*>(shared + s * bytes + round_16(kRowsBytes));
    float sum[4][4] = {};
#pragma unroll 4
    for (int k = 0; k < kF; ++k) {
      const auto factor = recast::load<4>(square + k * kSquare + top);  // symmetric
      const auto row = recast::load<4>(mine + k * kStride + left);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[r][e] += factor.at[r] * row.at[e];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (top + r >= kF || grads[top + r].at == nullptr) continue;
      In* const to = grads[top + r].at + (first + s) * grads[top + r].stride + left;
      const Out* const more = grad + (first + s) * grad_stride + left;
      recast::Pack<In, 4> pack;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (left + e < kD)
          recast::narrow(sum[r][e] + (top + r == same ? recast::widen(more[e]) : 0.0f), pack.at[e]);
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
