// dot_interaction.cu for few features, on tensor cores: a warp takes a sample by itself,
// double-buffered, so that the rows of its next sample are copied while it multiplies, and no warp
// waits for another. With T (F, D) the vectors of a sample, and Z = T T' summed in fp32:
//   forward   out = [ dense | Z[i, j] of the pairs | zeros ]
//   backward  dT = (G + G') T with G[i, j] = the gradient of the pair's column
//
// Macros:
//   RECAST_FEATURES, RECAST_DIM  F, 32 at most, and D, a multiple of 16
//   RECAST_PAIRS    all pairs in row-major order: 1: j < i, 2: j <= i, 3: j > i
//   RECAST_ELEMENT  dtype of all tensors: 1 fp16, 2 bf16, 3 fp32, multiplied as TF32
//   RECAST_BLOCK    threads of a block, a multiple of 32
//
// Rows of features, of the dense part and of gradients start at multiples of 16 bytes.
//
// Launch: any grid, block = RECAST_BLOCK, dynamic shared memory as said at each kernel.
#include "intrinsics.cuh"
#include "pack.cuh"

#ifndef RECAST_GATHER
#define RECAST_GATHER 0  // 1 in dot_warps_gathered.cu, where rows may be looked up
#endif

namespace {

using recast::Index;
using Element = recast::Dtype<RECAST_ELEMENT % 3>::type;
using In = Element;

#include "dot_pairs.cuh"

constexpr int kD = RECAST_DIM;
constexpr int kSize = static_cast<int>(sizeof(Element));
constexpr int kVec = 16 / kSize;         // elements of 16 bytes
constexpr int kPacks = kD / kVec;        // of a row
constexpr int kStep = 2 * kVec;          // columns of A and rows of B of one product
constexpr int kStride = kD + kVec;       // in shared memory, padded against bank conflicts
constexpr int kStrips = (kF + 15) / 16;  // of 16 rows
constexpr int kWarps = RECAST_BLOCK / 32;
constexpr int kPacksOfLane =
    (kF * kPacks + 31) / 32;  // 16-byte packs of a sample that a lane copies

using Vector = recast::Pack<Element, kVec>;

__device__ __forceinline__ constexpr int round_16(int bytes) { return (bytes + 15) / 16 * 16; }

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// The k-th 16-byte pack that a lane copies of a sample; a row has `packs` of them.
struct Place {
  int row, pack;
  bool valid;
};

template <int packs>
__device__ __forceinline__ Place place_of(int k) {
  if (32 % packs == 0) {
    const int row = lane() / packs + k * (32 / packs);
    return {row, lane() % packs, (k + 1) * 32 <= kF * packs || row < kF};
  }
  const int w = lane() + 32 * k;
  return {w / packs, w % packs, w < kF * packs};
}

#include "dot_mma.cuh"
#include "dot_warp_rows.cuh"

constexpr int kBuffers = kStages ? 1 : 2;  // of a warp, each for the rows of one sample
// Warps for which the shared memory of a multiprocessor suffices at usual sizes; the launch bounds
// limit registers to let that many run.
constexpr int kHeld = kSize == 4 ? 6 : kStages ? 8 : 12;
constexpr int kResident = kHeld > kWarps ? kHeld / kWarps : 1;

// The loader of the rows of samples first, first + step ... for a warp whose shared memory is
// `own`.
#if RECAST_GATHER
#define RECAST_ROW_LOADER(own, first, step) \
  RowLoader loader(reinterpret_cast<UInt64*>(own), mine, sources, errors, first, step, batch)
#else
#define RECAST_ROW_LOADER(own, first, step)    \
  RowLoader loader {                           \
    reinterpret_cast<Element**>(own), mine, {} \
  }
#endif

// Starts copies of the whole packs of a row of `count` elements.
__device__ __forceinline__ void copy_line(const Element* from, int count, Element* to) {
  for (int c = lane() * kVec; c + kVec <= count; c += 32 * kVec)
    recast::async_copy_16(to + c, from + c);
}

// Whether the tile of products of 8 rows from `top` on by 8 from `left` on holds any pair.
__device__ __forceinline__ constexpr bool has_pairs(int top, int left) {
  return top < kF && left < kF && left < top + 8;
}

// The left operand G + G' of backward: elements of a register, steps of a product, elements of a
// lane.
constexpr int kWord = 4 / kSize;
constexpr int kSteps = kStrips * 16 / kStep;
constexpr int kNumbers = kStrips * kSteps * 4 * kWord;

struct Cell {
  int row, column;
};

// The position in G + G' of a lane's k-th element.
__device__ __forceinline__ Cell element_at(int k) {
  const int w = k / kWord, r = w % 4;
  const int top = w / 4 / kSteps * 16 + r % 2 * 8,
            left = w / 4 % kSteps * kStep + r / 2 * kStep / 2;
  return {top + lane() / 4, left + lane() % 4 * kWord + k % kWord};
}

__device__ __forceinline__ unsigned word(const Element* numbers) {
#if RECAST_ELEMENT == 3
  return recast::to_tf32(*numbers);
#else
  __align__(4) recast::Pack<Element, 2> both = {{numbers[0], numbers[1]}};
  return *reinterpret_cast<const unsigned*>(&both);
#endif
}

// Writes Z[i, j] of the pairs to `line`.
__device__ __forceinline__ void products(const Element* rows, Element* line) {
  float c[kStrips][2 * kStrips][4] = {};
  const Element* from[kStrips];
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const int row = 16 * s + lane() % 16;
    // Results for rows past the last are not stored.
    from[s] = rows + (row < kF ? row : kF - 1) * kStride + lane() / 16 * kVec;
  }
#pragma unroll 4
  for (int d = 0; d < kD; d += kStep) {
    // 16 rows x kStep columns, tiles by (rows, columns): (low, low), (high, low) ... As Z = T T',
    // the tiles of 8 rows are the right operand too.
    unsigned a[kStrips][4];
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      recast::load_tiles(a[s], from[s] + d);
#if RECAST_ELEMENT == 3
#pragma unroll
      for (int r = 0; r < 4; ++r) a[s][r] = recast::to_tf32(__uint_as_float(a[s][r]));
#endif
    }
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int n = 0; n < 2 * s + 2; ++n)
        multiply(c[s][n], a[s], a[n / 2][n % 2], a[n / 2][2 + n % 2]);
  }
  const int g = lane() / 4, t = lane() % 4;
