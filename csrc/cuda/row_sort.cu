// Sorts the ids of all lookups by row, and finds where each row's run of entries starts.
//
// Macros:
//   RECAST_WIDE_KEY  see pieces.cuh
//
// The steps, each a kernel, all on one stream; nothing is read back by the host:
//   bag_factors   where a piece takes means
//   linearise     ids -> keys and values, in the order of pieces and ids
//   for digits of `bits` <= 8 bits from the lowest on, ceil(key bits / 8) times:
//     digit_counts, scan_totals, scan_counts, scatter      stable, so equal keys keep their order
//   run_totals, run_starts                                 where runs of equal keys start
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
constexpr int kDigits = 256;                      // at most
constexpr int kItems = RECAST_WIDE_KEY ? 8 : 16;  // entries of a thread
constexpr int kTile = kThreads * kItems;
constexpr int kScanItems = 16;
constexpr int kScanTile = kThreads * kScanItems;
constexpr unsigned kFull = 0xffffffffu;

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
  if (piece.offsets == nullptr) return place / piece.fixed;
  Index first = 0, past = piece.bags + 1;
  while (first < past) {  // the first bag that starts after it
    const Index middle = (first + past) / 2;
    const bool after = start_of(piece, middle) > place;
    past = after ? middle : past;
    first = after ? first : middle + 1;
  }
  return first - 1;
}

// The row of ids[place], or -1 when it gets no gradient; *bad when it is outside the table. Padding
// may be outside: it is how a lookup says of an id that it gets none.
__device__ __forceinline__ Index row_at(const Piece& piece, Index place, bool* bad) {
  const Index id = recast::integer(piece.ids, piece.flags & recast::kWideIds, place);
  const bool padding = id == piece.padding && piece.padding >= 0;
  *bad = !padding && static_cast<Wide>(id) >= static_cast<Wide>(piece.rows);
  return *bad || padding ? -1 : id;
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
  for (Index i = start_of(piece, bag); i < end; ++i) counted += row_at(piece, i, &bad) >= 0;
  piece.bag_factors[bag] = counted > 0 ? 1.0f / static_cast<float>(counted) : 0.0f;
}
RECAST_KERNEL(bag_factors)

// Writes the key and the value of every entry. Grid: ceil(entries / 256).
extern "C" __global__ void __launch_bounds__(kThreads)
    linearise(const Piece* pieces, int n_pieces, int entries, Key no_key, int bag_bits, Key* keys,
              unsigned* values, Errors* errors) {
  const int entry = blockIdx.x * kThreads + threadIdx.x;
  if (entry >= entries) return;
  int number = 0;
  for (int past = n_pieces; past - number > 1;) {
    const int middle = (number + past) / 2;
    const bool before = pieces[middle].first_entry <= entry;
    number = before ? middle : number;
    past = before ? past : middle;
  }
  const Piece& piece = pieces[number];
  const Index place = entry - piece.first_entry, bag = bag_at(piece, place);
  bool bad;
  const Index row = row_at(piece, place, &bad);
  if (errors != nullptr && bad) report(&errors->bad_ids, &errors->first_id, number, place);
  if (errors != nullptr && bag < 0)
    report(&errors->bad_offsets, &errors->first_offset, number, place);
  const bool counts = row >= 0 && bag >= 0 && bag < piece.bags;
  if (piece.bag_of != nullptr) piece.bag_of[place] = static_cast<unsigned>(counts ? bag : 0);
  const Index source = piece.weights != nullptr ? place : bag;
  keys[entry] = counts ? static_cast<Key>(piece.first_key + row) : no_key;
  values[entry] =
      static_cast<unsigned>(number) << bag_bits | static_cast<unsigned>(counts ? source : 0);
}
RECAST_KERNEL(linearise)

// counts[digit * tiles + tile] = how many keys of the tile have that digit. Grid: tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
    digit_counts(const Key* keys, int entries, int shift, int bits, unsigned* counts) {
  RECAST_SHARED(unsigned[kDigits], tally);
  tally[threadIdx.x] = 0;
  __syncthreads();
  const unsigned mask = (1u << bits) - 1;
  const Index first = static_cast<Index>(blockIdx.x) * kTile;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Index at = first + i * kThreads + threadIdx.x;
    if (at < entries) atomicAdd(&tally[static_cast<unsigned>(keys[at] >> shift) & mask], 1u);
  }
  __syncthreads();
  if (threadIdx.x <= mask) counts[threadIdx.x * gridDim.x + blockIdx.x] = tally[threadIdx.x];
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
  unsigned sum = block_sum(totals, blockIdx.x);
  const int first = blockIdx.x * kScanTile;
  for (int i = 0; i < kScanItems; ++i) {
    const int at = first + i * kThreads + threadIdx.x;
    const unsigned value = at < n ? counts[at] : 0;
    unsigned total;
    const unsigned before = block_scan(value, &total);
    if (at < n) counts[at] = sum + before;
    sum += total;
  }
}
RECAST_KERNEL(scan_counts)

