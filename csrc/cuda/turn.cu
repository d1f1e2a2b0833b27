// A matrix turned about its diagonal: to (columns, rows) = from (rows, columns)'.
//
// Tensor cores read operands of TF32 along the sum only: a product whose operand lies across it is
// faster of a turned copy, where that is small beside the product.
//
// A thread turns 4 x 4 elements in its registers, which takes no shared memory: with every
// instruction a warp reads 8 pieces of 64 bytes and writes 4 of 128, whole sectors all of them.
//
// Launch: a block for each tile of 64 x 64 elements, those of the same rows one after the other;
// block = 256, no dynamic shared memory.
#include "pack.cuh"

namespace {

using recast::Index;
using Element = unsigned;  // any 4 bytes

constexpr int kThreads = 256;
constexpr int kEach = 4;  // rows and columns of a thread: 16 bytes
constexpr int kTile = 64;
constexpr int kDown = 8, kAcross = 4;  // threads of a warp
constexpr int kWarpsAcross = kTile / (kAcross * kEach);
static_assert(kThreads * kEach * kEach == kTile * kTile);

}  // namespace

// from: rows `from_stride` apart, at any address; to: rows `to_stride` apart, a multiple of 4 and
// less than 4 more than `rows`, at a multiple of 16 bytes. What of `to` is behind its rows becomes
// zeros. Matrices of any number of elements, but each side is below 2^31, and so are the tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
    turn(const Element* __restrict__ from, Index from_stride, Element* __restrict__ to,
         Index to_stride, int rows, int columns) {
  const unsigned across = (static_cast<unsigned>(columns) + kTile - 1) / kTile;
  const unsigned down = blockIdx.x / across, left = blockIdx.x - down * across;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index row =
      static_cast<Index>(down) * kTile + (warp / kWarpsAcross * kDown + lane / kAcross) * kEach;
  const Index column =
      static_cast<Index>(left) * kTile + (warp % kWarpsAcross * kAcross + lane % kAcross) * kEach;
  if (row >= rows || column >= columns) return;
  const bool is_aligned = (reinterpret_cast<Index>(from) & 15) == 0 && from_stride % kEach == 0;
  const bool is_whole = is_aligned && column + kEach <= columns;
  recast::Pack<Element, kEach> given[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    given[r] = {};
    const Element* const at = from + (row + r) * from_stride + column;
    if (row + r >= rows) continue;
    if (is_whole) {
      given[r] = recast::load<kEach>(at);
    } else {
#pragma unroll
      for (int c = 0; c < kEach; ++c)
        if (column + c < columns) given[r].at[c] = at[c];
    }
  }
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    if (column + c >= columns) break;
    recast::Pack<Element, kEach> turned;
#pragma unroll
    for (int r = 0; r < kEach; ++r) turned.at[r] = given[r].at[c];
    recast::store(to + (column + c) * to_stride + row, turned);
  }
}
RECAST_KERNEL(turn)