#pragma unroll
  for (int s = 0; s < kStrips; ++s)
#pragma unroll
    for (int n = 0; n < 2 * s + 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has_pairs(16 * s + e / 2 * 8, 8 * n)) continue;
        const int i = 16 * s + e / 2 * 8 + g, j = 8 * n + 2 * t + e % 2;
        const int at = i < kF && j <= i ? place(i, j) : -1;
        if (at >= 0) recast::narrow(c[s][n][e], line[at]);
      }
}

}  // namespace

// out (batch, width + pairs + pad) with any row stride; dense (batch,
// width), rows of whole 16 bytes, or null with width 0. Shared bytes of a
// warp, each part rounded up to 16: 8 F, twice those of F rows that are
// 16 longer, twice those of a row of out.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    dot_forward(const Row* __restrict__ rows, const Element* __restrict__ dense, Index dense_stride,
                int width, int pad, int batch, Element* out, Index out_stride RECAST_SOURCES) {
  RECAST_DYNAMIC_SHARED(unsigned char, shared);
  constexpr int pointer_bytes = round_16(8 * kF), buffer_bytes = kF * kStride * kSize,
                buffers_bytes = kBuffers * buffer_bytes;
  const int all = width + kProducts + pad, line = round_16(kSize * all);
  unsigned char* const own =
      shared + threadIdx.x / 32 * (pointer_bytes + kStagedBytes + buffers_bytes + 2 * line);
  unsigned char* const staged = own + pointer_bytes;
  const auto part = [&](int at) {
    return reinterpret_cast<Element*>(own + pointer_bytes + kStagedBytes + at);
  };
  const Row mine = lane() < kF ? rows[lane()] : Row{nullptr, 0};
  const bool aligned = reinterpret_cast<Index>(out) % 16 == 0 && out_stride % kVec == 0;
  for (int c = width + kProducts + lane(); c < line / kSize; c += 32)
    for (int k = 0; k < 2; ++k) recast::narrow(0.0f, part(buffers_bytes + k * line)[c]);
  Index sample = blockIdx.x * kWarps + threadIdx.x / 32;
  const Index step = static_cast<Index>(gridDim.x) * kWarps;
  RECAST_ROW_LOADER(own, sample, step);
  const auto start_copies = [&](Index next, int k) {
    loader.start_copies(part(kStages ? 0 : k * buffer_bytes), staged);
    copy_line(dense + next * dense_stride, width, part(buffers_bytes + k * line));
  };
  if (sample < batch) loader.locate(sample);
  __syncwarp();
  if (sample < batch) start_copies(sample, 0);
  __syncwarp();
  recast::async_commit();
  for (int k = 0; sample < batch; sample += step, k ^= 1) {
    Element* const held = part(kStages ? 0 : k * buffer_bytes);
    Element* const made = part(buffers_bytes + k * line);
    const Ids ids = loader.ids;
    const bool has_next = sample + step < batch;
    if (has_next) loader.locate(sample + step);
    if (kStages) recast::async_wait<0>();
    __syncwarp();  // all lanes have read what the next copies overwrite
    if (kStages) {
      loader.finish(held, staged, ids);
      __syncwarp();
    }
    if (has_next) start_copies(sample + step, k ^ 1);
    recast::async_commit();
    if (!kStages) {
      recast::async_wait<1>();
      __syncwarp();
      loader.finish(held, staged, ids);
    }
    products(held, made + width);
    __syncwarp();
    Element* const to = out + sample * out_stride;
    if (aligned) {
      for (int c = lane() * kVec; c + kVec <= all; c += 32 * kVec)
        recast::store<kVec>(to + c, recast::load<kVec>(made + c));
      for (int c = all / kVec * kVec + lane(); c < all; c += 32) to[c] = made[c];
    } else {
      for (int c = lane(); c < all; c += 32) to[c] = made[c];
    }
  }
  recast::async_wait<0>();
}
RECAST_KERNEL(dot_forward)

