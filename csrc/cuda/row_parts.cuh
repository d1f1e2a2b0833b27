// The second step of row_sums.cuh: combines the partial sums of rows that span several tiles. Each
// block checks kTilesOfBlock tiles for a row that starts there and continues. A row of few parts is
// summed by one group of lanes; a row of more by the whole block, each group a consecutive range of
// parts, and then the ranges in order. The order depends on the number of parts only, so results
// are bitwise reproducible.
#pragma once

#include "row_sums.cuh"

namespace recast {

constexpr int kTilesOfBlock = 32;
constexpr int kFewParts = 16;  // at most so many parts of a row are summed by one group
constexpr int kPartsAtOnce = kVec >= 8 ? 4 : 8;
// Blocks resident on a multiprocessor; many, as they wait for memory most of the time.
constexpr int kCombineBlocks = (kChunks * kVec <= 4   ? 640
                                : kChunks * kVec <= 8 ? 512
                                                      : 256) /
                               RECAST_BLOCK;

using GroupSums = float[kGroups][kColumns];

// The partial sums of a row that starts in `tile`.
struct Parts {
  const float* partials;
  int stride, tile;
  // total = sum of the parts [first, last), for kVec columns from `column` on.
  __device__ __forceinline__ void sum(int first, int last, int column, float (&total)[kVec]) const {
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[e] = 0.0f;
    for (int part = first; part < last; part += kPartsAtOnce) {
      Pack<float, kVec> read[kPartsAtOnce];
#pragma unroll
      for (int r = 0; r < kPartsAtOnce; ++r) {
        const int at = part + r < last ? part + r : part;
        const Index slot = 2 * static_cast<Index>(tile + at) + (at == 0 ? 1 : 0);
        read[r] = load<kVec>(partials + slot * stride + column);
      }
#pragma unroll
      for (int r = 0; r < kPartsAtOnce; ++r)
#pragma unroll
        for (int e = 0; e < kVec; ++e)
          if (part + r < last) total[e] += read[r].at[e];
    }
  }
};

// The number of parts of the row that starts in `tile` and continues behind it, counted up to
// kFewParts + 1; 0 if there is no such row in the tables of this launch.
__device__ __forceinline__ int parts_from(const Sorted& sorted, Index tile) {
  const Key* const keys = sorted.keys;
  const Index start = tile * kTile, next = start + kTile;
  if (next - 1 < sorted.from || next >= sorted.past) return 0;
  const Key key = keys[next];
  if (keys[next - 1] != key) return 0;
  const Rows& table = sorted.tables[table_of(sorted, key)];
  if (key >= static_cast<Key>(table.first_key + table.rows)) return 0;
  if (start > 0 && keys[start] == key && keys[start - 1] == key) return 0;
  int parts = 2;
#pragma unroll
  for (int part = 2; part <= kFewParts; ++part) {
    const Index at = start + static_cast<Index>(part) * kTile;
    parts += at < sorted.past && keys[at] == key;
  }
  return parts;
}

// The number of parts of a row of more than kFewParts: a search by the whole block.
__device__ __forceinline__ int parts_of(const Sorted& sorted, Key key, int tile) {
  int parts = kFewParts + 1;  // at least
  const int tiles = (sorted.past + kTile - 1) / kTile;
  for (int past = tiles - tile; parts < past;) {
    const int step = (past - parts + RECAST_BLOCK - 1) / RECAST_BLOCK;
    const Index part = parts + static_cast<Index>(threadIdx.x) * step;
    const int within =
        __syncthreads_count(part < past && sorted.keys[(tile + part) * kTile] == key);
    const Index end = parts + static_cast<Index>(within) * step;
    past = end < past ? static_cast<int>(end) : past;
    parts = within == 0 ? past : parts + (within - 1) * step + 1;
  }
  return parts;
}

// Shared memory of each_row_of_parts.
struct PartsShared {
  GroupSums group_sums;
  int parts[kTilesOfBlock];  // of the row that starts in each tile
  float numbers[kGroups];
};

// Calls row.done() for a row in parts, by a group of lanes; sum(column, g) computes its gradient g.
template <class Row, class Sum>
__device__ __forceinline__ void finish_row(const Sorted& sorted, Row& row, Key key, int tile,
                                           float* number, const Sum& sum) {
  const int table = table_of(sorted, key), dim = static_cast<int>(sorted.tables[table].dim);
  const int passes = dim > kColumns ? Row::kPasses : 1;
  for (int pass = 0; pass < passes; ++pass)
    for (int column = 0; column < dim; column += kColumns) {
      row.enter(table, column);
      typename Row::Held held;
      if constexpr (Row::kHeld > 0) row.read(key, column, held);
      Sums g;
      sum(column, g);
      row.done(key, static_cast<unsigned>(tile + 1) * kTile - 1, column, pass, number, held, g);
    }
}

// The second kernel: calls row.done() for each row of which each_tile wrote parts.
template <class Row>
__device__ __forceinline__ void each_row_of_parts(const Sorted& sorted, Row& row, float* partials,
                                                  int partial_stride, PartsShared& shared) {
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int first_tile = sorted.from / kTile + static_cast<int>(blockIdx.x) * kTilesOfBlock;
  for (int t = threadIdx.x; t < kTilesOfBlock; t += RECAST_BLOCK)
    shared.parts[t] = parts_from(sorted, static_cast<Index>(first_tile) + t);
  __syncthreads();
  for (int t = group; t < kTilesOfBlock; t += kGroups) {
    const int parts = shared.parts[t], tile = first_tile + t;
    if (parts == 0 || parts > kFewParts) continue;
    const Parts of = {partials, partial_stride, tile};
    finish_row(sorted, row, sorted.keys[static_cast<Index>(tile + 1) * kTile], tile,
               &shared.numbers[group], [&](int column, Sums& g) {
#pragma unroll
                 for (int k = 0; k < kChunks; ++k) {
                   const int c = column + lane * kVec + k * kWidth;
                   of.sum(0, c < row.dim ? parts : 0, c, g[k]);
                 }
               });
  }
  for (int t = 0; t < kTilesOfBlock; ++t) {
    if (shared.parts[t] <= kFewParts) continue;
    const int tile = first_tile + t;
    const Key key = sorted.keys[static_cast<Index>(tile + 1) * kTile];
    const int parts = parts_of(sorted, key, tile);
    const int dim = static_cast<int>(sorted.tables[table_of(sorted, key)].dim);
    const Parts of = {partials, partial_stride, tile};
    // The sum overwrites the first part.
    float* const sums = partials + (2 * static_cast<Index>(tile) + 1) * partial_stride;
    const int share = (parts + kGroups - 1) / kGroups;
    const int first = group * share < parts ? group * share : parts;
    const int last = parts - first < share ? parts : first + share;
    for (int column = 0; column < dim; column += kColumns) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int at = lane * kVec + k * kWidth;
        float total[kVec];
        of.sum(first, column + at < dim ? last : first, column + at, total);
#pragma unroll
        for (int e = 0; e < kVec; ++e) shared.group_sums[group][at + e] = total[e];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < kColumns && column + c < dim; c += RECAST_BLOCK) {
        float total = 0.0f;
        for (int g = 0; g < kGroups; ++g) total += shared.group_sums[g][c];
        sums[column + c] = total;
      }
      __syncthreads();
    }
    if (group != 0) continue;
    finish_row(sorted, row, key, tile, &shared.numbers[0], [&](int column, Sums& g) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const int c = column + lane * kVec + k * kWidth + e;
          g[k][e] = c < row.dim ? sums[c] : 0.0f;
        }
    });
  }
}

}  // namespace recast
