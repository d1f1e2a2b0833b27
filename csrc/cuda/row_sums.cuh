// Sums the gradients of every looked-up row, for row_update.cu and row_norm.cu:
//
//     sum[row] = Σ factor[entry] * gradient[entry]    over the entries whose key is the row's
//
// The entries are sorted by key, so those of a row are consecutive. A warp takes a tile of
// RECAST_TILE entries and each of its groups of RECAST_LANES lanes an equal chunk of the tile,
// wherever rows start and end: the work is balanced whether rows have one entry or thousands. Rows
// that span several chunks of a tile are combined by shuffles. Of rows that span several tiles each
// tile writes a partial sum to `partials`, which a second kernel combines (row_parts.cuh).
//
// The gradients of a row are added in the order of its entries, cut at chunk and tile boundaries
// that depend on positions and macros only: results are bitwise reproducible for any grid.
//
// Reads the macros RECAST_GRAD, RECAST_TABLE, RECAST_VEC, RECAST_LANES, RECAST_CHUNKS, RECAST_TILE,
// RECAST_BLOCK and RECAST_WIDE_KEY as those files describe them.
//
// The template parameter `Row` is what is done with a row once its sum is known:
//   Held, kHeld        what a lane loads of the row itself, and in how many registers it holds it
//                      while gradients are summed; kHeld 0: done() loads it
//   kPasses            how often the columns of a row wider than kColumns are walked
//   enter(table, column)
//                      the next rows are of this table, and the lane's columns start at `column`;
//                      sets `dim` and `past`, the first key behind the table
//   read(key, column, held)
//   done(key, entry, column, pass, number, held, sum)
//                      called with the complete sum. `entry` is one of the row's own entries;
//                      *number is the group's, and keeps its value during all walks of the row
// Lanes whose columns lie past the last one of a table sum other columns; their result must not be
// used.
#pragma once

#include "intrinsics.cuh"
#include "pieces.cuh"
#include "reductions.cuh"

