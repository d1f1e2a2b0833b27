// Sorts the ids of all lookups by row: a stable LSD radix sort of (key, value) pairs, see
// pieces.cuh. Finds where the entries of each table start, and where each run of equal keys starts.
//
// Macros:
//   RECAST_WIDE_KEY  see pieces.cuh
//
// The entries of a table are consecutive before they are sorted, so each table is sorted by itself,
// in as many passes as its number of rows needs. A Segment is the work of one pass on one table;
// tables that need fewer passes take part in the last ones.
//
// The steps, each a kernel, all on one stream; nothing is read back by the host:
//   bag_factors   where a piece takes means
//   linearise     ids -> keys and values, in the order of pieces and ids, and histograms of each
//                 table's first digit
//   for each pass, with digits of at most 10 bits, of each table from its lowest on:
//     digit_counts, scan_totals, scan_counts, scatter      stable, so equal keys keep their order
//   find_tables                                            where the entries of each table start
// In a table's first pass digit_counts is skipped, as linearise has counted. run_totals and
// run_starts find where each run of equal keys starts, where the host needs it.
//
// The key of an id that gets no gradient (padding, or outside its table) is the number of rows of
// its table plus the table's first key, so that it sorts behind all rows of the table.
//
// Every kernel is launched with 256 threads and no dynamic shared memory. A tile is kTile entries
// of one table (4096, or 2048 with wide keys); a table's last tile may be smaller. There are fewer
// than 2^30 entries, and piece << bag_bits | bag fits 32 bits.
#include "intrinsics.cuh"
#include "pieces.cuh"

namespace {

using recast::Index;
using recast::Piece;
using recast::UInt64;

#include "block_scan.cuh"
#include "piece_ids.cuh"

constexpr int kDigits = 1024;                     // at most
constexpr int kItems = RECAST_WIDE_KEY ? 8 : 16;  // entries of a thread
constexpr int kTile = kThreads * kItems;
constexpr int kScanItems = 16;
constexpr int kScanTile = kThreads * kScanItems;

// Resident blocks of scatter() on a multiprocessor: with four it spills registers on all but
// Hopper.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 == 9
constexpr int kScatters = 4;
#else
constexpr int kScatters = 3;
#endif

// The work of one pass on one table: ten fields of 8 bytes, as the host writes them. Tiles are
// numbered through all tables of a pass. The histogram of a table's tile is at counts[first_count +
// digit * tiles + tile], an order in which one exclusive scan over all counts gives every (digit,
// tile) its position among the entries of this pass.
struct Segment {
  Index first_entry, entries;
  Index first_key;
  Index first_tile, tiles;
  Index first_count;
  Index moved;        // the table's first entry, less the entries of the tables before it
  Index shift, bits;  // of the digit
  Index flags;        // kCounted; kOther: linearise writes its entries to the other buffer
};
enum SegmentFlag { kCounted = 1, kOther = 2 };

// The tile of this block, from its table's Segment.
struct Tile {
  int first, size, shift;
  unsigned mask, count, stride;  // its counts: counts[count + digit * stride]
  unsigned moved;
  Key first_key;
  bool counted, other;
};

// Where the warp's share of a tile of kScanTile items starts in it.
__device__ __forceinline__ int warp_offset() { return threadIdx.x / 32 * 32 * kScanItems; }

// How many of n ascending first keys are <= key, by binary search.
__device__ __forceinline__ int keys_up_to(const Index* first_keys, int n, Key key) {
  int least = 0;
  for (int past = n; least < past;) {
    const int middle = (least + past) / 2;
    const bool within = static_cast<Key>(first_keys[middle]) <= key;
    least = within ? middle + 1 : least;
    past = within ? past : middle;
  }
  return least;
}

__device__ __forceinline__ void clear(unsigned (&tally)[kDigits], unsigned mask) {
  for (unsigned digit = threadIdx.x; digit <= mask; digit += kThreads) tally[digit] = 0;
}

// Writes the histogram of this block's tile.
__device__ __forceinline__ void write_counts(const unsigned (&tally)[kDigits], const Tile& tile,
                                             unsigned* counts) {
  for (unsigned digit = threadIdx.x; digit <= tile.mask; digit += kThreads)
    counts[tile.count + digit * tile.stride] = tally[digit];
}

__device__ __forceinline__ unsigned digit_of(const Tile& tile, Key key) {
  return static_cast<unsigned>((key - tile.first_key) >> tile.shift) & tile.mask;
}

// Without segments all entries belong to one table with first key 0.
__device__ __forceinline__ Tile tile_of(const Segment* segments, int n_segments, int entries,
                                        int shift, int bits) {
  Segment of = {0, entries, 0, 0, gridDim.x, 0, 0, shift, bits, 0};
  if (segments != nullptr) {
    int number = -1;  // the last segment with first_tile <= blockIdx.x
    for (int first = 0; first < n_segments; first += 32) {
      const int at = first + static_cast<int>(threadIdx.x) % 32;
      const bool before = at < n_segments && segments[at].first_tile <= blockIdx.x;
      number += __popc(__ballot_sync(kFull, before));
    }
    of = segments[number];
  }
  const unsigned tile = blockIdx.x - static_cast<unsigned>(of.first_tile);
  const int first = static_cast<int>(tile) * kTile, left = static_cast<int>(of.entries) - first;
  return {static_cast<int>(of.first_entry) + first,
          left < kTile ? left : kTile,
          static_cast<int>(of.shift),
          (1u << of.bits) - 1,
          static_cast<unsigned>(of.first_count) + tile,
          static_cast<unsigned>(of.tiles),
          static_cast<unsigned>(of.moved),
          static_cast<Key>(of.first_key),
          (of.flags & kCounted) != 0,
          (of.flags & kOther) != 0};
}

__device__ __forceinline__ bool is_head(const Key* keys, int at) {
  return at == 0 || keys[at] != keys[at - 1];
}

}  // namespace