// grad (batch, at least width + pairs). grads[r].at is null where row r
// needs no gradient; `same`
// >= 0: that row also gets the gradient of the dense part, the first
// columns. Shared bytes of a warp, each part rounded up to 16: 16 F,
// twice those of F + 1 rows that are 16 longer, twice those of width +
// pairs + 1 elements.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    dot_backward(const Row* __restrict__ rows, const Element* __restrict__ grad, Index grad_stride,
                 int width, int batch, int same, const Row* __restrict__ grads RECAST_SOURCES) {
  RECAST_DYNAMIC_SHARED(unsigned char, shared);
  constexpr int pointer_bytes = 16 * kF, buffer_bytes = (kF + 1) * kStride * kSize,
                buffers_bytes = kBuffers * buffer_bytes;
  const int all = width + kProducts, line = round_16(kSize * (all + 1));
  unsigned char* const own =
      shared + threadIdx.x / 32 * (pointer_bytes + kStagedBytes + buffers_bytes + 2 * line);
  unsigned char* const staged = own + pointer_bytes;
  Element** const into = reinterpret_cast<Element**>(own) + kF;
  const auto part = [&](int at) {
    return reinterpret_cast<Element*>(own + pointer_bytes + kStagedBytes + at);
  };
  const Row mine = lane() < kF ? rows[lane()] : Row{nullptr, 0};
  const Row wanted = lane() < kF ? grads[lane()] : Row{nullptr, 0};
  const int g = lane() / 4, t = lane() % 4;
  for (int k = 0; k < kBuffers;
       ++k)  // a row of zeros behind the rows, and a zero behind the gradients
    for (int c = lane(); c < kStride; c += 32)
      recast::narrow(0.0f, part(k * buffer_bytes)[kF * kStride + c]);
  if (lane() < 2) recast::narrow(0.0f, part(buffers_bytes + lane() * line)[all]);
  // The index among a sample's gradients of each element of G + G' that this lane's operand
  // registers hold: two 16-bit indices a register, the first in the low half.
  unsigned places[kNumbers / 2] = {};
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) {
    const auto [i, j] = element_at(k);
    const int at = i < kF && j < kF ? (i < j ? place(j, i) : place(i, j)) : -1;
    places[k / 2] |= static_cast<unsigned>(at < 0 ? all : width + at) << k % 2 * 16;
  }
  // The last gradients, which do not fill a 16-byte pack, are prefetched to a register.
  const int rest = all % kVec;
  Element tail, next_tail;
  recast::narrow(0.0f, tail);
  next_tail = tail;
  Index sample = blockIdx.x * kWarps + threadIdx.x / 32;
  const Index step = static_cast<Index>(gridDim.x) * kWarps;
  RECAST_ROW_LOADER(own, sample, step);
  const auto start_copies = [&](Index next, int k, Element& last) {
    const Element* const gradients = grad + next * grad_stride;
    copy_line(gradients, all, part(buffers_bytes + k * line));
    loader.start_copies(part(kStages ? 0 : k * buffer_bytes), staged);
    if (lane() < rest) last = gradients[all - rest + lane()];
  };
  if (sample < batch) loader.locate(sample);
  __syncwarp();
  if (sample < batch) start_copies(sample, 0, tail);
  __syncwarp();
  recast::async_commit();
  for (int k = 0; sample < batch; sample += step, k ^= 1, tail = next_tail) {
    Element* const held = part(kStages ? 0 : k * buffer_bytes);
    Element* const gradients = part(buffers_bytes + k * line);
    const Ids ids = loader.ids;
    const bool has_next = sample + step < batch;
    if (has_next) loader.locate(sample + step);
    if (kStages) recast::async_wait<0>();
    __syncwarp();  // all lanes have read what the next copies overwrite
    write_addresses(into, wanted, sample);
    if (kStages) {
      loader.finish(held, staged, ids);
      __syncwarp();
    }
    if (has_next) start_copies(sample + step, k ^ 1, next_tail);
    recast::async_commit();
    if (!kStages) {
      recast::async_wait<1>();
      __syncwarp();
      loader.finish(held, staged, ids);
    }
    if (lane() < rest) gradients[all - rest + lane()] = tail;
    __syncwarp();
    Element numbers[kNumbers];
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) {
      numbers[k] = gradients[places[k / 2] >> k % 2 * 16 & 0xffff];
#if RECAST_PAIRS == 2
      const auto [i, j] = element_at(k);
      if (i == j) recast::narrow(2.0f * recast::widen(numbers[k]), numbers[k]);
#endif
    }
    unsigned a[kStrips][kSteps][4];