namespace recast {

using Grad = Dtype<RECAST_GRAD>::type;
using Table = Dtype<RECAST_TABLE>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kChunks = RECAST_CHUNKS;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;
constexpr int kWarps = RECAST_BLOCK / 32;
constexpr int kWidth = kLanes * kVec;
constexpr int kColumns = kWidth * kChunks;
constexpr int kTile = RECAST_TILE;
constexpr int kGroupsOfWarp = 32 / kLanes;
constexpr int kChunk = kTile / kGroupsOfWarp;  // entries of a tile that a group sums
static_assert(kTile % 32 == 0, "a tile is shared by the groups of a warp");

// Registers that a lane's part of a gradient row takes.
constexpr int kGradientRegisters = kChunks * kVec * static_cast<int>(sizeof(Grad)) / 4;

constexpr unsigned kWarp = 0xffffffffu;
constexpr Key kNoKey = ~Key{0};  // larger than the key of any row

using Sums = float[kChunks][kVec];

// The output of row_sort.cu, and the tables to sum. The tables are consecutive in the order of
// keys, and their entries are [from, past); the last entries of each table may get no gradient.
struct Sorted {
  const Piece* pieces;
  int bag_bits;
  const Rows* tables;
  int n_tables;
  const Key* keys;         // sorted
  const unsigned* values;  // of the keys
  unsigned entries, from, past;
};

// One entry of a tile in shared memory: its gradient row, the factor of that, and its key.
struct alignas(sizeof(Key) == 4 ? 16 : 8) Entry {
  const Grad* row;
  float factor;
  Key key;
};

// The entries of a warp's tile: the one before it, then each group's chunk followed by a copy of
// the next key. The odd stride makes the groups, which walk in step, read from different banks.
constexpr int kStride = kChunk + 1;
using Entries = Entry[kGroupsOfWarp * kStride + 1];

// Shared memory of each_tile.
constexpr bool kKeepsFronts = kChunks * kVec <= 8;  // larger sums do not fit and stay in registers
// One a tile entry where a row may take several walks.
template <class Row>
constexpr int kNumbers = Row::kPasses > 1 && kTile <= 128 ? kTile : 1;
template <class Row>
struct Shared {
  Entries entries[kWarps];
  Sums fronts[kKeepsFronts ? RECAST_BLOCK : 1];  // see GroupWalk::front
  float numbers[kWarps][kNumbers<Row>];          // see Row
};

// The index of the table that `key` belongs to, by binary search.
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

// The same by a whole warp, 32 tables at a time.
__device__ __forceinline__ int warp_table_of(const Sorted& sorted, Key key) {
  int number = -1;
  for (int first = 0; first < sorted.n_tables; first += 32) {
    const int at = first + static_cast<int>(threadIdx.x) % 32;
    number += __popc(__ballot_sync(
        kWarp, at < sorted.n_tables && static_cast<Key>(sorted.tables[at].first_key) <= key));
  }
  return number < 0 ? 0 : number;
}

// Where a gradient row starts.
__device__ __forceinline__ const Grad* row_at(const void* gradient, unsigned stride, unsigned at) {
  return static_cast<const Grad*>(gradient) + static_cast<UInt64>(at) * stride;
}

// The gradient row and factor of an entry whose piece is not kPlain.
__device__ __forceinline__ void find_factor(const Piece& piece, unsigned at, Entry& entry) {
  float factor = piece.factor != nullptr ? *piece.factor : piece.times;
  if (piece.weights != nullptr) {
    factor *= widen(static_cast<const Table*>(piece.weights)[at]);
    at = piece.bag_of[at];
  }
  if (piece.flags & kMean) factor *= piece.bag_factors[at];
  entry.row = row_at(piece.gradient, static_cast<unsigned>(piece.stride), at);
  entry.factor = factor;
}

// Fills `entries` for the tile that starts at entry `first`, by the whole warp.
__device__ __forceinline__ void load_entries(const Sorted& sorted, unsigned first,
                                             Entries& entries) {
  constexpr int kPerLane = kTile / 32, kLoads = kPerLane < 4 ? kPerLane : 4;
  const int lane = threadIdx.x % 32;
  if (lane < 2) {
    const unsigned at =
        lane == 0 ? first - 1 : first + kTile;  // first - 1 wraps around where first is 0
    entries[lane * kGroupsOfWarp * kStride].key = at < sorted.entries ? sorted.keys[at] : kNoKey;
  }
  const unsigned bags = (1u << sorted.bag_bits) - 1;
#pragma unroll 1
  for (int i = 0; i < kPerLane; i += kLoads) {
    Entry entry[kLoads];
    unsigned value[kLoads];
    Index flags[kLoads];
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      const unsigned at = first + (i + r) * 32 + lane;
      entry[r].key = at < sorted.entries ? sorted.keys[at] : kNoKey;
      // Entries of other launches may have gradients of another dtype and are not read.
      value[r] = at >= sorted.from && at < sorted.past ? sorted.values[at] : 0;
    }
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      const Piece& piece = sorted.pieces[value[r] >> sorted.bag_bits];
      flags[r] = piece.flags;
      entry[r].row = row_at(piece.gradient, static_cast<unsigned>(piece.stride), value[r] & bags);
      entry[r].factor = 1.0f;
    }
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      const int place = (i + r) * 32 + lane, group = place / kChunk;
      const unsigned at = first + place;
      if (!(flags[r] & kPlain) && at >= sorted.from && at < sorted.past)
        find_factor(sorted.pieces[value[r] >> sorted.bag_bits], value[r] & bags, entry[r]);
      entries[group + place + 1] = entry[r];
      if (place % kChunk == 0 && group > 0) entries[group * kStride].key = entry[r].key;
    }
  }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int k = 0; k < kChunks; ++k)
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums[k][e] = 0.0f;
}

// Writes a tile's partial sum of a row to `partials`: to slot 2 * tile + 1 if the row `starts` in
// the tile, else, if it started in an earlier tile, to slot 2 * tile.
__device__ __forceinline__ void store_partial(float* partials, int stride, unsigned tile,
                                              bool starts, int column, int dim, const Sums& sums) {
  float* const part = partials + static_cast<Index>(2 * tile + (starts ? 1 : 0)) * stride;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int c = column + threadIdx.x % kLanes * kVec + k * kWidth;
    if (c >= dim) break;
    Pack<float, kVec> pack;
#pragma unroll
    for (int e = 0; e < kVec; ++e) pack.at[e] = sums[k][e];
    store<kVec>(part + c, pack);
  }
}

