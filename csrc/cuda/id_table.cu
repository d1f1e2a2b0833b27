// Maps 64-bit ids to rows of a slab, in device memory, as csrc/id_table.h does on the host.
//
// The table is buckets of 128 slots. An id has one bucket, by its hash, and any slot of it; slot s
// of bucket b is row 1 + b slots + s of the slab, where `slots` <= 128 of each are used, so there
// is no list of free rows. The digest of a slot is 8 bits of the hash, 0 where it is empty: those
// of a bucket are one line of memory, which a warp reads at once. Rows behind the last slot's are
// for guests: ids that found no slot, whose row is first_guest plus their place in the batch.
//
// A batch that inserts, all on one stream; nothing is read back by the host, and grids depend on
// the size of the batch only:
//   id_probe      a warp an id: finds it and notes the lookup, or else says which bucket it wants
//   row_sort.cu   sorts what was not found by bucket; stable, so in the order of the batch
//   id_insert     a warp a bucket: gives slots, one id after the other
// So who gets which row, and who is evicted, is decided by the order of the batch and by nothing
// that changes from run to run. Slots that were looked up in this step are not evicted.
//
// Every kernel is launched with 256 threads and no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::Wide;

constexpr int kThreads = 256;
constexpr int kSlots = 128;
constexpr int kEach = kSlots / 32;  // slots of a lane, neighbours
constexpr unsigned kFull = 0xffffffffu;
constexpr Wide kMost = ~0ull;

enum Policy { kNever, kLru, kLfu, kEpochLru, kEpochLfu, kGiven };
enum What { kFresh = 1, kTook = 2 };  // of an entry: its row is new to its id; another lost it

// What was done so far.
struct Counts {
  Wide inserted, evicted, refused, misses, lookups, expired;
};

// Twelve fields of 8 bytes, as the host writes them.
struct Table {
  unsigned* digests;  // (buckets, 32), four a word
  Index* ids;         // (buckets, 128), as are:
  Wide* scores;       // the lowest is evicted first
  Wide* stamps;       // step of the last lookup
  Wide* clock;        // step, epoch, lookups since counts were halved
  Counts* counts;
  Index buckets, slots;  // at most 2^32 - 1; of each bucket
  Index policy;
  Index ttl;              // steps without a lookup after which an id is forgotten; 0: never
  Index padded, padding;  // whether there is an id that is never stored and has row 0; that id
};

struct Place {
  unsigned bucket, digest;
};

// The hash of csrc/id_table.h: every bit depends on every bit of the id.
__device__ __forceinline__ Place place_of(const Table& table, Index id) {
  const Wide x = static_cast<Wide>(id) ^ 0x2d358dccaa6c78a5ull, k = 0x9e3779b97f4a7c15ull;
  const Wide hash = x * k ^ __umul64hi(x, k);
  const unsigned digest = static_cast<unsigned>(hash) & 255u;
  const Wide bucket = (hash >> 32) * static_cast<Wide>(table.buckets) >> 32;
  return {static_cast<unsigned>(bucket), digest == 0 ? 1u : digest};
}

// The slot of `id` in its bucket, by a whole warp; -1: none. `digests` are those of the lane's own
// slots.
__device__ __forceinline__ int slot_of(const Table& table, unsigned digests, const Place& place,
                                       Index id, int lane) {
  const Index* ids = table.ids + static_cast<Index>(place.bucket) * kSlots + lane * kEach;
  int slot = -1;
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if ((digests >> (8 * k) & 255u) == place.digest && ids[k] == id) slot = lane * kEach + k;
  const unsigned who = __ballot_sync(kFull, slot >= 0);
  return who == 0 ? -1 : __shfl_sync(kFull, slot, __ffs(static_cast<int>(who)) - 1);
}

__device__ __forceinline__ Index row_of(const Table& table, unsigned bucket, int slot) {
  return 1 + static_cast<Index>(bucket) * table.slots + slot;
}

__device__ __forceinline__ bool has_expired(const Table& table, Wide stamp, Wide step) {
  return table.ttl > 0 && stamp + static_cast<Wide>(table.ttl) < step;
}

