// Sorts the ids of all lookups by row, and finds where each row's run of entries starts.
//
// Macros:
//   RECAST_WIDE_KEY  see pieces.cuh
//
// The steps, each a kernel, all on one stream; nothing is read back by the host:
//   bag_factors   where a piece takes means
//   linearise     ids -> keys and values, in the order of pieces and ids, and counts of a digit
//   for digits of `bits` <= 9 bits from the lowest on, ceil(key bits / 9) times:
//     digit_counts, scan_totals, scan_counts, scatter      stable, so equal keys keep their order
//   run_totals, run_starts                                 where runs of equal keys start
// The first digit needs no digit_counts: linearise has counted it.
//
// Key bits are those of `no_key`, the number of rows of all tables: the key of an id that gets no
// gradient (padding, or outside its table), which so sorts behind all others.
//
// Every kernel is launched with 256 threads and no dynamic shared memory. A tile is kTile entries
// (4096, or 2048 with wide keys); tiles = ceil(entries / kTile). Fewer than 2^30 entries, and
// piece << bag_bits | bag fits 32 bits.
#include "intrinsics.cuh"
#include "pieces.cuh"

namespace {

using recast::Index;
using recast::Piece;
using recast::Wide;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 512;                      // at most
constexpr int kItems = RECAST_WIDE_KEY ? 8 : 16;  // entries of a thread
constexpr int kTile = kThreads * kItems;
constexpr int kScanItems = 16;
constexpr int kScanTile = kThreads * kScanItems;
constexpr unsigned kFull = 0xffffffffu;

// Blocks of scatter() that run at once on a multiprocessor: four leave Blackwell a register short.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kScatters = 3;
#else
constexpr int kScatters = 4;
#endif

// What was wrong, zeroed by the host: ids outside their tables and offsets outside their ids; a
// null pointer where nobody asks. `first` is ~(piece << 40 | place) of the first of them, the
// largest of such numbers.
struct Errors {
  Wide bad_ids, first_id, bad_offsets, first_offset;
};

__device__ __forceinline__ void report(Wide* counter, Wide* first, int piece, Index place) {
  atomicAdd(counter, 1ull);
  atomicMax(first, ~(static_cast<Wide>(piece) << 40 | static_cast<Wide>(place)));
}

// Start of a bag, cut to the ids there are.
__device__ __forceinline__ Index start_of(const Piece& piece, Index bag) {
  if (piece.offsets == nullptr) return bag * piece.fixed;
  if (bag >= piece.n_offsets) return piece.n_ids;
  const Index at = recast::integer(piece.offsets, piece.flags & recast::kWideOffsets, bag);
  return at < 0 ? 0 : at > piece.n_ids ? piece.n_ids : at;
}

// The bag that the id at `place` is in, the last that starts at or before it. None: -1 before the
// first bag, `bags` behind the last.
__device__ __forceinline__ Index bag_at(const Piece& piece, Index place) {
  if (piece.offsets == nullptr)  // both are below 2^30, and 64 bits are slow to divide
    return static_cast<unsigned>(place) / static_cast<unsigned>(piece.fixed);
  // In bags of equal size without a search: of one id each, mostly.
  const unsigned ids = static_cast<unsigned>(piece.n_ids), bags = static_cast<unsigned>(piece.bags);
  const Index guess = static_cast<unsigned>(place) / (bags > 0 && ids > bags ? ids / bags : 1);
  if (guess < piece.bags && start_of(piece, guess) <= place && start_of(piece, guess + 1) > place)
    return guess;
  Index first = 0, past = piece.bags + 1;
  while (first < past) {  // the first bag that starts after it
    const Index middle = (first + past) / 2;
    const bool after = start_of(piece, middle) > place;
    past = after ? middle : past;
    first = after ? first : middle + 1;
  }
  return first - 1;
}

// The row of an id, or -1 when it gets no gradient; *bad when it is outside the table. Padding may
// be outside: it is how a lookup says of an id that it gets none.
__device__ __forceinline__ Index row_of(const Piece& piece, Index id, bool* bad) {
  const bool padding = id == piece.padding && piece.padding >= 0;
  *bad = !padding && static_cast<Wide>(id) >= static_cast<Wide>(piece.rows);
  return *bad || padding ? -1 : id;
}

__device__ __forceinline__ Index id_at(const Piece& piece, Index place) {
  return recast::integer(piece.ids, piece.flags & recast::kWideIds, place);
}

// The last of pieces [number, past) that starts at `entry` or before it.
__device__ __forceinline__ int piece_of(const Piece* pieces, int number, int past, int entry) {
  while (past - number > 1) {
    const int middle = (number + past) / 2;
    const bool before = pieces[middle].first_entry <= entry;
    number = before ? middle : number;
    past = before ? past : middle;
  }
  return number;
}

// Exclusive sum over the block of one number a thread; *total is that of all.
__device__ unsigned block_scan(unsigned value, unsigned* total) {
  RECAST_SHARED(unsigned[kWarps], sums);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned before = __shfl_up_sync(kFull, inclusive, d);
    if (lane >= d) inclusive += before;
  }
  __syncthreads();  // the sums of the call before have been read
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  unsigned all = 0, before = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all += sums[w];
  }
  *total = all;
  return before + inclusive - value;
}

