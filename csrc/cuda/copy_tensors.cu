// Copies of many tensors, byte for byte, in one launch.
//
// Macros:
//   RECAST_BLOCK  threads of a block
//
// Launch: a block for each chunk; block = RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using Byte = unsigned char;

// Part of one tensor: four fields of 8 bytes, as the host writes them.
struct Chunk {
  Byte* to;
  Index tensor, first;  // the number of the source, and the first of its bytes
  Index bytes;
};

constexpr int kAhead = 4;  // reads of a thread before it writes

// By units of kUnit bytes, which both addresses are multiples of; what is left of `bytes` singly.
template <int kUnit>
__device__ __forceinline__ void copy(const Byte* from, Byte* to, int bytes) {
  using Unit = recast::Pack<Byte, kUnit>;
  const int units = bytes / kUnit;
  for (int first = threadIdx.x; first < units; first += RECAST_BLOCK * kAhead) {
    Unit held[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units) held[k] = recast::load<kUnit>(from + at * kUnit);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units) recast::store(to + at * kUnit, held[k]);
    }
  }
  for (int at = units * kUnit + threadIdx.x; at < bytes; at += RECAST_BLOCK) to[at] = from[at];
}

}  // namespace

// sources: addresses on the device. Chunks have fewer than 2^31 bytes each.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    copy_tensors(const Byte* const* __restrict__ sources, const Chunk* __restrict__ chunks) {
  const Chunk chunk = chunks[blockIdx.x];
  const Byte* from = recast::in_global(sources[chunk.tensor]) + chunk.first;
  Byte* to = recast::in_global(chunk.to);
  const auto both = reinterpret_cast<Index>(from) | reinterpret_cast<Index>(to);
  const int bytes = static_cast<int>(chunk.bytes);
  if (both % 16 == 0)
    copy<16>(from, to, bytes);
  else if (both % 8 == 0)
    copy<8>(from, to, bytes);
  else if (both % 4 == 0)
    copy<4>(from, to, bytes);
  else
    copy<1>(from, to, bytes);
}
RECAST_KERNEL(copy_tensors)
