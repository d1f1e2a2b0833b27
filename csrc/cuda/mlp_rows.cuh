// What mlp_epilogue.cu and mlp_one_output.cu share: how a thread loads and stores its columns of a
// matrix, the relu bit mask, and column sums over the blocks of a launch.
//
// The mask has one bit an element, in the layout of cublasLt's RELU_AUX and DRELU epilogues: row r
// is the `row_bytes` bytes from r * row_bytes on, a multiple of 16; column c is bit c % 8, from the
// lowest, of byte c / 8. Bits behind the last column are 0.
//
// A matrix product has just written what these kernels read, its last rows last, so those are still
// in the L2 cache: all kernels go through the rows from the last to the first, and so leave in the
// cache the first rows, with which the next product begins.
#pragma once

#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::UInt64;
using T = recast::Dtype<RECAST_OF>::type;
using Sum = recast::Dtype<RECAST_SUM>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kGroup = 8;  // columns of a mask byte
constexpr int kRows = RECAST_BLOCK / kLanes;
constexpr int kColumns = kLanes * kGroup;
constexpr int kInFlight = RECAST_AHEAD;
constexpr int kTileRows = kRows * kInFlight;  // rows that a block has in flight

// A chunk is the elements that one instruction moves; kChunks of them make a group of 8 columns.
constexpr int kChunk = kVec * static_cast<int>(sizeof(T)) > 16 ? 16 / sizeof(T) : kVec;
constexpr int kChunks = kGroup / kChunk;

// The register type that holds a chunk: 16 bits for a lone 16-bit element, else 32 bits.
template <int Bytes>
struct WordOfSize {
  using type = unsigned;
};
template <>
struct WordOfSize<2> {
  using type = unsigned short;
};

// Held as 32-bit words: the compiler would otherwise unpack 16-bit elements right after each load,
// and so wait for it before issuing the next one.
struct Chunk {
  using Elements = recast::Pack<T, kChunk>;
  using Word = WordOfSize<sizeof(Elements)>::type;
  using Words = recast::Pack<Word, sizeof(Elements) / sizeof(Word)>;

  Words words;

  __device__ __forceinline__ void load(const T* from) {
    words = recast::load<sizeof(Words) / sizeof(Word)>(reinterpret_cast<const Word*>(from));
  }
  __device__ __forceinline__ void store(T* to) const {
    recast::store(reinterpret_cast<Word*>(to), words);
  }
  __device__ __forceinline__ void get(float (&to)[kChunk]) const {
    Elements found;
    memcpy(&found, &words, sizeof(found));
#pragma unroll
    for (int e = 0; e < kChunk; ++e) to[e] = recast::widen(found.at[e]);
  }
  __device__ __forceinline__ void put(const float (&from)[kChunk]) {
    Elements made;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) recast::narrow(from[e], made.at[e]);
    memcpy(&words, &made, sizeof(made));
  }
};

// The first column, within the block's columns, of a lane's p-th chunk. Chunks of neighbouring
// lanes are adjacent, so that each instruction of a warp moves whole sectors; kernels that write
// mask bytes need 8 consecutive columns a thread instead, and do not use it.
__device__ __forceinline__ int chunk_column(int lane, int piece) {
  return (piece * kLanes + lane) * kChunk;
}

// The mask bits of the kChunk columns from `column` on, shifted to where chunk p has its bits.
__device__ __forceinline__ unsigned mask_bits(const unsigned char* bits, int column, int p) {
  const unsigned from_here = static_cast<unsigned>(bits[column / kGroup]) >> column % kGroup;
  return (from_here & ((1u << kChunk) - 1)) << p * kChunk;
}

// Elements <= this limit become 0. With relu it is 0; a NaN passes, forward and backward, as in
// torch. Without relu it is NaN, as nothing is <= NaN.
__device__ __forceinline__ float relu_limit(bool relu) {
  return relu ? 0.0f : __uint_as_float(0x7fc00000u);  // NaN
}

// Called by the whole block; the first 32 threads get the sum over the `count` rows of parts
// (count, n) of column blockIdx.x * 32 + threadIdx.x, added in a fixed order.
__device__ __forceinline__ float sum_of_parts(const float* parts, int count, int n) {
  constexpr int slices = RECAST_BLOCK / 32;
  RECAST_SHARED(float[slices][32], sums);
  const int slice = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < n) {
#pragma unroll 8
    for (int p = slice; p < count; p += slices) sum += parts[static_cast<Index>(p) * n + column];
  }
  sums[slice][lane] = sum;
  __syncthreads();
  float total = 0.0f;
  if (slice == 0) {
#pragma unroll
    for (int s = 0; s < slices; ++s) total += sums[s][lane];
  }
  return total;
}

}  // namespace