// Writes 1 / (number of valid ids) for every bag of every piece with kMean.
// Grid: (pieces, to ceil(most bags of a piece / 256)).
extern "C" __global__ void __launch_bounds__(kThreads) bag_factors(const Piece* pieces) {
  const Piece& piece = pieces[blockIdx.x];
  if (!(piece.flags & recast::kMean)) return;
  const Index apart = static_cast<Index>(gridDim.y) * kThreads;
  for (Index bag = static_cast<Index>(blockIdx.y) * kThreads + threadIdx.x; bag < piece.bags;
       bag += apart) {
    const Index end = start_of(piece, bag + 1);
    Index counted = 0;
    bool bad;
    for (Index i = start_of(piece, bag); i < end; ++i)
      counted += row_of(piece, id_at(piece, i), &bad) >= 0;
    piece.bag_factors[bag] = counted > 0 ? 1.0f / static_cast<float>(counted) : 0.0f;
  }
}
RECAST_KERNEL(bag_factors)

// Writes the key and the value of every entry to the buffer that its table's first pass reads from,
// and the histograms of that pass. Grid: tiles of all segments, which are those of each table's
// first pass.
extern "C" __global__ void __launch_bounds__(kThreads)
    linearise(const Piece* pieces, int n_pieces, const Segment* segments, int n_segments,
              int bag_bits, Key* keys, unsigned* values, Key* other_keys, unsigned* other_values,
              Errors* errors, unsigned* counts) {
  RECAST_SHARED(unsigned[kDigits], tally);
  const Tile tile = tile_of(segments, n_segments, 0, 0, 0);
  clear(tally, tile.mask);
  __syncthreads();
  const int first = tile.first, size = tile.size;
  Key* const to_keys = tile.other ? other_keys : keys;
  unsigned* const to_values = tile.other ? other_values : values;
  const int least = piece_of(pieces, 0, n_pieces, first);
  const int most = piece_of(pieces, least, n_pieces, first + size - 1);  // mostly equal to least
  constexpr int kUnroll = 4;
  for (int from = threadIdx.x; from < size; from += kUnroll * kThreads) {
    int numbers[kUnroll];
    Index ids[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = from + i * kThreads;
      const int entry = first + (at < size ? at : size - 1);
      numbers[i] = piece_of(pieces, least, most + 1, entry);
      ids[i] = id_at(pieces[numbers[i]], entry - pieces[numbers[i]].first_entry);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (from + i * kThreads >= size) break;
      const int entry = first + from + i * kThreads, number = numbers[i];
      const Piece& piece = pieces[number];
      const Index place = entry - piece.first_entry, bag = bag_at(piece, place);
      bool bad;
      const Index row = row_of(piece, ids[i], &bad);
      if (errors != nullptr && bad) report(&errors->bad_ids, &errors->first_id, number, place);
      if (errors != nullptr && bag < 0)
        report(&errors->bad_offsets, &errors->first_offset, number, place);
      const bool counts_too = row >= 0 && bag >= 0 && bag < piece.bags;
      if (piece.bag_of != nullptr)
        piece.bag_of[place] = static_cast<unsigned>(counts_too ? bag : 0);
      const Index source = piece.weights != nullptr ? place : bag;
      const Key key = static_cast<Key>(piece.first_key + (counts_too ? row : piece.rows));
      to_keys[entry] = key;
      to_values[entry] = static_cast<unsigned>(number) << bag_bits |
                         static_cast<unsigned>(counts_too ? source : 0);
      atomicAdd(&tally[digit_of(tile, key)], 1u);
    }
  }
  __syncthreads();
  write_counts(tally, tile, counts);
}
RECAST_KERNEL(linearise)

