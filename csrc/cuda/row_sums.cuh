// Sums of gradients by row, for row_update.cu and row_norm.cu: a group of RECAST_LANES lanes takes
// a run of row_sort.cu; a row of several runs is put together by the block of the tile it starts
// in. A row's gradients are added in the order of its entries; those of a row with more than one
// run in stretches that `longest` and the macros alone decide. So results repeat bit by bit, for
// any grid.
//
// Of the macros at the heads of those files it reads RECAST_GRAD, RECAST_TABLE, RECAST_VEC,
// RECAST_LANES, RECAST_CHUNKS, RECAST_BLOCK and RECAST_WIDE_KEY.
#pragma once

#include "intrinsics.cuh"
#include "pieces.cuh"

namespace recast {

using Grad = Dtype<RECAST_GRAD>::type;
using Table = Dtype<RECAST_TABLE>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kChunks = RECAST_CHUNKS;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;
constexpr int kWidth = kLanes * kVec;
constexpr int kColumns = kWidth * kChunks;
constexpr int kAtOnce = kChunks >= 4 ? 2 : 4;  // gradients under way
constexpr int kTilesOfBlock = 8;

using Sums = float[kChunks][kVec];
using Partials = float[kGroups][kColumns];

// What row_sort.cu leaves, and the tables [tables, tables + n_tables) to sum, neighbours there.
struct Sorted {
  const Piece* pieces;
  int bag_bits;
  const Rows* tables;
  int n_tables;
  const Key* keys;         // sorted
  const unsigned* values;  // of the keys
  int entries, longest;
};

// Where a gradient row starts, and its factor.
struct Source {
  const Grad* row;
  float factor;
};

__device__ __forceinline__ Source source_of(const Sorted& sorted, unsigned value) {
  const Piece& piece = sorted.pieces[value >> sorted.bag_bits];
  Index at = value & ((1u << sorted.bag_bits) - 1);
  const Grad* const gradient = static_cast<const Grad*>(piece.gradient);
  if (piece.flags & kPlain) return {gradient + at * piece.stride, 1.0f};
  float factor = piece.factor != nullptr ? *piece.factor : piece.times;
  if (piece.weights != nullptr) {
    factor *= widen(static_cast<const Table*>(piece.weights)[at]);
    at = piece.bag_of[at];
  }
  if (piece.flags & kMean) factor *= piece.bag_factors[at];
  return {gradient + at * piece.stride, factor};
}

// total = Σ over entries [first, last), of the lane's columns from `column` on.
__device__ __forceinline__ void sum_entries(const Sorted& sorted, unsigned first, unsigned last,
                                            int column, int dim, Sums& total) {
  column += threadIdx.x % kLanes * kVec;
#pragma unroll
  for (int k = 0; k < kChunks; ++k)
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[k][e] = 0.0f;
  for (unsigned i = first; i < last; i += kAtOnce) {
    Pack<Grad, kVec> read[kAtOnce][kChunks];
    float factor[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const bool inside = i + r < last;
      const Source source = source_of(sorted, sorted.values[inside ? i + r : i]);
      factor[r] = inside ? source.factor : 0.0f;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + k * kWidth;
        read[r][k] = inside && c < dim ? load<kVec>(source.row + c) : zeros<kVec, Grad>();
      }
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] += widen(read[r][k].at[e]) * factor[r];
  }
}

// The number of the table that `key` is a row of.
__device__ __forceinline__ int table_of(const Sorted& sorted, Key key) {
  int number = 0;
  for (int past = sorted.n_tables; past - number > 1;) {
    const int middle = (number + past) / 2;
    const bool before = static_cast<Key>(sorted.tables[middle].first_key) <= key;
    number = before ? middle : number;
    past = before ? past : middle;
  }
  return number;
}

// The lanes of this thread's group.
__device__ __forceinline__ unsigned group_mask() {
  if (kLanes == 32) return 0xffffffffu;
  return ((1u << (kLanes % 32)) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
}

__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(group_mask(), value, d, kLanes);
  return value;
}

// The run that starts at `first` begins in the middle of a row.
__device__ __forceinline__ bool continues(const Key* keys, unsigned first) {
  return first > 0 && keys[first - 1] == keys[first];
}