// One walk of a group of lanes over its chunk of a tile.
template <class Row>
struct GroupWalk {
  Row& row;
  const Entry* entries;  // of the chunk
  unsigned first;        // number of the first
  int column, pass;
  float* numbers;
  bool begun;         // whether the row being summed starts in this chunk
  Sums& front;        // sum of the chunk's first row, if that started in an earlier chunk
  int front_end = 0;  // the entry behind that row's last; 0: it does not end in this chunk
  Sums sum = {};
  int from[kChunks] = {};  // the lane's columns

  __device__ __forceinline__ float* number(int place) const {
    return numbers + (kNumbers<Row> > 1 ? place : 0);
  }

  __device__ __forceinline__ void enter(int table) {
    row.enter(table, column);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = column + static_cast<int>(threadIdx.x) % kLanes * kVec + k * kWidth;
      from[k] = c < row.dim ? c : 0;
    }
  }

  // Adds the entries [at, at + kMany), all of one row that continues behind them.
  template <int kMany>
  __device__ __forceinline__ void add(int at) {
    Pack<Grad, kVec> read[kMany][kChunks];
    float factor[kMany];
#pragma unroll
    for (int r = 0; r < kMany; ++r) {
      const Entry entry = entries[at + r];
      const Grad* const gradient = in_global(entry.row);
      factor[r] = entry.factor;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) read[r][k] = load<kVec>(gradient + from[k]);
    }
#pragma unroll
    for (int r = 0; r < kMany; ++r)
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[k][e] += widen(read[r][k].at[e]) * factor[r];
  }

  // Adds the entries [at, at + kMany), all of one table, and finishes the rows that end there.
  template <int kMany>
  __device__ __forceinline__ void take(int at) {
    Pack<Grad, kVec> read[kMany][kChunks];
    typename Row::Held held[kMany];
    float factor[kMany];
    Key key[kMany + 1];
    key[0] = entries[at].key;
#pragma unroll
    for (int r = 0; r < kMany; ++r) {
      const Entry entry = entries[at + r];
      const Grad* const gradient = in_global(entry.row);
      factor[r] = entry.factor;
      key[r + 1] = entries[at + r + 1].key;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) read[r][k] = load<kVec>(gradient + from[k]);
      if constexpr (Row::kHeld > 0)
        if (key[r] != key[r + 1]) row.read(key[r], column, held[r]);
    }
#pragma unroll
    for (int r = 0; r < kMany; ++r) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[k][e] += widen(read[r][k].at[e]) * factor[r];
      if (key[r] == key[r + 1]) continue;
      if (begun) {
        row.done(key[r], first + at + r, column, pass, number(at + r), held[r], sum);
      } else {
        begun = true;
        front_end = at + r + 1;
#pragma unroll
        for (int k = 0; k < kChunks; ++k)
#pragma unroll
          for (int e = 0; e < kVec; ++e) front[k][e] = sum[k][e];
      }
      clear(sum);
    }
  }
};