// Writes the histogram of each tile's digits. Grid: tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
    digit_counts(const Key* keys, int entries, int shift, int bits, unsigned* counts,
                 const Segment* segments, int n_segments) {
  RECAST_SHARED(unsigned[kDigits], tally);
  const Tile tile = tile_of(segments, n_segments, entries, shift, bits);
  if (tile.counted) return;
  clear(tally, tile.mask);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    if (at < tile.size) atomicAdd(&tally[digit_of(tile, keys[tile.first + at])], 1u);
  }
  __syncthreads();
  write_counts(tally, tile, counts);
}
RECAST_KERNEL(digit_counts)

// totals[b] = Σ of the b-th 4096 of n counts. Grid: ceil(n / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    scan_totals(const unsigned* counts, int n, unsigned* totals) {
  const int first = blockIdx.x * kScanTile;
  const unsigned total = block_sum(counts + first, n - first < kScanTile ? n - first : kScanTile);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}
RECAST_KERNEL(scan_totals)

// counts -> their exclusive sums, in place. Grid: ceil(n / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    scan_counts(unsigned* counts, int n, const unsigned* totals) {
  const unsigned sum = block_sum(totals, blockIdx.x);
  const int lane = threadIdx.x % 32;
  const Index first = static_cast<Index>(blockIdx.x) * kScanTile + warp_offset() + lane;
  unsigned before[kScanItems], mine = 0, total;  // in the warp's stretch
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    const Index at = first + i * 32;
    const unsigned value = at < n ? counts[at] : 0;
    unsigned inclusive = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned left = __shfl_up_sync(kFull, inclusive, d);
      if (lane >= d) inclusive += left;
    }
    before[i] = mine + inclusive - value;
    mine += __shfl_sync(kFull, inclusive, 31);
  }
  const unsigned start = sum + __shfl_sync(kFull, block_scan(lane == 0 ? mine : 0, &total), 0);
#pragma unroll
  for (int i = 0; i < kScanItems; ++i)
    if (first + i * 32 < n) counts[first + i * 32] = start + before[i];
}
RECAST_KERNEL(scan_counts)