// Σ of n numbers, by the whole block.
__device__ unsigned block_sum(const unsigned* from, int n) {
  unsigned mine = 0, total;
  for (int i = threadIdx.x; i < n; i += kThreads) mine += from[i];
  block_scan(mine, &total);
  return total;
}

// Where the warp's stretch of a tile of kScanTile starts in it.
__device__ __forceinline__ int stretch_of_warp() { return threadIdx.x / 32 * 32 * kScanItems; }

// How many of n ascending first keys are `key` or less.
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

__device__ __forceinline__ void clear(unsigned (&tally)[kDigits]) {
  for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) tally[digit] = 0;
}

// Of this block's tile.
__device__ __forceinline__ void write_counts(const unsigned (&tally)[kDigits], unsigned mask,
                                             unsigned* counts) {
  for (unsigned digit = threadIdx.x; digit <= mask; digit += kThreads)
    counts[digit * gridDim.x + blockIdx.x] = tally[digit];
}

__device__ __forceinline__ bool is_head(const Key* keys, int at) {
  return at == 0 || keys[at] != keys[at - 1];
}

}  // namespace

// Writes 1 / (ids that count) for every bag of every piece with kMean.
// Grid: (ceil(most bags of a piece / 256), pieces).
extern "C" __global__ void __launch_bounds__(kThreads) bag_factors(const Piece* pieces) {
  const Piece& piece = pieces[blockIdx.y];
  const Index bag = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (!(piece.flags & recast::kMean) || bag >= piece.bags) return;
  const Index end = start_of(piece, bag + 1);
  Index counted = 0;
  bool bad;
  for (Index i = start_of(piece, bag); i < end; ++i)
    counted += row_of(piece, id_at(piece, i), &bad) >= 0;
  piece.bag_factors[bag] = counted > 0 ? 1.0f / static_cast<float>(counted) : 0.0f;
}
RECAST_KERNEL(bag_factors)

// Writes the key and the value of every entry, and counts[digit * tiles + tile] = how many keys of
// the tile have that digit, of the lowest `bits` bits. Grid: tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
    linearise(const Piece* pieces, int n_pieces, int entries, Key no_key, int bag_bits, Key* keys,
              unsigned* values, Errors* errors, int bits, unsigned* counts) {
  RECAST_SHARED(unsigned[kDigits], tally);
  clear(tally);
  __syncthreads();
  const unsigned mask = (1u << bits) - 1;
  const int first = blockIdx.x * kTile, size = entries - first < kTile ? entries - first : kTile;
  const int least = piece_of(pieces, 0, n_pieces, first);
  const int most = piece_of(pieces, least, n_pieces, first + size - 1);  // mostly the same
  constexpr int kAtOnce = 4;
  for (int from = threadIdx.x; from < size; from += kAtOnce * kThreads) {
    int numbers[kAtOnce];
    Index ids[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = from + i * kThreads;
      const int entry = first + (at < size ? at : size - 1);
      numbers[i] = piece_of(pieces, least, most + 1, entry);
      ids[i] = id_at(pieces[numbers[i]], entry - pieces[numbers[i]].first_entry);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
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
      const Key key = counts_too ? static_cast<Key>(piece.first_key + row) : no_key;
      keys[entry] = key;
      values[entry] = static_cast<unsigned>(number) << bag_bits |
                      static_cast<unsigned>(counts_too ? source : 0);
      atomicAdd(&tally[static_cast<unsigned>(key) & mask], 1u);
    }
  }
  __syncthreads();
  write_counts(tally, mask, counts);
}
RECAST_KERNEL(linearise)