// Signed scores as unsigned ones in the same order.
__device__ __forceinline__ Wide in_order(Index score) {
  return static_cast<Wide>(score) ^ (1ull << 63);
}

__device__ __forceinline__ Wide in_epoch(Wide epoch, Wide low) {
  return epoch << 32 | (low < kFull ? low : kFull);
}

// The score of a slot after that many further lookups.
__device__ __forceinline__ Wide scored(const Table& table, Wide before, unsigned times,
                                       Index given) {
  switch (table.policy) {
    case kLru:
      return table.clock[0];
    case kLfu:
      return before + times;
    case kEpochLru:
      return in_epoch(table.clock[1], table.clock[0]);
    case kEpochLfu:
      return in_epoch(table.clock[1], (before & kFull) + times);
    case kGiven:
      return in_order(given);
    default:
      return before;
  }
}

// Counts one lookup of a slot; other warps may do the same at the same time.
__device__ __forceinline__ void touch(const Table& table, Index at, Index given) {
  atomicExch(&table.stamps[at], table.clock[0]);
  Wide* score = &table.scores[at];
  if (table.policy == kNever) return;
  if (table.policy == kLfu) {
    atomicAdd(score, 1ull);
  } else if (table.policy == kEpochLfu) {
    Wide seen = atomicAdd(score, 0ull);
    while (true) {
      const Wide was = atomicCAS(score, seen, scored(table, seen, 1, given));
      if (was == seen) return;
      seen = was;
    }
  } else {
    atomicExch(score, scored(table, 0, 1, given));
  }
}

// The slot to evict next, as slots are ranked.
struct Rank {
  Wide score, stamp;
  int slot;  // kSlots: none
};

__device__ __forceinline__ bool is_before(const Rank& a, const Rank& b) {
  if (a.score != b.score) return a.score < b.score;
  return a.stamp != b.stamp ? a.stamp < b.stamp : a.slot < b.slot;
}

// The lowest of all lanes.
__device__ __forceinline__ Rank lowest(Rank mine) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const Rank other = {__shfl_xor_sync(kFull, mine.score, d),
                        __shfl_xor_sync(kFull, mine.stamp, d),
                        __shfl_xor_sync(kFull, mine.slot, d)};
    if (is_before(other, mine)) mine = other;
  }
  return mine;
}

}  // namespace

// The row of each of n ids. With `keys`, this is a lookup in training: those that are there are
// noted, keys[i] is the bucket of those that are not, else `buckets`, and values[i] = i. Without
// it, nothing changes, and those that are not there are guests, or -1 where first_guest < 0.
// `given`: scores, where the policy has them. Grid: ceil(n / 8).
extern "C" __global__ void __launch_bounds__(kThreads)
    id_probe(const Table* from, const Index* ids, int n, const Index* given, Index first_guest,
             Index* rows, int* what, unsigned* keys, unsigned* values) {
  const int lane = threadIdx.x % 32;
  const int entry = static_cast<int>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (entry >= n) return;
  const Table table = *from;
  const Index id = ids[entry];
  if (entry == 0 && lane == 0 && keys != nullptr) {
    atomicAdd(&table.clock[2], static_cast<Wide>(n));
    atomicAdd(&table.counts->lookups, static_cast<Wide>(n));
  }
  if (table.padded != 0 && id == table.padding) {
    if (lane != 0) return;
    rows[entry] = what[entry] = 0;
    if (keys == nullptr) return;
    keys[entry] = static_cast<unsigned>(table.buckets);
    values[entry] = static_cast<unsigned>(entry);
    atomicAdd(&table.clock[2], ~0ull);  // was counted, and is no lookup
    atomicAdd(&table.counts->lookups, ~0ull);
    return;
  }
  const Place place = place_of(table, id);
  const unsigned digests = table.digests[static_cast<Index>(place.bucket) * 32 + lane];
  int slot = slot_of(table, digests, place, id, lane);
  if (lane != 0) return;
  if (slot >= 0 && table.ttl > 0) {
    const Index at = static_cast<Index>(place.bucket) * kSlots + slot;
    // Another warp may be counting a lookup of it at this moment, if the id has not expired.
    if (has_expired(table, atomicAdd(&table.stamps[at], 0ull), table.clock[0])) slot = -1;
  }
  const bool guest = slot < 0 && keys == nullptr && first_guest >= 0;
  rows[entry] = slot >= 0 ? row_of(table, place.bucket, slot) : guest ? first_guest + entry : -1;
  what[entry] = guest ? kFresh : 0;
  if (keys == nullptr) return;
  keys[entry] = slot < 0 ? place.bucket : static_cast<unsigned>(table.buckets);
  values[entry] = static_cast<unsigned>(entry);
  if (slot >= 0)
    touch(table, static_cast<Index>(place.bucket) * kSlots + slot,
          given == nullptr ? 0 : given[entry]);
}
RECAST_KERNEL(id_probe)