// Moves each entry to its place in the order of this digit; `counts` now holds exclusive sums.
// Grid: tiles.
extern "C" __global__ void __launch_bounds__(kThreads, kScatters)
    scatter(const Key* keys, const unsigned* values, int entries, int shift, int bits,
            const unsigned* counts, Key* sorted_keys, unsigned* sorted_values,
            const Segment* segments, int n_segments) {
  using Small = unsigned short;  // a position in the tile
  union Scratch {
    Small tally[kWarps][kDigits];  // histogram of each warp, then its exclusive sums over warps
    unsigned values[kTile];
    uint4 words[kWarps * kDigits * sizeof(Small) / sizeof(uint4)];
  };
  RECAST_SHARED(Scratch, scratch);
  RECAST_SHARED(Small[kDigits], first_of);    // where a digit's entries start in the sorted tile
  RECAST_SHARED(unsigned[kDigits], goes_to);  // where they start in the output, minus first_of
  RECAST_SHARED(Key[kTile], tile_keys);
  RECAST_SHARED(Tile, kept);  // rarely used; kept here to save registers
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile of = tile_of(segments, n_segments, entries, shift, bits);
  const int tile = of.first, size = of.size, digit_bits = __popc(of.mask);
  if (threadIdx.x == 0) kept = of;
  auto& tally = scratch.tally;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(scratch.words) / sizeof(uint4)) / kThreads; ++i)
    scratch.words[i * kThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  // Each warp ranks its share of the tile, 32 consecutive entries at a time, in order.
  Key key[kItems];
  Small rank[kItems];
  const int warp_first = warp * 32 * kItems + lane;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = warp_first + i * 32;
    key[i] = at < size ? keys[tile + at] : 0;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool inside = warp_first + i * 32 < size;
    const unsigned digit = digit_of(of, key[i]);
    unsigned peers = __ballot_sync(kFull, inside);
    for (int b = 0; b < digit_bits; ++b) {
      const bool one = digit >> b & 1;
      const unsigned ones = __ballot_sync(kFull, one);
      peers &= one ? ones : ~ones;
    }
    const unsigned before = inside ? tally[warp][digit] : 0;
    __syncwarp();
    const int below = __popc(peers & ((1u << lane) - 1));
    if (inside && below == 0) tally[warp][digit] = static_cast<Small>(before + __popc(peers));
    __syncwarp();
    rank[i] = static_cast<Small>(before + below);
  }
  __syncthreads();

  // Exclusive sums: each thread takes kOwn digits.
  constexpr int kOwn = kDigits / kThreads;
  const int digits = kOwn * threadIdx.x;
  unsigned sums[kOwn], mine = 0, total;
#pragma unroll
  for (int d = 0; d < kOwn; ++d) {
    unsigned sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const unsigned count = tally[w][digits + d];
      tally[w][digits + d] = static_cast<Small>(sum);
      sum += count;
    }
    sums[d] = sum;
    mine += sum;
  }
  unsigned first = block_scan(mine, &total);
#pragma unroll
  for (int d = 0; d < kOwn; ++d) {
    const unsigned digit = digits + d;
    first_of[digit] = static_cast<Small>(first);
    if (digit <= of.mask)
      goes_to[digit] = counts[kept.count + digit * kept.stride] + kept.moved - first;
    first += sums[d];
  }
  __syncthreads();

  // Sort the tile in shared memory first, so that the global stores are coalesced.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (warp_first + i * 32 >= size) continue;
    const unsigned digit = digit_of(of, key[i]);
    rank[i] = static_cast<Small>(rank[i] + first_of[digit] + tally[warp][digit]);
    tile_keys[rank[i]] = key[i];
  }
  __syncthreads();  // the tallies have been read
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (warp_first + i * 32 < size) scratch.values[rank[i]] = values[tile + warp_first + i * 32];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at >= size) break;
    const Key moved = tile_keys[at];
    const unsigned to = goes_to[digit_of(of, moved)] + at;
    sorted_keys[to] = moved;
    sorted_values[to] = scratch.values[at];
  }
}
RECAST_KERNEL(scatter)

