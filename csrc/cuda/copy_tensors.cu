// Copies any number of tensors in one launch, byte for byte, or int64 converted to int32 (ids).
// A tensor is cut into chunks, one block each.
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

// A source tensor: two fields of 8 bytes, as the host writes them.
struct Source {
  const Byte* from;
  Index bytes;
};

// The first number of a chunk that does not fit int32, and its index in the tensor. Written only
// if the chunk has such a number; otherwise it keeps the value of an earlier copy.
struct Overflow {
  Index place, number;
};

// The part of a tensor that a block copies: five fields of 8 bytes, as the host writes them.
struct Chunk {
  Byte* to;
  Index tensor, first;  // index of the source, and the first byte of it to copy
  Index bytes;          // to read from the source; less where the tensor ends earlier
  Overflow* overflow;   // not null: convert int64 to int32; null: copy bytes
};

constexpr int kInFlight = 4;  // loads of a thread in flight before it stores
constexpr Index kMin = -2147483647 - 1, kMax = 2147483647;
constexpr unsigned kNone = ~0u;

// Copies in units of kEach words, to which both addresses are aligned, then the remaining bytes.
template <int kCount, class Word>
__device__ __forceinline__ void copy(const Byte* from, Byte* to, int bytes) {
  constexpr int kUnit = kCount * sizeof(Word);
  const int units = bytes / kUnit;
#pragma unroll 1
  for (int first = threadIdx.x; first < units; first += RECAST_BLOCK * kInFlight) {
    recast::Pack<Word, kCount> held[kInFlight];  // words, as each byte would take a register
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units)
        held[k] = recast::load<kCount>(reinterpret_cast<const Word*>(from + at * kUnit));
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units) recast::store(reinterpret_cast<Word*>(to + at * kUnit), held[k]);
    }
  }
#pragma unroll 1
  for (int at = units * kUnit + threadIdx.x; at < bytes; at += RECAST_BLOCK) to[at] = from[at];
}

// Converts to int32, saturating: a saturated id is outside of every table too. `least` becomes the
// smallest index of a number that does not fit.
__device__ __forceinline__ int saturate(Index number, int place, unsigned* least) {
  const bool fits = number > kMin && number < kMax;
  if (!fits && static_cast<unsigned>(place) < *least) *least = static_cast<unsigned>(place);
  return static_cast<int>(number < kMin ? kMin : number > kMax ? kMax : number);
}

__device__ __forceinline__ Index number_at(const Byte* from, int place) {
  Index number;
  memcpy(&number, from + 8 * place, 8);  // memcpy: the address may be unaligned
  return number;
}

// Converts `numbers` of them, kEach at a time, to which both addresses are aligned. Returns the
// index of the first that does not fit among those of this thread, else kNone.
template <int kCount>
__device__ __forceinline__ unsigned saturate_all(const Byte* from, int* to, int numbers) {
  const int units = numbers / kCount;
  unsigned least = kNone;
#pragma unroll 1
  for (int first = threadIdx.x; first < units; first += RECAST_BLOCK * kInFlight) {
    recast::Pack<Index, kCount> held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at < units)
        held[k] = recast::load<kCount>(reinterpret_cast<const Index*>(from) + at * kCount);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int at = first + k * RECAST_BLOCK;
      if (at >= units) continue;
      recast::Pack<int, kCount> narrowed;
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        narrowed.at[e] = saturate(held[k].at[e], at * kCount + e, &least);
      recast::store(to + at * kCount, narrowed);
    }
  }
#pragma unroll 1
  for (int at = units * kCount + threadIdx.x; at < numbers; at += RECAST_BLOCK)
    to[at] = saturate(number_at(from, at), at, &least);
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
  if (chunk.overflow != nullptr) {
    auto* const narrowed = reinterpret_cast<int*>(to);
    unsigned least = kNone;
    if (reinterpret_cast<Index>(from) % 16 == 0) {
      least = saturate_all<2>(from, narrowed, bytes / 8);
    } else if (reinterpret_cast<Index>(from) % 8 == 0) {
      least = saturate_all<1>(from, narrowed, bytes / 8);
    } else {
#pragma unroll 1
      for (int at = threadIdx.x; at < bytes / 8; at += RECAST_BLOCK)
        narrowed[at] = saturate(number_at(from, at), at, &least);
    }
    if (!__syncthreads_or(least != kNone)) return;
    if (threadIdx.x == 0) first = kNone;
    __syncthreads();
    if (least != kNone) atomicMin(&first, least);
    __syncthreads();
    if (least != kNone && least == first)  // true in one thread only: indices are distinct
      *chunk.overflow = {chunk.first / 8 + least, number_at(from, static_cast<int>(least))};
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