// counts[digit * tiles + tile] = how many keys of the tile have that digit. Grid: tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
    digit_counts(const Key* keys, int entries, int shift, int bits, unsigned* counts) {
  RECAST_SHARED(unsigned[kDigits], tally);
  clear(tally);
  __syncthreads();
  const unsigned mask = (1u << bits) - 1;
  const Index first = static_cast<Index>(blockIdx.x) * kTile;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Index at = first + i * kThreads + threadIdx.x;
    if (at < entries) atomicAdd(&tally[static_cast<unsigned>(keys[at] >> shift) & mask], 1u);
  }
  __syncthreads();
  write_counts(tally, mask, counts);
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
  const Index first = static_cast<Index>(blockIdx.x) * kScanTile + stretch_of_warp() + lane;
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

// Moves entries to where `counts`, now exclusive sums, says their digit goes. Grid: tiles.
extern "C" __global__ void __launch_bounds__(kThreads, kScatters)
    scatter(const Key* keys, const unsigned* values, int entries, int shift, int bits,
            const unsigned* counts, Key* sorted_keys, unsigned* sorted_values) {
  using Small = unsigned short;                  // a place in the tile
  RECAST_SHARED(Small[kWarps][kDigits], tally);  // of each warp; then what comes before it
  RECAST_SHARED(Small[kDigits], first_of);       // where a digit starts in the tile
  RECAST_SHARED(unsigned[kDigits], goes_to);     // and in the output, less the former
  RECAST_SHARED(Key[kTile], tile_keys);
  RECAST_SHARED(unsigned[kTile], tile_values);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned mask = (1u << bits) - 1;
  const Index tile = static_cast<Index>(blockIdx.x) * kTile;
  const int size = entries - tile < kTile ? static_cast<int>(entries - tile) : kTile;
  for (int i = threadIdx.x; i < kWarps * kDigits; i += kThreads)
    tally[i / kDigits][i % kDigits] = 0;
  __syncthreads();

  // Each warp ranks its stretch of the tile, 32 neighbours at a time, in order.
  Key key[kItems];
  unsigned rank[kItems];
  const int stretch = warp * 32 * kItems + lane;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = stretch + i * 32;
    key[i] = at < size ? keys[tile + at] : 0;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool inside = stretch + i * 32 < size;
    const unsigned digit = static_cast<unsigned>(key[i] >> shift) & mask;
    unsigned peers = __ballot_sync(kFull, inside);
    for (int b = 0; b < bits; ++b) {
      const bool one = digit >> b & 1;
      const unsigned ones = __ballot_sync(kFull, one);
      peers &= one ? ones : ~ones;
    }
    const unsigned before = inside ? tally[warp][digit] : 0;
    __syncwarp();
    const int below = __popc(peers & ((1u << lane) - 1));
    if (inside && below == 0) tally[warp][digit] = static_cast<Small>(before + __popc(peers));
    __syncwarp();
    rank[i] = before + below;
  }
  __syncthreads();

  // A thread has the digits 2 t and 2 t + 1.
  const int digits = 2 * threadIdx.x;
  unsigned sums[2], total;