// totals[b] = runs of equal keys that start in the b-th 4096 entries. Grid:
// ceil(entries / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    run_totals(const Key* keys, int entries, unsigned* totals) {
  unsigned mine = 0, total;
  const Index first = static_cast<Index>(blockIdx.x) * kScanTile;
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    const Index at = first + i * kThreads + threadIdx.x;
    mine += at < entries && is_head(keys, static_cast<int>(at));
  }
  block_scan(mine, &total);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}
RECAST_KERNEL(run_totals)

// starts[r] = first entry of run r, starts[all runs] = entries; table_runs[t] = the first run of a
// key that is first_keys[t] or larger, for n_keys ascending keys: the first of each table, then one
// behind all. starts: (entries + 1,). Grid: ceil(entries / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    run_starts(const Key* keys, int entries, const unsigned* totals, const Index* first_keys,
               int n_keys, unsigned* starts, unsigned* table_runs) {
  const unsigned sum = block_sum(totals, blockIdx.x);
  const int lane = threadIdx.x % 32;
  const Index tile = static_cast<Index>(blockIdx.x) * kScanTile;
  const Index first = tile + warp_offset() + lane;
  const unsigned below = (1u << lane) - 1;
  unsigned mine = 0, heads = 0, total;  // heads: one bit an item
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    const Index at = first + i * 32;
    const bool head = at < entries && is_head(keys, static_cast<int>(at));
    heads |= static_cast<unsigned>(head) << i;
    mine += __popc(__ballot_sync(kFull, head));
  }
  unsigned run = sum + __shfl_sync(kFull, block_scan(lane == 0 ? mine : 0, &total), 0);
  // Most tiles have rows of one table only, and skip the search for table boundaries.
  const Index last = tile + kScanTile < entries ? tile + kScanTile - 1 : entries - 1;
  const int tables = tile == 0 ? 0 : keys_up_to(first_keys, n_keys, keys[tile - 1]);
  const int tables_past = keys_up_to(first_keys, n_keys, keys[last]);
#pragma unroll 1
  for (int i = 0; i < kScanItems; ++i) {
    const unsigned all = __ballot_sync(kFull, heads >> i & 1), mine_is = run + __popc(all & below);
    run += __popc(all);
    if ((heads >> i & 1) == 0) continue;
    const Index at = first + i * 32;
    starts[mine_is] = static_cast<unsigned>(at);
    if (tables == tables_past) continue;
    const int past = keys_up_to(first_keys, n_keys, keys[at]);
    for (int t = at == 0 ? 0 : keys_up_to(first_keys, n_keys, keys[at - 1]); t < past; ++t)
      table_runs[t] = mine_is;
  }
  if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) {
    starts[sum + total] = static_cast<unsigned>(entries);
    for (int t = tables_past; t < n_keys; ++t) table_runs[t] = sum + total;
  }
}
RECAST_KERNEL(run_starts)

// table_starts[t] = the first of `entries` sorted keys that is first_keys[t] or larger, for n_keys
// ascending keys: the first of each table, then one behind all. Grid: ceil(n_keys / 8).
extern "C" __global__ void __launch_bounds__(kThreads)
    find_tables(const Key* keys, int entries, const Index* first_keys, int n_keys,
                unsigned* table_starts) {
  const int lane = threadIdx.x % 32;
  const int number = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (number >= n_keys) return;
  const Key first_key = static_cast<Key>(first_keys[number]);
  int first = 0;
  for (int past = entries; first < past;) {
    const int step = (past - first + 31) / 32;
    const Index at = first + static_cast<Index>(lane) * step;
    const int before = __popc(__ballot_sync(kFull, at < past && keys[at] < first_key));
    const Index end = first + static_cast<Index>(before) * step;
    past = before == 0 ? first : end < past ? static_cast<int>(end) : past;
    first += before == 0 ? 0 : (before - 1) * step + 1;
  }
  if (lane == 0) table_starts[number] = static_cast<unsigned>(first);
}
RECAST_KERNEL(find_tables)