// Calls whole(run, key, sum) for each row of one run among the runs [*from, *past), where
// sum(column, dim, total) gives the lane's columns of its gradient from `column` on. Of a row with
// more runs each run leaves its sum in `partials`, at 2 * tile where it continues the row, at
// 2 * tile + 1 where it starts it, and calls part(run, tile, starts).
template <class Whole, class Part>
__device__ __forceinline__ void each_run(const Sorted& sorted, const unsigned* starts,
                                         const unsigned* from, const unsigned* past,
                                         float* partials, int partial_stride, const Whole& whole,
                                         const Part& part) {
  const Key* const keys = sorted.keys;
  const unsigned stride = gridDim.x * kGroups, all = *past;
  for (unsigned run = *from + blockIdx.x * kGroups + threadIdx.x / kLanes; run < all;
       run += stride) {
    const unsigned first = starts[run], last = starts[run + 1];
    const Key key = keys[first];
    const bool continued = last < static_cast<unsigned>(sorted.entries) && keys[last] == key;
    if (!continued && !continues(keys, first)) {
      whole(run, key, [&](int column, int dim, Sums& total) {
        sum_entries(sorted, first, last, column, dim, total);
      });
      continue;
    }
    const bool begins = !continues(keys, first);
    const unsigned tile = first / sorted.longest;
    part(run, tile, begins);
    float* const partial =
        partials + (2 * static_cast<Index>(tile) + (begins ? 1 : 0)) * partial_stride;
    const int dim = static_cast<int>(sorted.tables[table_of(sorted, key)].dim);
    for (int column = 0; column < dim; column += kColumns) {
      Sums total;
      sum_entries(sorted, first, last, column, dim, total);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + threadIdx.x % kLanes * kVec + k * kWidth;
        if (c >= dim) break;
        Pack<float, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) pack.at[e] = total[k][e];
        store<kVec>(partial + c, pack);
      }
    }
  }
}

// Calls whole(tile, key, sum), by the first group of a block, for each row that each_run left in
// parts, where `tile` is the one that the row starts in. `stretches` is shared.
template <class Whole>
__device__ __forceinline__ void each_row_of_parts(const Sorted& sorted, float* partials,
                                                  int partial_stride, Partials& stretches,
                                                  const Whole& whole) {
  const Key* const keys = sorted.keys;
  const int longest = sorted.longest, group = threadIdx.x / kLanes;
  const int tiles = (sorted.entries + longest - 1) / longest;
  const Rows &front = sorted.tables[0], &back = sorted.tables[sorted.n_tables - 1];
  const Key from = static_cast<Key>(front.first_key);
  const Key past = static_cast<Key>(back.first_key + back.rows);
  const int first_tile = static_cast<int>(blockIdx.x) * kTilesOfBlock;
  for (int tile = first_tile; tile < first_tile + kTilesOfBlock && tile < tiles - 1; ++tile) {
    const Index next = static_cast<Index>(tile + 1) * longest;
    const Key key = keys[next];
    if (key < from || key >= past || keys[next - 1] != key) continue;
    const unsigned start = static_cast<unsigned>(tile) * longest;
    if (keys[start] == key && continues(keys, start)) continue;
    int parts = 2;  // of the row, one a tile
    for (int past_part = tiles - tile + 1; past_part - parts > 1;) {
      const int middle = (parts + past_part) / 2;
      const bool within = keys[static_cast<Index>(tile + middle - 1) * longest] == key;
      parts = within ? middle : parts;
      past_part = within ? past_part : middle;
    }
    // The first part's place takes the sum of all.
    float* const sums = partials + (2 * static_cast<Index>(tile) + 1) * partial_stride;
    const int dim = static_cast<int>(sorted.tables[table_of(sorted, key)].dim);
    const int share = (parts + kGroups - 1) / kGroups;
    const int first = group * share < parts ? group * share : parts;
    const int last = parts - first < share ? parts : first + share;
    for (int column = 0; column < dim; column += kColumns) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int at = threadIdx.x % kLanes * kVec + k * kWidth;
        float total[kVec] = {};
        for (int part = first; part < last && column + at < dim; ++part) {
          const Index slot = 2 * static_cast<Index>(tile + part) + (part == 0 ? 1 : 0);
          const auto read = load<kVec>(partials + slot * partial_stride + column + at);
#pragma unroll
          for (int e = 0; e < kVec; ++e) total[e] += read.at[e];
        }
#pragma unroll
        for (int e = 0; e < kVec; ++e) stretches[group][at + e] = total[e];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < kColumns && column + c < dim; c += RECAST_BLOCK) {
        float total = 0.0f;
        for (int g = 0; g < kGroups; ++g) total += stretches[g][c];
        sums[column + c] = total;
      }
      __syncthreads();
    }
    if (group != 0) continue;
    whole(tile, key, [&](int column, int, Sums& total) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const int c = column + threadIdx.x % kLanes * kVec + k * kWidth + e;
          total[k][e] = c < dim ? sums[c] : 0.0f;
        }
    });
  }
}

}  // namespace recast
