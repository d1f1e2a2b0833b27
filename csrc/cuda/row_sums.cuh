// Sums of gradients by row, for row_update.cu and row_norm.cu. A warp takes RECAST_TILE neighbours
// of the sorted entries, each of its groups of RECAST_LANES lanes an equal chunk of them, wherever
// rows start and end: so all lanes have the same to read, whether rows have one entry or
// thousands. Rows that several chunks share are put together in the warp; rows that several tiles
// share leave a part in each, and are put together by a second kernel.
//
// A row's gradients are added in the order of its entries; those of a row in several chunks in
// stretches that their places and the macros alone decide. So results repeat bit by bit, for any
// grid.
//
// Of the macros at the heads of those files it reads RECAST_GRAD, RECAST_TABLE, RECAST_VEC,
// RECAST_LANES, RECAST_CHUNKS, RECAST_TILE, RECAST_BLOCK and RECAST_WIDE_KEY.
//
// What is done with a row is a `Row`:
//   Held, kHeld        what a lane reads to deal with its columns of a row, and in how many
//                      registers it reads it beside the gradients; 0: it reads later
//   kPasses            how often all columns of a row are walked that is wider than kColumns
//   enter(table, column)
//                      the rows from now on are of this table, the lane's columns those from
//                      `column` on; it sets `dim` and `past`, the first key behind the table
//   read(key, column, held)
//   done(key, entry, column, pass, number, held, sum)
//                      the sum of the row's gradients is there; `entry` is the row's alone, and
//                      *number the group's, for as long as the walks over that row take
// A lane whose columns lie past the last of a table sums other memory; its result must not be used.
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
constexpr int kWarps = RECAST_BLOCK / 32;
constexpr int kWidth = kLanes * kVec;
constexpr int kColumns = kWidth * kChunks;
constexpr int kTile = RECAST_TILE;
constexpr int kGroupsOfWarp = 32 / kLanes;
constexpr int kChunk = kTile / kGroupsOfWarp;  // entries of a group
static_assert(kTile % 32 == 0, "a tile is shared by the groups of a warp");

constexpr int kTilesOfBlock = 32;  // in the kernels that put parts together
constexpr int kFewParts = 16;      // of a row, that a group sums alone
constexpr int kPartsAtOnce = kVec >= 8 ? 4 : 8;
// How many such blocks run at once; many, since they wait for memory most of the time.
constexpr int kCombining = (kChunks * kVec <= 4   ? 640
                            : kChunks * kVec <= 8 ? 512
                                                  : 256) /
                           RECAST_BLOCK;

// Registers that a lane reads of a gradient row.
constexpr int kOfGradient = kChunks * kVec * static_cast<int>(sizeof(Grad)) / 4;

constexpr unsigned kWarp = 0xffffffffu;
constexpr Key kNoKey = ~Key{0};  // of no row

using Sums = float[kChunks][kVec];
using Stretches = float[kGroups][kColumns];

// What row_sort.cu leaves, and the tables [tables, tables + n_tables) to sum, neighbours there,
// whose entries are [from, past), of which the last of a table may get no gradient.
struct Sorted {
  const Piece* pieces;
  int bag_bits;
  const Rows* tables;
  int n_tables;
  const Key* keys;         // sorted
  const unsigned* values;  // of the keys
  unsigned entries, from, past;
};

// A gradient row, its factor, and the row of the table that it is for.
struct alignas(sizeof(Key) == 4 ? 16 : 8) Entry {
  const Grad* row;
  float factor;
  Key key;
};

// Those of a warp's tile: one before it; then those of each group, and the key behind them. So the
// groups, which walk side by side, read from different banks.
constexpr int kStride = kChunk + 1;
using Entries = Entry[kGroupsOfWarp * kStride + 1];

// What a block shares in each_tile.
constexpr bool kKeepsFronts = kChunks * kVec <= 8;  // of more there is no room
// One for each entry, where a row may take several walks.
template <class Row>
constexpr int kNumbers = Row::kPasses > 1 && kTile <= 128 ? kTile : 1;
template <class Row>
struct Shared {
  Entries entries[kWarps];
  Sums fronts[kKeepsFronts ? RECAST_BLOCK : 1];  // see Walk
  float numbers[kWarps][kNumbers<Row>];          // see Row
};

// The lanes of this thread's group.
__device__ __forceinline__ unsigned group_mask() {
  if (kLanes == 32) return kWarp;
  return ((1u << (kLanes % 32)) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
}

__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(group_mask(), value, d, kLanes);
  return value;
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

// The same by the whole warp, at once.
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
  return static_cast<const Grad*>(gradient) + static_cast<Wide>(at) * stride;
}