#pragma unroll
    for (int w = 0; w < kStrips * kSteps * 4; ++w)
      a[w / 4 / kSteps][w / 4 % kSteps][w % 4] = word(numbers + w * kWord);
    // 16 columns of dT at a time, which overwrite those of T in shared memory.
#pragma unroll 2
    for (int left = 0; left < kD; left += 16) {
      float sum[kStrips][2][4] = {};
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        unsigned b[4];
#if RECAST_ELEMENT == 3
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = kStep * m + r % 2 * 4 + t;
          b[r] = recast::to_tf32(held[(row < kF ? row : kF) * kStride + left + r / 2 * 8 + g]);
        }
#else
        // B of two tiles: (rows, columns): (low, low), (high, low), (low,
        // high) ...
        const int row = kStep * m + lane() % 16;
        recast::load_transposed_tiles(
            b, held + (row < kF ? row : kF) * kStride + left + lane() / 16 * 8);
#endif
#pragma unroll
        for (int s = 0; s < kStrips; ++s)
#pragma unroll
          for (int n = 0; n < 2; ++n) multiply(sum[s][n], a[s][m], b[2 * n], b[2 * n + 1]);
      }
      __syncwarp();
#pragma unroll
      for (int s = 0; s < kStrips; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * s + 8 * half + g;
          if (16 * s + 8 * half >= kF) continue;
          if (row == same) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const auto more = recast::load<2>(gradients + left + 8 * n + 2 * t);
#pragma unroll
              for (int e = 0; e < 2; ++e) sum[s][n][2 * half + e] += recast::widen(more.at[e]);
            }
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            recast::Pack<Element, 2> pair;
#pragma unroll
            for (int e = 0; e < 2; ++e) recast::narrow(sum[s][n][2 * half + e], pair.at[e]);
            if (row < kF) recast::store<2>(held + row * kStride + left + 8 * n + 2 * t, pair);
          }
        }
    }
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kPacksOfLane; ++p) {
      const auto [row, pack, valid] = place_of<kPacks>(p);
      Element* const to = valid ? into[row] : nullptr;
      if (to != nullptr)
        recast::store<kVec>(to + pack * kVec,
                            recast::load<kVec>(held + row * kStride + pack * kVec));
    }
  }
  recast::async_wait<0>();
}
RECAST_KERNEL(dot_backward)