// Moves entries to where `counts`, now exclusive sums, says their digit goes. Grid: tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
    scatter(const Key* keys, const unsigned* values, int entries, int shift, int bits,
            const unsigned* counts, Key* sorted_keys, unsigned* sorted_values) {
  RECAST_SHARED(unsigned[kWarps][kDigits], tally);  // of each warp; then what comes before it
  RECAST_SHARED(unsigned[kDigits], first_of);  // where the tile's run of a digit starts in the tile
  RECAST_SHARED(unsigned[kDigits], goes_to);   // and in the output, less the former
  RECAST_SHARED(Key[kTile], tile_keys);
  RECAST_SHARED(unsigned[kTile], tile_values);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned mask = (1u << bits) - 1;
  const Index tile = static_cast<Index>(blockIdx.x) * kTile;
  const int size = entries - tile < kTile ? static_cast<int>(entries - tile) : kTile;
  for (int w = 0; w < kWarps; ++w) tally[w][threadIdx.x] = 0;
  __syncthreads();

  // Each warp ranks its stretch of the tile, 32 neighbours at a time, in order.
  Key key[kItems];
  unsigned value[kItems], rank[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = warp * 32 * kItems + i * 32 + lane;
    const bool inside = at < size;
    key[i] = inside ? keys[tile + at] : 0;
    value[i] = inside ? values[tile + at] : 0;
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
    if (inside && below == 0) tally[warp][digit] = before + __popc(peers);
    __syncwarp();
    rank[i] = before + below;
  }
  __syncthreads();

  unsigned sum = 0, total;
  for (int w = 0; w < kWarps; ++w) {
    const unsigned count = tally[w][threadIdx.x];
    tally[w][threadIdx.x] = sum;
    sum += count;
  }
  const unsigned first = block_scan(sum, &total);
  first_of[threadIdx.x] = first;
  if (threadIdx.x <= mask)
    goes_to[threadIdx.x] = counts[threadIdx.x * gridDim.x + blockIdx.x] - first;
  __syncthreads();

  // Through shared memory, so that neighbours go to neighbours.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (warp * 32 * kItems + i * 32 + lane >= size) continue;
    const unsigned digit = static_cast<unsigned>(key[i] >> shift) & mask;
    const unsigned to = first_of[digit] + tally[warp][digit] + rank[i];
    tile_keys[to] = key[i];
    tile_values[to] = value[i];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < size; at += kThreads) {
    const Key moved = tile_keys[at];
    const unsigned to = goes_to[static_cast<unsigned>(moved >> shift) & mask] + at;
    sorted_keys[to] = moved;
    sorted_values[to] = tile_values[at];
  }
}
RECAST_KERNEL(scatter)

// A run is a stretch of equal keys, cut wherever a multiple of `longest` entries has gone by, so
// that no run is longer. totals[b] = runs that start in the b-th 4096 entries. Grid:
// ceil(entries / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    run_totals(const Key* keys, int entries, int longest, unsigned* totals) {
  unsigned mine = 0, total;
  const Index first = static_cast<Index>(blockIdx.x) * kScanTile;
  for (int i = 0; i < kScanItems; ++i) {
    const Index at = first + i * kThreads + threadIdx.x;
    if (at < entries) mine += at % longest == 0 || is_head(keys, static_cast<int>(at));
  }
  block_scan(mine, &total);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}
RECAST_KERNEL(run_totals)

// starts[r] = first entry of run r, starts[all runs] = entries; table_runs[t] = the first run of a
// key that is first_keys[t] or larger, for n_keys ascending keys: the first of each table, then
// no_key. starts has room for `entries` + 1. Grid: ceil(entries / 4096).
extern "C" __global__ void __launch_bounds__(kThreads)
    run_starts(const Key* keys, int entries, int longest, const unsigned* totals,
               const Index* first_keys, int n_keys, unsigned* starts, unsigned* table_runs) {
  unsigned sum = block_sum(totals, blockIdx.x);
  const Index first = static_cast<Index>(blockIdx.x) * kScanTile;
  for (int i = 0; i < kScanItems; ++i) {
    const Index at = first + i * kThreads + threadIdx.x;
    const bool head = at < entries && is_head(keys, static_cast<int>(at));
    const bool starts_here = head || (at < entries && at % longest == 0);
    unsigned total;
    const unsigned run = sum + block_scan(starts_here, &total);
    if (starts_here) starts[run] = static_cast<unsigned>(at);
    if (head) {
      const int past = keys_up_to(first_keys, n_keys, keys[at]);
      for (int t = at == 0 ? 0 : keys_up_to(first_keys, n_keys, keys[at - 1]); t < past; ++t)
        table_runs[t] = run;
    }
    sum += total;
  }
  if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) {
    starts[sum] = static_cast<unsigned>(entries);
    for (int t = keys_up_to(first_keys, n_keys, keys[entries - 1]); t < n_keys; ++t)
      table_runs[t] = sum;
  }
}
RECAST_KERNEL(run_starts)
