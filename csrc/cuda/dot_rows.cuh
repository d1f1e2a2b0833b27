// Loads the feature rows of dot_interaction.cu into shared memory. Included there, inside its
// anonymous namespace.

// Writes `each` zero bytes, a multiple of 16, for each of `count` samples, `bytes` apart.
template <int each>
__device__ __forceinline__ void clear(unsigned char* to, int count, int bytes) {
  constexpr int packs = each / 16;
  if constexpr (packs > 0)
    for (int w = threadIdx.x; w < count * packs; w += RECAST_BLOCK)
      *reinterpret_cast<uint4*>(to + w / packs * bytes + w % packs * 16) = make_uint4(0, 0, 0, 0);
}

#if RECAST_GATHER
#include "dot_sources.cuh"
#define RECAST_SOURCES , const Source* __restrict__ sources, Errors* errors
#else
#define RECAST_SOURCES
#endif

// Loads the rows of `count` samples to shared memory, `bytes` from one sample to the next, and pads
// rows and columns with zeros. The data is valid after await_rows().
__device__ __forceinline__ void gather(const Row* rows, Index first, int count, unsigned char* to,
                                       int bytes RECAST_SOURCES) {
#if RECAST_GATHER
  RECAST_SHARED(Bag[kSamples * kF], bags);
  find_bags(sources, first, count, bags, errors);
  load_single_rows(sources, bags, count, to, bytes);
#endif
  constexpr int packs = kD / kVec, tail = kDepth - kD;
  for (int w = threadIdx.x; w < count * kF * packs; w += RECAST_BLOCK) {
    const int s = w / (kF * packs), r = w % (kF * packs) / packs, c = w % packs * kVec;
#if RECAST_GATHER
    const Bag& bag = bags[s * kF + r];
    if (is_single(bag)) continue;
#endif
    Element* const into = reinterpret_cast<Element*>(to + s * bytes) + r * kStride + c;
#if RECAST_GATHER
    if (bag.count > 1) {
      recast::store<kVec>(into, pooled_row(sources[r], bag, c, errors));
      continue;
    }
#endif
    const In* const from = rows[r].at + (first + s) * rows[r].stride + c;
#if RECAST_IN == RECAST_ELEMENT
    if (kVec * sizeof(In) == 16) {
      recast::async_copy_16(into, from);
      continue;
    }
#endif
    const auto read = recast::load<kVec>(from);
    recast::Pack<Element, kVec> pack;
#pragma unroll
    for (int e = 0; e < kVec; ++e) narrow(recast::widen(read.at[e]), pack.at[e]);
    recast::store<kVec>(into, pack);
  }
  constexpr int row = kStride * static_cast<int>(sizeof(Element));
  clear<(kRows - kF) * row>(to + kF * row, count, bytes);
  if constexpr (tail > 0)
    for (int w = threadIdx.x; w < count * kF * tail; w += RECAST_BLOCK) {
      const int s = w / (kF * tail), r = w % (kF * tail) / tail, c = kD + w % tail;
      narrow(0.0f, reinterpret_cast<Element*>(to + s * bytes)[r * kStride + c]);
    }
}

__device__ __forceinline__ void await_rows() {
  recast::async_commit();
  recast::async_wait<0>();
  __syncthreads();
}
