// Loads the feature rows of a warp's samples to shared memory. Included by dot_warps.cu inside its
// anonymous namespace.

// Writes the addresses of a sample's rows to `at`, each lane that of one row.
__device__ __forceinline__ void write_addresses(Element** at, const Row& mine, Index sample) {
  if (lane() < kF) at[lane()] = mine.at == nullptr ? nullptr : mine.at + sample * mine.stride;
}

#if RECAST_GATHER
#include "dot_warp_sources.cuh"
#else

constexpr bool kStages = false;
constexpr int kStagedBytes = 0;

struct Ids {};

// Loads the rows of the next sample, all of which are given. dot_warp_sources.cuh has the variant
// for looked-up rows; the members are the same.
struct RowLoader {
  Element** from;  // in shared memory
  Row mine;        // the row that this lane locates
  Ids ids;

  // Writes the addresses of the rows of `sample`.
  __device__ __forceinline__ void locate(Index sample) { write_addresses(from, mine, sample); }

  // Starts the copies; a __syncwarp must be between locate() and this.
  __device__ __forceinline__ void start_copies(Element* to, unsigned char*) const {
#pragma unroll
    for (int k = 0; k < kPacksOfLane; ++k) {
      const auto [row, pack, valid] = place_of<kPacks>(k);
      if (valid) recast::async_copy_16(to + row * kStride + pack * kVec, from[row] + pack * kVec);
    }
  }

  __device__ __forceinline__ void finish(Element*, const unsigned char*, const Ids&) const {}
};
#define RECAST_SOURCES
#endif
