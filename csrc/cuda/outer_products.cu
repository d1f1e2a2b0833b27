// The products of an outer product network (runtime/interactions/contraction.py),
//     out[a, b, c] = Σ_d x[a, c, d] w[b, c, d]        dx[a, c, d] = Σ_b grad[a, b, c] w[b, c, d]
// for few b. A block holds all of w in shared memory as fp32, and a thread row c of a few samples
// in registers. outer_tiles instead holds w in registers, where it fits into those of a block, and
// copies tiles of samples and results by whole 16-byte accesses: memory traffic is nearly all of
// its time.
//
// Macros:
//   RECAST_IN     dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_DIM    elements of a row
//   RECAST_VEC    elements that are read at once; divides DIM, and rows start at multiples of VEC
//                 elements: 1, 2, 4, and 8 for 16 bits
//   RECAST_BLOCK  threads of a block
//
// Launch: grid = any, block = BLOCK, dynamic shared memory: b * c rows of roundup(DIM, 4) + 4
// floats. All tensors are contiguous. outer_tiles says its own.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kDim = RECAST_DIM;
constexpr int kVec = RECAST_VEC;
constexpr int kRound = (kDim + 3) / 4 * 4;
constexpr int kRow = kRound + 4;  // stride in shared memory, padded against bank conflicts
constexpr int kSamples = 2;       // of a thread

__device__ __forceinline__ void load_weight(const In* __restrict__ w, int rows, float* to) {
  for (int at = threadIdx.x; at < rows * (kDim / kVec); at += RECAST_BLOCK) {
    const int row = at / (kDim / kVec), d = at % (kDim / kVec) * kVec;
    const auto pack = recast::load<kVec>(w + static_cast<Index>(row) * kDim + d);
#pragma unroll
    for (int e = 0; e < kVec; ++e) to[row * kRow + d + e] = recast::widen(pack.at[e]);
  }
  if constexpr (kRound != kDim)
    for (int row = threadIdx.x; row < rows; row += RECAST_BLOCK)
      for (int d = kDim; d < kRound; ++d) to[row * kRow + d] = 0.0f;
  __syncthreads();
}