// The same of a piece that has factors.
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

// Reads, with the whole warp, where the gradients of a tile's entries are; the tile starts at
// `first`.
__device__ __forceinline__ void describe(const Sorted& sorted, unsigned first, Entries& entries) {
  constexpr int kPer = kTile / 32, kTogether = kPer < 4 ? kPer : 4;
  const int lane = threadIdx.x % 32;
  if (lane < 2) {
    const unsigned at = lane == 0 ? first - 1 : first + kTile;  // before the first: very large
    entries[lane * kGroupsOfWarp * kStride].key = at < sorted.entries ? sorted.keys[at] : kNoKey;
  }
  const unsigned bags = (1u << sorted.bag_bits) - 1;
#pragma unroll 1
  for (int i = 0; i < kPer; i += kTogether) {
    Entry entry[kTogether];
    unsigned value[kTogether];
    Index flags[kTogether];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const unsigned at = first + (i + r) * 32 + lane;
      entry[r].key = at < sorted.entries ? sorted.keys[at] : kNoKey;
      // Others may be of pieces of another dtype: their rows are not read.
      value[r] = at >= sorted.from && at < sorted.past ? sorted.values[at] : 0;
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const Piece& piece = sorted.pieces[value[r] >> sorted.bag_bits];
      flags[r] = piece.flags;
      entry[r].row = row_at(piece.gradient, static_cast<unsigned>(piece.stride), value[r] & bags);
      entry[r].factor = 1.0f;
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
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

// The lane's columns from `column` on, in `partials`, of the part of a row that a tile has: of one
// that starts before it, or of one that starts in it.
__device__ __forceinline__ void leave(float* partials, int stride, unsigned tile, bool starts,
                                      int column, int dim, const Sums& sums) {
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

// One walk of a group over its chunk of a tile.
template <class Row>
struct Walk {
  Row& row;
  const Entry* entries;  // of the chunk
  unsigned first;        // number of the first
  int column, pass;
  float* numbers;
  bool begun;         // whether the row in `sum` starts in the chunk
  Sums& front;        // else the sum of that row is kept here when it ends
  int front_end = 0;  // behind its last entry
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

  // The entries [at, at + kMany), of a row that goes on behind them.
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

  // The entries [at, at + kMany), all of one table.
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

// One walk over a tile for the columns from `column` on, by a warp: the group's entries are
// [at, end) of its chunk, and `table` is that of the tile's first.
template <class Row>
__device__ __forceinline__ void walk(const Sorted& sorted, Row& row, const Entries& entries,
                                     unsigned tile, int table, int at, int end, int column,
                                     int pass, float* numbers, Sums& kept, float* partials,
                                     int partial_stride) {
  // Entries whose rows are under way at once, as registers allow.
  constexpr int kRegisters = kOfGradient + Row::kHeld;
  constexpr int kAtOnce = kRegisters <= 12 && kChunks == 1 ? 4 : kRegisters <= 24 ? 2 : 1;
  // The same of one row with many, of which nothing else is read.
  constexpr int kOfRun = kOfGradient <= 4 && Row::kHeld <= 8 ? 8 : kOfGradient <= 8 ? 4 : 2;
  const int group = threadIdx.x % 32 / kLanes;
  const Entry* const own = entries + group * kStride + 1;
  Sums in_registers = {};
  Walk<Row> walk = {row,
                    own,
                    tile * kTile + group * kChunk,
                    column,
                    pass,
                    numbers + (kNumbers<Row> > 1 ? group * kChunk : 0),
                    true,
                    kKeepsFronts ? kept : in_registers};
  const bool some = at < end;
  // Before the first of a chunk is the key behind the chunk before: its own.
  if (some) walk.begun = own[at].key != own[at == 0 && group > 0 ? -2 : at - 1].key;
  walk.enter(table);
  while (at < end) {
    const Key key = own[at].key;
    if (key >= row.past) {
      walk.enter(table_of(sorted, key));
      if (key >= row.past) {  // of ids that get no gradient
        do ++at;
        while (at < end && own[at].key == key);
        walk.begun = true;
        continue;
      }
    }
    if (at + kOfRun <= end && own[at + kOfRun].key == key) {
      walk.template add<kOfRun>(at);
      at += kOfRun;
    } else if (at + kAtOnce <= end && own[at + kAtOnce - 1].key < row.past) {
      walk.template take<kAtOnce>(at);
      at += kAtOnce;
    } else {
      walk.template take<1>(at);
      ++at;
    }
  }

  // A row that has not ended at the end of the chunk goes on in the next group's chunk.
  Sums& sum = walk.sum;
  const bool open = some && own[end - 1].key == own[end].key && own[end].key < row.past;
  if (!__any_sync(kWarp, open || walk.front_end > 0)) return;
  bool starts = !open || walk.begun;  // the open row starts in this chunk: later, in the tile
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
    leave(partials, partial_stride, tile, starts, column, row.dim, sum);
  const bool whole = __shfl_up_sync(kWarp, static_cast<int>(starts), kLanes % 32) != 0 && group > 0;
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
  if (whole) {
    typename Row::Held held;
    if constexpr (Row::kHeld > 0) row.read(key, column, held);
    row.done(key, walk.first + last, column, pass, walk.number(last), held, sum);
  } else {
    leave(partials, partial_stride, tile, false, column, row.dim, sum);
  }
}

// Hands each row whose entries are all in one tile to `row`; of others each tile leaves its part in
// `partials`, at 2 * tile where the row starts before it, at 2 * tile + 1 where it starts in it.
// `widest`: the largest dim.
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
    describe(sorted, first, entries);
    __syncwarp();
    const int low = first < sorted.from ? static_cast<int>(sorted.from - first) : 0;
    const int high = sorted.past - first < kTile ? static_cast<int>(sorted.past - first) : kTile;
    const int table = warp_table_of(sorted, entries[low + low / kChunk + 1].key);
    const int start = group * kChunk, at = start < low ? low - start : 0;
    const int end = start + kChunk < high ? kChunk : high - start;
    for (int pass = 0; pass < passes; ++pass)
      for (int column = 0; column < widest; column += kColumns) {
        walk(sorted, row, entries, tile, table, at, end, column, pass, shared.numbers[warp],
             shared.fronts[kKeepsFronts ? threadIdx.x : 0], partials, partial_stride);
        __syncwarp();
      }
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

// How many parts the row has that starts in `tile` and goes on behind it, at most kFewParts + 1; 0
// where there is no such row among the sorted tables.
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

// The number of parts of a row of more than kFewParts, by the whole block.
__device__ __forceinline__ int parts_of(const Sorted& sorted, Key key, int tile) {
  int parts = kFewParts + 1;  // are known
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

// What a block shares in each_row_of_parts.
struct Room {
  Stretches stretches;
  int parts[kTilesOfBlock];  // of the row that starts in a tile
  float numbers[kGroups];
};

// Hands a row that is in parts to `row`, by a group of lanes; sum(column, g) gives its gradient.
template <class Row, class Sum>
__device__ __forceinline__ void hand(const Sorted& sorted, Row& row, Key key, int tile,
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

// Hands each row that each_tile left in parts to `row`. A group sums few parts alone, the block
// those of long rows: each group a stretch of them, then the stretches in order.
template <class Row>
__device__ __forceinline__ void each_row_of_parts(const Sorted& sorted, Row& row, float* partials,
                                                  int partial_stride, Room& room) {
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int first_tile = sorted.from / kTile + static_cast<int>(blockIdx.x) * kTilesOfBlock;
  for (int t = threadIdx.x; t < kTilesOfBlock; t += RECAST_BLOCK)
    room.parts[t] = parts_from(sorted, static_cast<Index>(first_tile) + t);
  __syncthreads();
  for (int t = group; t < kTilesOfBlock; t += kGroups) {
    const int parts = room.parts[t], tile = first_tile + t;
    if (parts == 0 || parts > kFewParts) continue;
    const Parts of = {partials, partial_stride, tile};
    hand(sorted, row, sorted.keys[static_cast<Index>(tile + 1) * kTile], tile, &room.numbers[group],
         [&](int column, Sums& g) {
#pragma unroll
           for (int k = 0; k < kChunks; ++k) {
             const int c = column + lane * kVec + k * kWidth;
             of.sum(0, c < row.dim ? parts : 0, c, g[k]);
           }
         });
  }
  for (int t = 0; t < kTilesOfBlock; ++t) {
    if (room.parts[t] <= kFewParts) continue;
    const int tile = first_tile + t;
    const Key key = sorted.keys[static_cast<Index>(tile + 1) * kTile];
    const int parts = parts_of(sorted, key, tile);
    const int dim = static_cast<int>(sorted.tables[table_of(sorted, key)].dim);
    const Parts of = {partials, partial_stride, tile};
    // The first part's place takes the sum of all.
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
    hand(sorted, row, key, tile, &room.numbers[0], [&](int column, Sums& g) {
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
