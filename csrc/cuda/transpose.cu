// Transposes a matrix of 4-byte elements: to (columns, rows) = from (rows, columns)'.
//
// TF32 products on tensor cores read both operands along the summed dimension. Where an operand is
// small beside the product, transposing it first is faster than a product that reads it across.
//
// A block transposes a tile of 64 x 64 elements and a thread 4 x 4 of them in registers, without
// shared memory: each load instruction of a warp covers 8 row segments of 64 bytes, each store 4 of
// 128, so all accesses are whole 32-byte sectors.
//
// Launch: grid = tiles, those of the same rows one after the other; block = 256, no dynamic shared
// memory.
#include "pack.cuh"

namespace {

using recast::Index;
using Element = unsigned;  // any 4 bytes

constexpr int kThreads = 256;
constexpr int kSide = 4;  // rows and columns of a thread: 16 bytes
constexpr int kTile = 64;
constexpr int kLanesDown = 8, kLanesAcross = 4;  // threads of a warp
constexpr int kWarpsAcross = kTile / (kLanesAcross * kSide);
static_assert(kThreads * kSide * kSide == kTile * kTile);

}  // namespace

// from: row stride `from_stride`, any alignment. to: 16-byte aligned, with row stride `to_stride` =
// `rows` rounded up to a multiple of 4; the padding behind each row becomes zeros. Both sides and
// the number of tiles are below 2^31; the number of elements is not limited.
extern "C" __global__ void __launch_bounds__(kThreads)
    transpose(const Element* __restrict__ from, Index from_stride, Element* __restrict__ to,
              Index to_stride, int rows, int columns) {
  const unsigned tiles_across = (static_cast<unsigned>(columns) + kTile - 1) / kTile;
  const unsigned tile_row = blockIdx.x / tiles_across,
                 tile_column = blockIdx.x - tile_row * tiles_across;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index row = static_cast<Index>(tile_row) * kTile +
                    (warp / kWarpsAcross * kLanesDown + lane / kLanesAcross) * kSide;
  const Index column = static_cast<Index>(tile_column) * kTile +
                       (warp % kWarpsAcross * kLanesAcross + lane % kLanesAcross) * kSide;
  if (row >= rows || column >= columns) return;
  const bool is_aligned = (reinterpret_cast<Index>(from) & 15) == 0 && from_stride % kSide == 0;
  const bool is_vector = is_aligned && column + kSide <= columns;
  recast::Pack<Element, kSide> loaded[kSide];
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    loaded[r] = {};
    const Element* const at = from + (row + r) * from_stride + column;
    if (row + r >= rows) continue;
    if (is_vector) {
      loaded[r] = recast::load<kSide>(at);
    } else {
#pragma unroll
      for (int c = 0; c < kSide; ++c)
        if (column + c < columns) loaded[r].at[c] = at[c];
    }
  }
#pragma unroll
  for (int c = 0; c < kSide; ++c) {
    if (column + c >= columns) break;
    recast::Pack<Element, kSide> transposed;
#pragma unroll
    for (int r = 0; r < kSide; ++r) transposed.at[r] = loaded[r].at[c];
    recast::store(to + (column + c) * to_stride + row, transposed);
  }
}
RECAST_KERNEL(transpose)