__device__ __forceinline__ void load_row(const float* row, float (&to)[kRound]) {
#pragma unroll
  for (int d = 0; d < kRound; d += 4) {
    const auto four = recast::load<4>(row + d);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[d + e] = four.at[e];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 512 / RECAST_BLOCK)
    outer_forward(const In* __restrict__ x, const In* __restrict__ w, int samples, int outputs,
                  int vectors, In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(float, rows);
  load_weight(w, outputs * vectors, rows);
  const Index all = static_cast<Index>((samples + kSamples - 1) / kSamples) * vectors;
  const Index step = static_cast<Index>(gridDim.x) * RECAST_BLOCK;
  for (Index at = static_cast<Index>(blockIdx.x) * RECAST_BLOCK + threadIdx.x; at < all;
       at += step) {
    const Index first = at / vectors * kSamples;
    const int c = static_cast<int>(at % vectors);
    float x_row[kSamples][kRound] = {};
#pragma unroll
    for (int s = 0; s < kSamples; ++s) {
      if (first + s >= samples) continue;
      const In* const from = x + ((first + s) * vectors + c) * kDim;
#pragma unroll
      for (int d = 0; d < kDim; d += kVec) {
        const auto pack = recast::load<kVec>(from + d);
#pragma unroll
        for (int e = 0; e < kVec; ++e) x_row[s][d + e] = recast::widen(pack.at[e]);
      }
    }
#pragma unroll 2
    for (int b = 0; b < outputs; ++b) {
      float w_row[kRound];
      load_row(rows + (b * vectors + c) * kRow, w_row);
#pragma unroll
      for (int s = 0; s < kSamples; ++s) {
        float sum = 0.0f;
#pragma unroll
        for (int d = 0; d < kRound; ++d) sum += x_row[s][d] * w_row[d];
        if (first + s < samples)
          recast::narrow(sum, out[((first + s) * outputs + b) * vectors + c]);
      }
    }
  }
}
RECAST_KERNEL(outer_forward)

#if RECAST_DIM % RECAST_VEC == 0 && RECAST_VEC >= (RECAST_IN == 0 ? 4 : 8)
namespace {

constexpr int kOwn = kRound <= 8 ? 8 : 64 / kRound;  // b of a thread
constexpr int kPitch = kDim + kVec;  // row stride in shared memory, padded against bank conflicts

}  // namespace

// The same as outer_forward, for whole reads of 16 bytes: thread c + vectors * k has the vector c
// and kOwn b from kOwn k on. Launch: grid = any, block = at least vectors * ceil(outputs / kOwn)
// threads, up to 512, dynamic shared memory: two times `together` samples of `vectors` rows of DIM
// + VEC elements, and the results of so many, which are a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(512, 1)
    outer_tiles(const In* __restrict__ x, const In* __restrict__ w, int samples, int outputs,
                int vectors, int together, In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int c = thread % vectors, first_b = thread / vectors * kOwn;
  const int each = vectors * kPitch, results = outputs * vectors;
  In* const results_shared = shared + 2 * together * each;
  float own[kOwn][kDim];
#pragma unroll
  for (int o = 0; o < kOwn; ++o)
#pragma unroll
    for (int d = 0; d < kDim; d += kVec) {
      auto pack = recast::zeros<kVec, In>();
      if (first_b + o < outputs)
        pack = recast::load<kVec>(w + (static_cast<Index>(first_b + o) * vectors + c) * kDim + d);
#pragma unroll
      for (int e = 0; e < kVec; ++e) own[o][d + e] = recast::widen(pack.at[e]);
    }
  const auto load_weight = [&](int first, In* to) {
    constexpr int kPacks = kDim / kVec;
    const In* const from = x + static_cast<Index>(first) * vectors * kDim;
    const int packs = min(together, samples - first) * vectors * kPacks;
    for (int k = thread; k < packs; k += threads)
      recast::async_copy_16(to + k / kPacks * kPitch + k % kPacks * kVec,
                            from + static_cast<Index>(k) * kVec);
  };
  const int tiles = (samples - 1) / together + 1, step = static_cast<int>(gridDim.x);
  int tile = static_cast<int>(blockIdx.x), buffer = 0;
  if (tile < tiles) load_weight(tile * together, shared);
  recast::async_commit();
  for (; tile < tiles; tile += step, buffer ^= 1) {
    const int first = tile * together, count = min(together, samples - first);
    recast::async_wait<0>();
    __syncthreads();  // the copies are complete, and the results before have been read
    if (tiles - tile > step)
      load_weight(first + step * together, shared + (buffer ^ 1) * together * each);
    recast::async_commit();
    const In* const rows = shared + buffer * together * each + c * kPitch;
    if (first_b < outputs) {
#pragma unroll 2
      for (int s = 0; s < count; ++s) {
        float sums[kOwn] = {};
#pragma unroll
        for (int d = 0; d < kDim; d += kVec) {
          const auto pack = recast::load<kVec>(rows + s * each + d);
#pragma unroll
          for (int o = 0; o < kOwn; ++o)
#pragma unroll
            for (int e = 0; e < kVec; ++e) sums[o] += own[o][d + e] * recast::widen(pack.at[e]);
        }
#pragma unroll
        for (int o = 0; o < kOwn; ++o)
          if (first_b + o < outputs)
            recast::narrow(sums[o], results_shared[s * results + (first_b + o) * vectors + c]);
      }
    }
    __syncthreads();
    In* const to = out + static_cast<Index>(first) * results;
    const int all = count * results, whole = all / kVec * kVec;
    for (int k = thread * kVec; k < whole; k += threads * kVec)
      recast::store_whole<kVec>(to + k, recast::load<kVec>(results_shared + k));
    if (whole + thread < all) to[whole + thread] = results_shared[whole + thread];
  }
  recast::async_wait<0>();
}
RECAST_KERNEL(outer_tiles)
#endif

// dx[a, c, d] = Σ_b grad[a, b, c] w[b, c, d].
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 512 / RECAST_BLOCK)
    outer_backward(const In* __restrict__ grad, const In* __restrict__ w, int samples, int outputs,
                   int vectors, In* __restrict__ dx) {
  RECAST_DYNAMIC_SHARED(float, rows);
  load_weight(w, outputs * vectors, rows);
  const Index all = static_cast<Index>((samples + kSamples - 1) / kSamples) * vectors;
  const Index step = static_cast<Index>(gridDim.x) * RECAST_BLOCK;
  for (Index at = static_cast<Index>(blockIdx.x) * RECAST_BLOCK + threadIdx.x; at < all;
       at += step) {
    const Index first = at / vectors * kSamples;
    const int c = static_cast<int>(at % vectors);
    float sums[kSamples][kRound] = {};
#pragma unroll 4
    for (int b = 0; b < outputs; ++b) {
      float w_row[kRound];
      load_row(rows + (b * vectors + c) * kRow, w_row);
#pragma unroll
      for (int s = 0; s < kSamples; ++s) {
        if (first + s >= samples) continue;
        const float g = recast::widen(grad[((first + s) * outputs + b) * vectors + c]);
#pragma unroll
        for (int d = 0; d < kRound; ++d) sums[s][d] += g * w_row[d];
      }
    }
#pragma unroll
    for (int s = 0; s < kSamples; ++s) {
      if (first + s >= samples) continue;
      In* const to = dx + ((first + s) * vectors + c) * kDim;
#pragma unroll
      for (int d = 0; d < kDim; d += kVec) {
        recast::Pack<In, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(sums[s][d + e], pack.at[e]);
        recast::store<kVec>(to + d, pack);
      }
    }
  }
}
RECAST_KERNEL(outer_backward)