// One walk of a warp over a tile, for the columns from `column` on. The group's entries are [at,
// end) of its chunk; `table` is the table of the tile's first entry.
template <class Row>
__device__ __forceinline__ void walk_tile(const Sorted& sorted, Row& row, const Entries& entries,
                                          unsigned tile, int table, int at, int end, int column,
                                          int pass, float* numbers, Sums& front_in_shared,
                                          float* partials, int partial_stride) {
  // Entries whose loads are in flight together, as many as registers allow.
  constexpr int kRegisters = kGradientRegisters + Row::kHeld;
  constexpr int kUnroll = kRegisters <= 12 && kChunks == 1 ? 4 : kRegisters <= 24 ? 2 : 1;
  // The same within a long row, where only gradients are loaded.
  constexpr int kRunUnroll = kGradientRegisters <= 4 && Row::kHeld <= 8 ? 8
                             : kGradientRegisters <= 8                  ? 4
                                                                        : 2;
  const int group = threadIdx.x % 32 / kLanes;
  const Entry* const own = entries + group * kStride + 1;
  Sums in_registers = {};
  GroupWalk<Row> walk = {row,
                         own,
                         tile * kTile + group * kChunk,
                         column,
                         pass,
                         numbers + (kNumbers<Row> > 1 ? group * kChunk : 0),
                         true,
                         kKeepsFronts ? front_in_shared : in_registers};
  const bool has_entries = at < end;
  // own[-1] is the copy of this chunk's first key behind the previous chunk; the entry before is
  // [-2].
  if (has_entries) walk.begun = own[at].key != own[at == 0 && group > 0 ? -2 : at - 1].key;
  walk.enter(table);
  while (at < end) {
    const Key key = own[at].key;
    if (key >= row.past) {
      walk.enter(table_of(sorted, key));
      if (key >= row.past) {  // ids that get no gradient: skip them
        do ++at;
        while (at < end && own[at].key == key);
        walk.begun = true;
        continue;
      }
    }
    if (at + kRunUnroll <= end && own[at + kRunUnroll].key == key) {
      walk.template add<kRunUnroll>(at);
      at += kRunUnroll;
    } else if (at + kUnroll <= end && own[at + kUnroll - 1].key < row.past) {
      walk.template take<kUnroll>(at);
      at += kUnroll;
    } else {
      walk.template take<1>(at);
      ++at;
    }
  }

  // A row still open at the end of the chunk continues in the next group's chunk: scan its sums
  // over the groups of the warp.
  Sums& sum = walk.sum;
  const bool open = has_entries && own[end - 1].key == own[end].key && own[end].key < row.past;
  if (!__any_sync(kWarp, open || walk.front_end > 0)) return;
  bool starts =
      !open ||
      walk.begun;  // whether the open row starts in this chunk; after the scan, in the tile
#pragma unroll
  for (int d = 1; d < kGroupsOfWarp; d *= 2) {
    const bool before = __shfl_up_sync(kWarp, static_cast<int>(starts), d * kLanes) != 0;
    const bool takes = group >= d && !starts;
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float left = __shfl_up_sync(kWarp, sum[k][e], d * kLanes);
        sum[k][e] = takes ? left + sum[k][e] : sum[k][e];
      }
    starts = takes ? before : starts;
  }
  if (open && group == kGroupsOfWarp - 1)
    store_partial(partials, partial_stride, tile, starts, column, row.dim, sum);
  const bool is_complete =
      __shfl_up_sync(kWarp, static_cast<int>(starts), kLanes % 32) != 0 && group > 0;
#pragma unroll
  for (int k = 0; k < kChunks; ++k)
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float left = __shfl_up_sync(kWarp, sum[k][e], kLanes % 32);
      sum[k][e] = group > 0 ? left : 0.0f;
    }
  if (walk.front_end == 0) return;
#pragma unroll
  for (int k = 0; k < kChunks; ++k)
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[k][e] += walk.front[k][e];
  const int last = walk.front_end - 1;
  const Key key = own[last].key;
  row.enter(table_of(sorted, key), column);
  if (is_complete) {
    typename Row::Held held;
    if constexpr (Row::kHeld > 0) row.read(key, column, held);
    row.done(key, walk.first + last, column, pass, walk.number(last), held, sum);
  } else {
    store_partial(partials, partial_stride, tile, false, column, row.dim, sum);
  }
}

// The first kernel: calls row.done() for each row whose entries are all in one tile. For the others
// each tile writes its partial sum to `partials`, see store_partial. `widest`: the largest dim.
template <class Row>
__device__ __forceinline__ void each_tile(const Sorted& sorted, Row& row, int widest,
                                          Shared<Row>& shared, float* partials,
                                          int partial_stride) {
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / kLanes;
  Entries& entries = shared.entries[warp];
  const int passes = widest > kColumns ? Row::kPasses : 1;
  for (unsigned tile = sorted.from / kTile + blockIdx.x * kWarps + warp; tile * kTile < sorted.past;
       tile += gridDim.x * kWarps) {
    const unsigned first = tile * kTile;
    load_entries(sorted, first, entries);
    __syncwarp();
    const int low = first < sorted.from ? static_cast<int>(sorted.from - first) : 0;
    const int high = sorted.past - first < kTile ? static_cast<int>(sorted.past - first) : kTile;
    const int table = warp_table_of(sorted, entries[low + low / kChunk + 1].key);
    const int start = group * kChunk, at = start < low ? low - start : 0;
    const int end = start + kChunk < high ? kChunk : high - start;
    for (int pass = 0; pass < passes; ++pass)
      for (int column = 0; column < widest; column += kColumns) {
        walk_tile(sorted, row, entries, tile, table, at, end, column, pass, shared.numbers[warp],
                  shared.fronts[kKeepsFronts ? threadIdx.x : 0], partials, partial_stride);
        __syncwarp();
      }
  }
}

}  // namespace recast
