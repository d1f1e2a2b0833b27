// What the kernels of a scaled product on tensor cores share: blocks of 16 rows, 16 columns and 16
// terms of a sum. In which order a sum goes through its terms, and which column a number of a tile
// means, is free: so a lane t of a group has the terms, and the columns, 4 t to 4 t + 3, which lie
// side by side in memory, and what one product gives is a factor of the next without a move.
#pragma once

#define RECAST_PRODUCT RECAST_IN
#include "product_words.cuh"

namespace {

using recast::Index;
using In = Product;
using Four = recast::Pack<In, 4>;

constexpr int kSteps = kHalf ? 1 : 2;     // products of a block's 16 terms
constexpr int kWords = 4 * kSteps;        // of a lane, of a block of either factor
constexpr int kBlockWords = 32 * kWords;  // of all lanes

// The left factor: numbers of rows g and g + 8.
struct Left {
  unsigned at[kSteps][4];
};

__device__ __forceinline__ Left left_of(const float (&low)[4], const float (&high)[4]) {
  Left made;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int k = (s * 2 + q) * kEach;
      made.at[s][2 * q] = word(low[k], low[k + kEach - 1]);
      made.at[s][2 * q + 1] = word(high[k], high[k + kEach - 1]);
    }
  return made;
}

// The right factor, as scaled_pack has put it: words 2 s and 2 s + 1 of a tile are those of step s.
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

// Four numbers that lie side by side; zeros if they are not `there`.
__device__ __forceinline__ Four four_at(const In* from, bool there) {
  return there ? recast::load<4>(from) : recast::zeros<4, In>();
}

__device__ __forceinline__ void widen(const Four& from, float (&to)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) to[c] = recast::widen(from.at[c]);
}

}  // namespace
