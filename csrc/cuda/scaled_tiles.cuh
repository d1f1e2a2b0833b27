// What the tensor-core kernels of a scaled product share: blocks of 16 rows, 16 columns and 16
// terms of a sum. A sum may take its terms in any order, and the columns of a tile may be numbered
// in any order. So lane t of a group has terms, and columns, 4 t to 4 t + 3, which are contiguous
// in memory, and the result of one product is an operand of the next without moving between lanes.
#pragma once

#define RECAST_PRODUCT RECAST_IN
#include "mma_operands.cuh"

namespace {

using recast::Index;
using In = Product;
using Four = recast::Pack<In, 4>;

constexpr int kSteps = kHalf ? 1 : 2;     // mma instructions for a block's 16 terms
constexpr int kWords = 4 * kSteps;        // registers of a lane for a block of either operand
constexpr int kBlockWords = 32 * kWords;  // of all lanes

// The left operand: elements of rows g and g + 8.
struct Left {
  unsigned at[kSteps][4];
};

__device__ __forceinline__ Left left_of(const float (&low)[4], const float (&high)[4]) {
  Left left;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int k = (s * 2 + q) * kEach;
      left.at[s][2 * q] = pack_operand(low[k], low[k + kEach - 1]);
      left.at[s][2 * q + 1] = pack_operand(high[k], high[k + kEach - 1]);
    }
  return left;
}

// The right operand in the order of scaled_pack: words 2 s and 2 s + 1 of a tile are those of step
// s.
struct Right {
  unsigned at[2][kSteps][2];
};

__device__ __forceinline__ Right right_at(const unsigned* block, int lane) {
  Right found;
#pragma unroll
  for (int w = 0; w < kWords; w += 4) {
    const auto four = recast::load<4>(block + w * 32 + lane * 4);
#pragma unroll
    for (int q = 0; q < 4; ++q)
      found.at[(w + q) / (2 * kSteps)][(w + q) / 2 % kSteps][q % 2] = four.at[q];
  }
  return found;
}

// Sums of a block: of row g (0) or g + 8 (1), column 4 t + c.
struct Sums {
  float at[2][4] = {};
  __device__ __forceinline__ float of(int row, int c) const { return at[c / 2][2 * row + c % 2]; }
};

__device__ __forceinline__ void multiply(Sums& sums, const Left& left, const Right& right) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) multiply(sums.at[tile], left.at[s], right.at[tile][s]);
}

// Four contiguous elements; zeros unless `valid`.
__device__ __forceinline__ Four four_at(const In* from, bool valid) {
  return valid ? recast::load<4>(from) : recast::zeros<4, In>();
}

__device__ __forceinline__ void widen(const Four& from, float (&to)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) to[c] = recast::widen(from.at[c]);
}

}  // namespace