// Gives rows to the ids of the batch that were not found, sorted by bucket: run r is entries
// [starts[r], starts[r + 1]) of values, and runs[1] runs are of buckets. what[i] says which rows
// are new to their ids, guests too, and which were another's, whose id is then gone[i]. With
// `facts` who loses a row goes to a tier below: its score and stamp are facts[2 i] and facts[2 i +
// 1], and every score is good enough for a row. Grid: ceil(least of n and buckets / 8).
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    id_insert(const Table* from, const Index* ids, const Index* given, const unsigned* keys,
              const unsigned* values, const unsigned* starts, const unsigned* runs,
              Index first_guest, Index* rows, int* what, Index* gone, Wide* facts) {
  const int lane = threadIdx.x % 32;
  const unsigned run = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (run >= runs[1]) return;
  const Table table = *from;
  const unsigned begin = starts[run], end = starts[run + 1], bucket = keys[begin];
  const Index base = static_cast<Index>(bucket) * kSlots, own = base + lane * kEach;
  const Wide step = table.clock[0];
  unsigned digests = table.digests[static_cast<Index>(bucket) * 32 + lane];
  Wide scores[kEach], stamps[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    scores[k] = table.scores[own + k], stamps[k] = table.stamps[own + k];
  unsigned old = 0;  // of the lane's slots those whose ids have expired, if there are any
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    old |= static_cast<unsigned>(has_expired(table, stamps[k], step)) << k;
  unsigned inserted = 0, evicted = 0, refused = 0, expired = 0;
  for (unsigned first = begin; first < end; first += 32) {
    const bool inside = first + lane < end;
    const unsigned entry = inside ? values[first + lane] : 0;
    const Index id = inside ? ids[entry] : 0;
    const Index score = inside && given != nullptr ? given[entry] : 0;
    // The first lane of those with an equal score wins.
    const unsigned all = __ballot_sync(kFull, inside);
    const unsigned equal = __match_any_sync(kFull, id) & all;
    unsigned left = __ballot_sync(kFull, inside && __ffs(static_cast<int>(equal)) - 1 == lane);
    while (left != 0) {
      const int speaker = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const Index wanted = __shfl_sync(kFull, id, speaker);
      const unsigned equals = __shfl_sync(kFull, equal, speaker);
      const Index its_score = __shfl_sync(kFull, score, speaker);
      const Place place = place_of(table, wanted);
      int slot = slot_of(table, digests, place, wanted, lane);
      bool takes = false, late = false;  // another's slot; one whose id has expired
      if (slot >= 0) late = (__shfl_sync(kFull, old, slot / kEach) >> (slot % kEach) & 1u) != 0;
      const bool is_new = slot < 0 || late;
      if (slot < 0) {
        int open = -1, full = 0;
#pragma unroll
        for (int k = kEach - 1; k >= 0; --k) {
          const int used = (digests >> (8 * k) & 255u) != 0;
          if ((!used || (old >> k & 1u) != 0) && lane * kEach + k < table.slots)
            open = lane * kEach + k, full = used;
        }
        const unsigned who = __ballot_sync(kFull, open >= 0);
        if (who != 0) {
          const int first_open = __ffs(static_cast<int>(who)) - 1;
          slot = __shfl_sync(kFull, open, first_open);
          takes = late = __shfl_sync(kFull, full, first_open) != 0;
        } else if (table.policy != kNever) {
          Rank rank = {kMost, kMost, kSlots};
#pragma unroll
          for (int k = 0; k < kEach; ++k) {
            const Rank one = {scores[k], stamps[k], lane * kEach + k};
            if (one.slot < table.slots && one.stamp != step && is_before(one, rank)) rank = one;
          }
          rank = lowest(rank);
          const bool better =
              table.policy != kGiven || facts != nullptr || in_order(its_score) >= rank.score;
          takes = rank.slot < kSlots && better;
          slot = takes ? rank.slot : -1;
        }
      }
      refused += slot < 0;
      evicted += takes && !late;
      expired += late;
      inserted += is_new && slot >= 0;
      const unsigned lead = __shfl_sync(kFull, entry, speaker);
      if (equals >> lane & 1)
        rows[entry] = slot < 0 ? first_guest + lead : row_of(table, bucket, slot);
      if (lane == speaker) what[entry] = is_new ? kFresh | (takes ? kTook : 0) : 0;
      if (slot < 0 || slot / kEach != lane) continue;  // every slot has one lane that writes to it
      const int k = slot % kEach;
      const Index at = own + k;
      if (takes) gone[lead] = table.ids[at];
      if (takes && facts != nullptr) {
        facts[2 * static_cast<Index>(lead)] = table.scores[at];
        facts[2 * static_cast<Index>(lead) + 1] = table.stamps[at];
      }
      Wide score_now = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) score_now = j == k && !is_new ? scores[j] : score_now;
      score_now = scored(table, score_now, static_cast<unsigned>(__popc(equals)), its_score);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {  // chosen without branches, so that all stay in registers
        scores[j] = j == k ? score_now : scores[j];
        stamps[j] = j == k ? step : stamps[j];
      }
      old &= ~(1u << k);
      digests = (digests & ~(255u << (8 * k))) | place.digest << (8 * k);
      table.ids[at] = wanted;
      table.scores[at] = score_now;
      table.stamps[at] = step;
    }
  }
  table.digests[static_cast<Index>(bucket) * 32 + lane] = digests;
  if (lane != 0) return;
  if (inserted > 0) atomicAdd(&table.counts->inserted, static_cast<Wide>(inserted));
  if (evicted > 0) atomicAdd(&table.counts->evicted, static_cast<Wide>(evicted));
  if (refused > 0) atomicAdd(&table.counts->refused, static_cast<Wide>(refused));
  if (expired > 0) atomicAdd(&table.counts->expired, static_cast<Wide>(expired));
  atomicAdd(&table.counts->misses, static_cast<Wide>(end - begin));
}
RECAST_KERNEL(id_insert)