#pragma unroll
  for (int d = 0; d < 2; ++d) {
    unsigned sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const unsigned count = tally[w][digits + d];
      tally[w][digits + d] = static_cast<Small>(sum);
      sum += count;
    }
    sums[d] = sum;
  }
  unsigned first = block_scan(sums[0] + sums[1], &total);
#pragma unroll
  for (int d = 0; d < 2; ++d) {
    const unsigned digit = digits + d;
    first_of[digit] = static_cast<Small>(first);
    if (digit <= mask) goes_to[digit] = counts[digit * gridDim.x + blockIdx.x] - first;
    first += sums[d];
  }
  __syncthreads();

  // Through shared memory, so that neighbours go to neighbours.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (stretch + i * 32 >= size) continue;
    const unsigned digit = static_cast<unsigned>(key[i] >> shift) & mask;
    rank[i] += first_of[digit] + tally[warp][digit];
    tile_keys[rank[i]] = key[i];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (stretch + i * 32 < size) tile_values[rank[i]] = values[tile + stretch + i * 32];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at >= size) break;
    const Key moved = tile_keys[at];
    const unsigned to = goes_to[static_cast<unsigned>(moved >> shift) & mask] + at;
    sorted_keys[to] = moved;
    sorted_values[to] = tile_values[at];
  }
}
RECAST_KERNEL(scatter)

// totals[b] = runs (see pieces.cuh) that start in the b-th 4096 entries. Grid:
// ceil(entries / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    run_totals(const Key* keys, int entries, int longest, unsigned* totals) {
  unsigned mine = 0, total;
  const Index first = static_cast<Index>(blockIdx.x) * kScanTile;
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    const Index at = first + i * kThreads + threadIdx.x;
    if (at < entries)
      mine += is_head(keys, static_cast<int>(at)) || recast::is_cut(keys, entries, longest, at);
  }
  block_scan(mine, &total);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}
RECAST_KERNEL(run_totals)

// starts[r] = first entry of run r, with kGoesOn where that is so, starts[all runs] = entries;
// table_runs[t] = the first run of a key that is first_keys[t] or larger, for n_keys ascending
// keys: the first of each table, then no_key. starts has room for `entries` + 1. Grid: ceil(entries
// / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    run_starts(const Key* keys, int entries, int longest, const unsigned* totals,
               const Index* first_keys, int n_keys, unsigned* starts, unsigned* table_runs) {
  const unsigned sum = block_sum(totals, blockIdx.x);
  const int lane = threadIdx.x % 32;
  const Index tile = static_cast<Index>(blockIdx.x) * kScanTile;
  const Index first = tile + stretch_of_warp() + lane;
  const unsigned below = (1u << lane) - 1;
  unsigned mine = 0, heads = 0, starting = 0, total;  // one bit an item
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    const Index at = first + i * 32;
    const bool head = at < entries && is_head(keys, static_cast<int>(at));
    const bool starts_here = head || (at < entries && recast::is_cut(keys, entries, longest, at));
    heads |= static_cast<unsigned>(head) << i;
    starting |= static_cast<unsigned>(starts_here) << i;
    mine += __popc(__ballot_sync(kFull, starts_here));
  }
  unsigned run = sum + __shfl_sync(kFull, block_scan(lane == 0 ? mine : 0, &total), 0);
  // Few tiles have rows of several tables.
  const Index last = tile + kScanTile < entries ? tile + kScanTile - 1 : entries - 1;
  const int tables = tile == 0 ? 0 : keys_up_to(first_keys, n_keys, keys[tile - 1]);
  const int tables_past = keys_up_to(first_keys, n_keys, keys[last]);
  for (int i = 0; i < kScanItems; ++i) {
    const unsigned all = __ballot_sync(kFull, starting >> i & 1),
                   mine_is = run + __popc(all & below);
    run += __popc(all);
    if ((starting >> i & 1) == 0) continue;
    const Index at = first + i * 32;
    const bool head = heads >> i & 1;
    starts[mine_is] = static_cast<unsigned>(at) | (head ? 0 : recast::kGoesOn);
    if (!head || tables == tables_past) continue;
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
