// Copies of many tensors in one launch: byte for byte, or int64 written as int32.
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

// One tensor as it is given: two fields of 8 bytes, as the host writes them.
struct Source {
  const Byte* from;
  Index bytes;
};

// The first number of a chunk that does not fit int32, with its place in the tensor. Written only
// if the chunk has such a number; otherwise an earlier copy's value stays.
struct Beyond {
  Index place, number;
};

// Part of one tensor: five fields of 8 bytes, as the host writes them.
struct Chunk {
  Byte* to;
  Index tensor, first;  // the number of the source, and the first of its bytes
  Index bytes;          // of the source, at most
  Beyond* beyond;       // int64 is written as int32; null: bytes are copied
};

constexpr int kAhead = 4;  // reads of a thread before it writes
constexpr Index kLeast = -2147483647 - 1, kMost = 2147483647;
constexpr unsigned kNone = ~0u;

// By units of kEach words, which both addresses are multiples of; what is left of `bytes` singly.
template <int kEach, class Word>
__device__ __forceinline__ void copy(const Byte* from, Byte* to, int bytes) {
  constexpr int kUnit = kEach * sizeof(Word);
  const int units = bytes / kUnit;
#pragma unroll 1
  for (int first = threadIdx.x; first < units; first += RECAST_BLOCK * kAhead) {
    recast::Pack<Word, kEach> held[kAhead];  // of words: bytes would take a register each
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units)
        held[k] = recast::load<kEach>(reinterpret_cast<const Word*>(from + at * kUnit));
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units) recast::store(reinterpret_cast<Word*>(to + at * kUnit), held[k]);
    }
  }
#pragma unroll 1
  for (int at = units * kUnit + threadIdx.x; at < bytes; at += RECAST_BLOCK) to[at] = from[at];
}

// A number as int32, the nearest where it does not fit: as far outside of every table. `least`
// becomes the smallest of such places.
__device__ __forceinline__ int narrow(Index number, int place, unsigned* least) {
  const bool fits = number > kLeast && number < kMost;
  if (!fits && static_cast<unsigned>(place) < *least) *least = static_cast<unsigned>(place);
  return static_cast<int>(number < kLeast ? kLeast : number > kMost ? kMost : number);
}

__device__ __forceinline__ Index number_at(const Byte* from, int place) {
  Index number;
  memcpy(&number, from + 8 * place, 8);  // by bytes: it may lie anywhere
  return number;
}

// `numbers` of them; the place among them of the first that does not fit, of those of this thread.
// By kEach at once, where both addresses are multiples of as many.
template <int kEach>
__device__ __forceinline__ unsigned narrow_all(const Byte* from, int* to, int numbers) {
  const int units = numbers / kEach;
  unsigned least = kNone;
#pragma unroll 1
  for (int first = threadIdx.x; first < units; first += RECAST_BLOCK * kAhead) {
    recast::Pack<Index, kEach> held[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units)
        held[k] = recast::load<kEach>(reinterpret_cast<const Index*>(from) + at * kEach);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at >= units) continue;
      recast::Pack<int, kEach> narrowed;
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        narrowed.at[e] = narrow(held[k].at[e], at * kEach + e, &least);
      recast::store(to + at * kEach, narrowed);
    }
  }
#pragma unroll 1
  for (int at = units * kEach + threadIdx.x; at < numbers; at += RECAST_BLOCK)
    to[at] = narrow(number_at(from, at), at, &least);
  return least;
}

}  // namespace

// Chunks have fewer than 2^31 bytes each; those of int64 begin and end with a number.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    copy_tensors(const Source* __restrict__ sources, const Chunk* __restrict__ chunks) {
  RECAST_SHARED(unsigned, first);
  const Chunk chunk = chunks[blockIdx.x];
  const Source source = sources[chunk.tensor];
  const Index left = source.bytes - chunk.first;
  const int bytes = static_cast<int>(left < chunk.bytes ? left : chunk.bytes);
  if (bytes <= 0) return;
  const Byte* from = recast::in_global(source.from) + chunk.first;
  Byte* to = recast::in_global(chunk.to);
  const auto both = reinterpret_cast<Index>(from) | reinterpret_cast<Index>(to);
  if (chunk.beyond != nullptr) {
    auto* const narrowed = reinterpret_cast<int*>(to);
    unsigned least = kNone;
    if (reinterpret_cast<Index>(from) % 16 == 0) {
      least = narrow_all<2>(from, narrowed, bytes / 8);
    } else if (reinterpret_cast<Index>(from) % 8 == 0) {
      least = narrow_all<1>(from, narrowed, bytes / 8);
    } else {
#pragma unroll 1
      for (int at = threadIdx.x; at < bytes / 8; at += RECAST_BLOCK)
        narrowed[at] = narrow(number_at(from, at), at, &least);
    }
    if (!__syncthreads_or(least != kNone)) return;
    if (threadIdx.x == 0) first = kNone;
    __syncthreads();
    if (least != kNone) atomicMin(&first, least);
    __syncthreads();
    if (least != kNone && least == first)  // true in one thread: no two threads share a place
      *chunk.beyond = {chunk.first / 8 + least, number_at(from, static_cast<int>(least))};
  } else if (both % 16 == 0) {
    copy<4, unsigned>(from, to, bytes);
  } else if (both % 8 == 0) {
    copy<2, unsigned>(from, to, bytes);
  } else if (both % 4 == 0) {
    copy<1, unsigned>(from, to, bytes);
  } else {
    copy<1, Byte>(from, to, bytes);
  }
}
RECAST_KERNEL(copy_tensors)
