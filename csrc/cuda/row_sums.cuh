// Sums of gradients by row, for row_update.cu and row_norm.cu: a group of RECAST_LANES lanes takes
// a run of row_sort.cu; a row of several runs is put together in the block of the tile it starts
// in. A row's gradients are added in the order of its entries; those of a row with more than one
// run in stretches that `longest`, their places and the macros alone decide. So results repeat bit
// by bit, for any grid.
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
constexpr int kTilesOfBlock = 64;
constexpr int kFewParts = 16;  // of a row, that a group sums alone
constexpr int kPartsAtOnce = kVec >= 8 ? 2 : kVec >= 4 ? 4 : 8;

// Blocks that run at once, as many as registers allow without spills.
constexpr int kResident = (kChunks == 1 && kVec == 1 ? 1280
                           : kChunks * kVec <= 4     ? 1024
                                                     : 512) /
                          RECAST_BLOCK;

using Sums = float[kChunks][kVec];
using Stretches = float[kGroups][kColumns];

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

// The lanes of this thread's group.
__device__ __forceinline__ unsigned group_mask() {
  if (kLanes == 32) return 0xffffffffu;
  return ((1u << (kLanes % 32)) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
}

// What lane `lane`, modulo LANES, of this thread's group has.
__device__ __forceinline__ Source of_lane(const Source& mine, int lane) {
  return {reinterpret_cast<const Grad*>(
              __shfl_sync(group_mask(), reinterpret_cast<Wide>(mine.row), lane, kLanes)),
          __shfl_sync(group_mask(), mine.factor, lane, kLanes)};
}

// total = Σ over the entries of a run, of the lane's columns from `column` on; `source` is that of
// the first. Most rows have one entry, so it is taken alone; of the others, several at once, whose
// sources the lanes of the group find for each other: so these wait for all of them once.
// meanwhile() is called once, with the gradient under way if there is one entry only: else what it
// reads would take registers for too long.
template <class Meanwhile>
__device__ __forceinline__ void sum_entries(const Sorted& sorted, const Source& source,
                                            unsigned first, unsigned last, int column, int dim,
                                            Sums& total, const Meanwhile& meanwhile) {
  column += threadIdx.x % kLanes * kVec;
  Pack<Grad, kVec> one[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int c = column + k * kWidth;
    one[k] = c < dim ? load<kVec>(source.row + c) : zeros<kVec, Grad>();
  }
  const bool single = ++first >= last;
  if (single) meanwhile();
#pragma unroll
  for (int k = 0; k < kChunks; ++k)
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[k][e] = 0.0f + widen(one[k].at[e]) * source.factor;
  if (single) return;
  constexpr int kPer = kLanes >= kAtOnce ? 1 : kAtOnce / kLanes;  // entries that a lane looks for
  // Whether the next values come beside these rows: of fewer lanes they would not fit into
  // registers, of more they are enough at once.
  constexpr bool kAhead = kLanes == kAtOnce;
  const unsigned lane = threadIdx.x % kLanes;
  unsigned value[kPer];
  const auto ask = [&](unsigned from) {
#pragma unroll
    for (int p = 0; p < kPer; ++p) {
      const unsigned at = from + p * kLanes + lane;
      value[p] = sorted.values[at < last ? at : last - 1];
    }
  };
  if (kAhead) ask(first);
  for (; first < last; first += kLanes * kPer) {
    if (!kAhead) ask(first);
    Source mine[kPer];
#pragma unroll
    for (int p = 0; p < kPer; ++p)
      mine[p] = first + p * kLanes + lane < last ? source_of(sorted, value[p]) : Source{};
    if (kAhead) ask(first + kLanes * kPer);
#pragma unroll 1
    for (int from = 0; from < kLanes * kPer && first + from < last; from += kAtOnce) {
      Pack<Grad, kVec> read[kAtOnce][kChunks];
      float factor[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const Source next = of_lane(mine[kPer == 1 ? 0 : r / kLanes], from + r);
        factor[r] = next.factor;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          const int c = column + k * kWidth;
          const bool counts = next.row != nullptr && c < dim;
          read[r][k] = counts ? load<kVec>(next.row + c) : zeros<kVec, Grad>();
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
  meanwhile();
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

__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(group_mask(), value, d, kLanes);
  return value;
}

// What one lane finds out of a run, for the group that sums it. Target: what of its row.
template <class Target>
struct Found {
  Source source;  // of the first entry
  Target target;
  unsigned first, last;
  int table;
  bool begins, ends;  // its row
};

// What each_run gives as `sum`.
struct RunSum {
  const Sorted& sorted;
  const Source& source;
  unsigned first, last;
  template <class Meanwhile>
  __device__ __forceinline__ void operator()(int column, int dim, Sums& total,
                                             const Meanwhile& meanwhile) const {
    sum_entries(sorted, source, first, last, column, dim, total, meanwhile);
  }
};

// Calls whole(run, table, target, sum) for each row of one run among the runs [*from, *past), where
// target = whole.target(table, key), and sum(column, dim, total, meanwhile) gives the lane's
// columns of its gradient from `column` on, and calls meanwhile() when it is best to read something
// else. Of a row with more runs each run leaves its sum in `partials`, at 2 * tile where it
// continues the row, at 2 * tile + 1 where it starts it, and calls part(run, tile, starts); a tile
// is `longest` entries.
//
// In a round all warps of the grid take neighbouring runs, a group one: so the long runs of hot
// rows, which stand side by side, are spread over the device. A warp takes up to 32 runs of some
// rounds at a time, and each lane looks for what is to know of one of them: the device waits for
// the places of many runs at once, and lanes of a group do not all do the same. `room` is shared,
// for each warp its own.
template <class Whole, class Part>
__device__ __forceinline__ void each_run(const Sorted& sorted, const unsigned* starts,
                                         const unsigned* from, const unsigned* past,
                                         float* partials, int partial_stride,
                                         Found<typename Whole::Target> (&room)[RECAST_BLOCK],
                                         const Whole& whole, const Part& part) {
  constexpr unsigned kGroupsOfWarp = 32 / kLanes;
  const unsigned lane = threadIdx.x % 32, begin = *from, all = *past;
  const unsigned warps = gridDim.x * (RECAST_BLOCK / 32);
  const unsigned warp = blockIdx.x * (RECAST_BLOCK / 32) + threadIdx.x / 32;
  auto* const found = &room[threadIdx.x / 32 * 32];
  // The warp's r-th run from round `round` on.
  const auto run_of = [&](unsigned round, unsigned r) {
    return begin + ((round + r / kGroupsOfWarp) * warps + warp) * kGroupsOfWarp + r % kGroupsOfWarp;
  };
  for (unsigned round = 0; run_of(round, 0) < all; round += kLanes) {
    if (run_of(round, lane) < all) {
      auto& mine = found[lane];
      const unsigned at = run_of(round, lane), first = starts[at], last = starts[at + 1];
      const Key key = sorted.keys[first & ~kGoesOn];
      mine.source = source_of(sorted, sorted.values[first & ~kGoesOn]);
      mine.first = first & ~kGoesOn;
      mine.last = last & ~kGoesOn;
      mine.table = table_of(sorted, key);
      mine.begins = (first & kGoesOn) == 0;
      mine.ends = (last & kGoesOn) == 0;
      mine.target = whole.target(mine.table, key);
    }
    const unsigned later = run_of(round + kLanes, lane);
    if (later < all) prefetch(&starts[later]);
    __syncwarp();
    for (unsigned r = lane / kLanes; r < 32 && run_of(round, r) < all; r += kGroupsOfWarp) {
      const auto& run = found[r];
      if (run.begins && run.ends) {
        whole(run_of(round, r), run.table, run.target,
              RunSum{sorted, run.source, run.first, run.last});
        continue;
      }
      const unsigned tile = run.first / sorted.longest;
      part(run_of(round, r), tile, run.begins);
      float* const partial =
          partials + (2 * static_cast<Index>(tile) + (run.begins ? 1 : 0)) * partial_stride;
      const int dim = static_cast<int>(sorted.tables[run.table].dim);
      for (int column = 0; column < dim; column += kColumns) {
        Sums total;
        sum_entries(sorted, run.source, run.first, run.last, column, dim, total, [] {});
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
    __syncwarp();
  }
}

// What is left in `partials` of a row that starts in `tile`.
struct Parts {
  const float* partials;
  int stride, tile;
  // total = Σ of the row's parts [first, last), of kVec columns from `column` on.
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

// How many runs the row has that starts in `tile` and is cut behind it, at most kFewParts + 1; 0
// where there is no such row among the sorted tables.
__device__ __forceinline__ int parts_from(const Sorted& sorted, int tile, int tiles) {
  const Key* const keys = sorted.keys;
  const Index longest = sorted.longest, start = tile * longest, next = start + longest;
  if (tile + 1 >= tiles || !is_cut(keys, sorted.entries, longest, next)) return 0;
  const Key key = keys[next];
  const Rows &front = sorted.tables[0], &back = sorted.tables[sorted.n_tables - 1];
  if (key < static_cast<Key>(front.first_key) ||
      key >= static_cast<Key>(back.first_key + back.rows))
    return 0;
  if (start > 0 && keys[start] == key && keys[start - 1] == key) return 0;
  int parts = 2;
#pragma unroll
  for (int part = 2; part <= kFewParts; ++part)
    parts += tile + part < tiles && keys[(tile + part) * longest] == key;
  return parts;
}

// The number of parts of a row of more than kFewParts, by the whole block.
__device__ __forceinline__ int parts_of(const Sorted& sorted, Key key, int tile, int tiles) {
  int parts = kFewParts + 1;  // are known
  for (int past = tiles - tile; parts < past;) {
    const int step = (past - parts + RECAST_BLOCK - 1) / RECAST_BLOCK;
    const Index part = parts + static_cast<Index>(threadIdx.x) * step;
    const int within =
        __syncthreads_count(part < past && sorted.keys[(tile + part) * sorted.longest] == key);
    const Index end = parts + static_cast<Index>(within) * step;
    past = end < past ? static_cast<int>(end) : past;
    parts = within == 0 ? past : parts + (within - 1) * step + 1;
  }
  return parts;
}

// What each_row_of_parts gives as `sum`: of a row of few parts, and of one whose sum is there.
struct PartSum {
  const Parts& row;
  int parts;
  template <class Meanwhile>
  __device__ __forceinline__ void operator()(int column, int dim, Sums& total,
                                             const Meanwhile& meanwhile) const {
    meanwhile();
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = column + threadIdx.x % kLanes * kVec + k * kWidth;
      row.sum(0, c < dim ? parts : 0, c, total[k]);
    }
  }
};

struct DoneSum {
  const float* sums;
  template <class Meanwhile>
  __device__ __forceinline__ void operator()(int column, int dim, Sums& total,
                                             const Meanwhile& meanwhile) const {
    meanwhile();
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int c = column + threadIdx.x % kLanes * kVec + k * kWidth + e;
        total[k][e] = c < dim ? sums[c] : 0.0f;
      }
  }
};

// What a block shares in each_row_of_parts.
struct Room {
  Stretches stretches;
  int parts[kTilesOfBlock];  // of the row that starts in a tile
};

// Calls whole(tile, table, target, sum), by one group of lanes, for each row that each_run left in
// parts, where `tile` is the one that the row starts in. A group sums few parts alone, the block
// those of long rows: each group a stretch of them, then the stretches in order.
template <class Whole>
__device__ __forceinline__ void each_row_of_parts(const Sorted& sorted, float* partials,
                                                  int partial_stride, Room& room,
                                                  const Whole& whole) {
  const int tiles = (sorted.entries + sorted.longest - 1) / sorted.longest;
  const int group = threadIdx.x / kLanes, first_tile = static_cast<int>(blockIdx.x) * kTilesOfBlock;
  for (int t = threadIdx.x; t < kTilesOfBlock; t += RECAST_BLOCK)
    room.parts[t] = parts_from(sorted, first_tile + t, tiles);
  __syncthreads();
  for (int t = group; t < kTilesOfBlock; t += kGroups) {
    const int parts = room.parts[t], tile = first_tile + t;
    if (parts == 0 || parts > kFewParts) continue;
    const Key key = sorted.keys[static_cast<Index>(tile + 1) * sorted.longest];
    const Parts row = {partials, partial_stride, tile};
    const int table = table_of(sorted, key);
    whole(tile, table, whole.target(table, key), PartSum{row, parts});
  }
  for (int t = 0; t < kTilesOfBlock; ++t) {
    if (room.parts[t] <= kFewParts) continue;
    const int tile = first_tile + t;
    const Key key = sorted.keys[static_cast<Index>(tile + 1) * sorted.longest];
    const int parts = parts_of(sorted, key, tile, tiles), table = table_of(sorted, key);
    const Parts row = {partials, partial_stride, tile};
    // The first part's place takes the sum of all.
    float* const sums = partials + (2 * static_cast<Index>(tile) + 1) * partial_stride;
    const int dim = static_cast<int>(sorted.tables[table].dim);
    const int share = (parts + kGroups - 1) / kGroups;
    const int first = group * share < parts ? group * share : parts;
    const int last = parts - first < share ? parts : first + share;
    for (int column = 0; column < dim; column += kColumns) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int at = threadIdx.x % kLanes * kVec + k * kWidth;
        float total[kVec];
        row.sum(first, column + at < dim ? last : first, column + at, total);
#pragma unroll
        for (int e = 0; e < kVec; ++e) room.stretches[group][at + e] = total[e];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < kColumns && column + c < dim; c += RECAST_BLOCK) {
        float total = 0.0f;
        for (int g = 0; g < kGroups; ++g) total += room.stretches[g][c];
        sums[column + c] = total;
      }
      __syncthreads();
    }
    if (group != 0) continue;
    whole(tile, table, whole.target(table, key), DoneSum{sums});
  }
}

}  // namespace recast
