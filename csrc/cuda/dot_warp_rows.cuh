// How the rows of a warp's samples come into shared memory: part of dot_warps.cu, inside its
// namespace.

// Where the rows of a sample begin, one after the other: each lane finds out about one of them.
__device__ __forceinline__ void point(Element** at, const Row& mine, Index sample) {
  if (lane() < kF) at[lane()] = mine.at == nullptr ? nullptr : mine.at + sample * mine.stride;
}

#if RECAST_GATHER
#include "dot_warp_sources.cuh"
#else

constexpr bool kStages = false;
constexpr int kStagedBytes = 0;

struct Ids {};

// The rows that come next.
struct Coming {
  Element** from;  // in shared memory
  Row mine;        // what this lane knows of
  Ids ids;

  // Finds out where the rows of `sample` are.
  __device__ __forceinline__ void aim(Index sample) { point(from, mine, sample); }

  // Copies them, after the lanes that found the rows have synchronised with the others.
  __device__ __forceinline__ void fetch(Element* to, unsigned char*) const {
#pragma unroll
    for (int k = 0; k < kTurns; ++k) {
      const auto [row, pack, is_there] = place_of<kPacks>(k);
      if (is_there)
        recast::async_copy_16(to + row * kStride + pack * kVec, from[row] + pack * kVec);
    }
  }

  __device__ __forceinline__ void take(Element*, const unsigned char*, const Ids&) const {}
};
#define RECAST_SOURCES
#endif