// Empties the slots of n rows, as id_probe found them (-1: none); adds to *erased how many were
// taken. Grid: ceil(n / 256).
extern "C" __global__ void __launch_bounds__(kThreads)
    id_erase(const Table* table, const Index* rows, int n, Wide* erased) {
  const int entry = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x;
  if (entry >= n || rows[entry] < 1) return;
  const Index at = rows[entry] - 1, bucket = at / table->slots;
  const int slot = static_cast<int>(at % table->slots), shift = slot % kEach * 8;
  const unsigned before = atomicAnd(&table->digests[bucket * 32 + slot / kEach], ~(255u << shift));
  if ((before >> shift & 255u) != 0) atomicAdd(erased, 1ull);  // an id may be there twice
}
RECAST_KERNEL(id_erase)

// Halves all scores after more than `most` lookups, so that old lookups count less.
// Grid: any; slots are strode over.
extern "C" __global__ void __launch_bounds__(kThreads) id_age(const Table* from, Index most) {
  const Table table = *from;
  if (table.clock[2] <= static_cast<Wide>(most)) return;
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
       at < table.buckets * kSlots; at += stride)
    table.scores[at] >>= 1;
}
RECAST_KERNEL(id_age)

// The next step begins; `told` is what the host may read at any time. Grid: 1; one thread works.
extern "C" __global__ void __launch_bounds__(kThreads)
    id_advance(const Table* table, Index most, Counts* told) {
  if (threadIdx.x != 0) return;
  table->clock[0] += 1;
  if (table->clock[2] > static_cast<Wide>(most)) table->clock[2] = 0;
  *told = *table->counts;
}
RECAST_KERNEL(id_advance)
