// A hash table from 64-bit ids to rows of embedding memory, in device memory; the same algorithm as
// csrc/id_table.h on the host.
//
// The table is an array of buckets of 128 slots. An id's hash determines its bucket, and it may be
// in any slot of that; slot s of bucket b stands for row 1 + b slots + s, with `slots` <= 128 in
// use, so no free list is needed. A slot's digest is 8 bits of the hash, 0 if it is empty: the
// digests of a bucket are one 128-byte line, which a warp reads at once. Rows behind the last
// slot's are for guests: ids that found no slot in this batch, with row first_guest plus their
// position in the batch.
//
// A training batch is three launches on one stream; the host reads nothing back, and grids depend
// on the size of the batch only:
//   id_probe      a warp an id: finds it and counts the lookup, or writes its bucket
//   row_sort.cu   sorts the ids that were not found by bucket; stable: in the order of the batch
//   id_insert     a warp a bucket: assigns slots, one id after the other
// So which id gets which row, and which is evicted, depends on the order of the batch only and is
// deterministic. Slots looked up in this step are not evicted.
//
// Every kernel is launched with 256 threads and no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::UInt64;

constexpr int kThreads = 256;
constexpr int kSlots = 128;
constexpr int kEach = kSlots / 32;  // consecutive slots of a lane
constexpr unsigned kFull = 0xffffffffu;
constexpr UInt64 kMaxScore = ~0ull;

enum Policy { kNever, kLru, kLfu, kEpochLru, kEpochLfu, kGiven };
enum What {
  kFresh = 1,
  kTook = 2
};  // of an entry: its row is newly assigned; it was taken from another id

// Statistics since the table was made.
struct Counts {
  UInt64 inserted, evicted, refused, misses, lookups, expired;
};

// Twelve fields of 8 bytes, as the host writes them.
struct Table {
  unsigned* digests;  // (buckets, 32), four a word
  Index* ids;         // (buckets, 128), as are:
  UInt64* scores;     // the lowest is evicted first
  UInt64* stamps;     // step of the last lookup
  UInt64* clock;      // step, epoch, lookups since counts were halved
  Counts* counts;
  Index buckets, slots;  // at most 2^32 - 1; of each bucket
  Index policy;
  Index ttl;  // steps without a lookup after which an id is forgotten; 0: never
  Index padded,
      padding;  // whether there is a padding id, which is never stored and has row 0; that id
};

struct Place {
  unsigned bucket, digest;
};

// The hash of csrc/id_table.h: every bit depends on every bit of the id.
__device__ __forceinline__ Place place_of(const Table& table, Index id) {
  const UInt64 x = static_cast<UInt64>(id) ^ 0x2d358dccaa6c78a5ull, k = 0x9e3779b97f4a7c15ull;
  const UInt64 hash = x * k ^ __umul64hi(x, k);
  const unsigned digest = static_cast<unsigned>(hash) & 255u;
  const UInt64 bucket = (hash >> 32) * static_cast<UInt64>(table.buckets) >> 32;
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

__device__ __forceinline__ bool has_expired(const Table& table, UInt64 stamp, UInt64 step) {
  return table.ttl > 0 && stamp + static_cast<UInt64>(table.ttl) < step;
}

// Signed scores as unsigned ones in the same order.
__device__ __forceinline__ UInt64 as_unsigned(Index score) {
  return static_cast<UInt64>(score) ^ (1ull << 63);
}

__device__ __forceinline__ UInt64 in_epoch(UInt64 epoch, UInt64 low) {
  return epoch << 32 | (low < kFull ? low : kFull);
}

// The score of a slot after that many further lookups.
__device__ __forceinline__ UInt64 scored(const Table& table, UInt64 before, unsigned times,
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
      return as_unsigned(given);
    default:
      return before;
  }
}

// Updates score and stamp for one lookup of a slot; atomically, as other warps may do the same.
__device__ __forceinline__ void touch(const Table& table, Index at, Index given) {
  atomicExch(&table.stamps[at], table.clock[0]);
  UInt64* score = &table.scores[at];
  if (table.policy == kNever) return;
  if (table.policy == kLfu) {
    atomicAdd(score, 1ull);
  } else if (table.policy == kEpochLfu) {
    UInt64 seen = atomicAdd(score, 0ull);
    while (true) {
      const UInt64 was = atomicCAS(score, seen, scored(table, seen, 1, given));
      if (was == seen) return;
      seen = was;
    }
  } else {
    atomicExch(score, scored(table, 0, 1, given));
  }
}

// The eviction order: lowest score, then oldest stamp, then lowest slot.
struct Rank {
  UInt64 score, stamp;
  int slot;  // kSlots: none
};

__device__ __forceinline__ bool is_before(const Rank& a, const Rank& b) {
  if (a.score != b.score) return a.score < b.score;
  return a.stamp != b.stamp ? a.stamp < b.stamp : a.slot < b.slot;
}

// The minimum over the lanes of a warp.
__device__ __forceinline__ Rank warp_minimum(Rank mine) {
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

// The row of each of n ids. With `keys` it is a lookup in training: ids that are found get their
// scores updated, keys[i] is the bucket of an id that is not found, else `buckets`, and values[i] =
// i. Without `keys` the table does not change, and ids that are not found become guests, or -1 if
// first_guest < 0. `given`: scores from the caller, for that policy. Grid: ceil(n / 8).
extern "C" __global__ void __launch_bounds__(kThreads)
    id_probe(const Table* from, const Index* ids, int n, const Index* given, Index first_guest,
             Index* rows, int* what, unsigned* keys, unsigned* values) {
  const int lane = threadIdx.x % 32;
  const int entry = static_cast<int>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (entry >= n) return;
  const Table table = *from;
  const Index id = ids[entry];
  if (entry == 0 && lane == 0 && keys != nullptr) {
    atomicAdd(&table.clock[2], static_cast<UInt64>(n));
    atomicAdd(&table.counts->lookups, static_cast<UInt64>(n));
  }
  if (table.padded != 0 && id == table.padding) {
    if (lane != 0) return;
    rows[entry] = what[entry] = 0;
    if (keys == nullptr) return;
    keys[entry] = static_cast<unsigned>(table.buckets);
    values[entry] = static_cast<unsigned>(entry);
    atomicAdd(&table.clock[2], ~0ull);  // counted above with all n, but it is no lookup
    atomicAdd(&table.counts->lookups, ~0ull);
    return;
  }
  const Place place = place_of(table, id);
  const unsigned digests = table.digests[static_cast<Index>(place.bucket) * 32 + lane];
  int slot = slot_of(table, digests, place, id, lane);
  if (lane != 0) return;
  if (slot >= 0 && table.ttl > 0) {
    const Index at = static_cast<Index>(place.bucket) * kSlots + slot;
    // An atomic read, as another warp may be updating the stamp.
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
// [starts[r], starts[r + 1]) of values, and runs[1] runs are of buckets. what[i] has
// flags: the row is newly assigned (guests too), or was taken from another id, which is then
// gone[i]. With `facts` evicted ids move to a lower tier: facts[2 i] and facts[2 i + 1] are the
// evicted id's score and stamp, and a new id gets a row whatever its score. Grid: ceil(min(n,
// buckets) / 8).
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    id_insert(const Table* from, const Index* ids, const Index* given, const unsigned* keys,
              const unsigned* values, const unsigned* starts, const unsigned* runs,
              Index first_guest, Index* rows, int* what, Index* gone, UInt64* facts) {
  const int lane = threadIdx.x % 32;
  const unsigned run = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (run >= runs[1]) return;
  const Table table = *from;
  const unsigned begin = starts[run], end = starts[run + 1], bucket = keys[begin];
  const Index base = static_cast<Index>(bucket) * kSlots, own = base + lane * kEach;
  const UInt64 step = table.clock[0];
  unsigned digests = table.digests[static_cast<Index>(bucket) * 32 + lane];
  UInt64 scores[kEach], stamps[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    scores[k] = table.scores[own + k], stamps[k] = table.stamps[own + k];
  unsigned expired_slots = 0;  // bit k: the lane's slot k has expired, if it is used
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    expired_slots |= static_cast<unsigned>(has_expired(table, stamps[k], step)) << k;
  unsigned inserted = 0, evicted = 0, refused = 0, expired = 0;
  for (unsigned first = begin; first < end; first += 32) {
    const bool inside = first + lane < end;
    const unsigned entry = inside ? values[first + lane] : 0;
    const Index id = inside ? ids[entry] : 0;
    const Index score = inside && given != nullptr ? given[entry] : 0;
    // Of lanes with equal ids the first speaks for all.
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
      bool takes = false, is_expired = false;  // takes an occupied slot; the slot's id has expired
      if (slot >= 0)
        is_expired = (__shfl_sync(kFull, expired_slots, slot / kEach) >> (slot % kEach) & 1u) != 0;
      const bool is_new = slot < 0 || is_expired;
      if (slot < 0) {
        int free_slot = -1, is_used = 0;
#pragma unroll
        for (int k = kEach - 1; k >= 0; --k) {
          const int used = (digests >> (8 * k) & 255u) != 0;
          if ((!used || (expired_slots >> k & 1u) != 0) && lane * kEach + k < table.slots)
            free_slot = lane * kEach + k, is_used = used;
        }
        const unsigned who = __ballot_sync(kFull, free_slot >= 0);
        if (who != 0) {
          const int first_open = __ffs(static_cast<int>(who)) - 1;
          slot = __shfl_sync(kFull, free_slot, first_open);
          takes = is_expired = __shfl_sync(kFull, is_used, first_open) != 0;
        } else if (table.policy != kNever) {
          Rank rank = {kMaxScore, kMaxScore, kSlots};
#pragma unroll
          for (int k = 0; k < kEach; ++k) {
            const Rank one = {scores[k], stamps[k], lane * kEach + k};
            if (one.slot < table.slots && one.stamp != step && is_before(one, rank)) rank = one;
          }
          rank = warp_minimum(rank);
          const bool better =
              table.policy != kGiven || facts != nullptr || as_unsigned(its_score) >= rank.score;
          takes = rank.slot < kSlots && better;
          slot = takes ? rank.slot : -1;
        }
      }
      refused += slot < 0;
      evicted += takes && !is_expired;
      expired += is_expired;
      inserted += is_new && slot >= 0;
      const unsigned lead = __shfl_sync(kFull, entry, speaker);
      if (equals >> lane & 1)
        rows[entry] = slot < 0 ? first_guest + lead : row_of(table, bucket, slot);
      if (lane == speaker) what[entry] = is_new ? kFresh | (takes ? kTook : 0) : 0;
      if (slot < 0 || slot / kEach != lane) continue;  // only the slot's own lane writes to it
      const int k = slot % kEach;
      const Index at = own + k;
      if (takes) gone[lead] = table.ids[at];
      if (takes && facts != nullptr) {
        facts[2 * static_cast<Index>(lead)] = table.scores[at];
        facts[2 * static_cast<Index>(lead) + 1] = table.stamps[at];
      }
      UInt64 score_now = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) score_now = j == k && !is_new ? scores[j] : score_now;
      score_now = scored(table, score_now, static_cast<unsigned>(__popc(equals)), its_score);
#pragma unroll
      for (int j = 0; j < kEach;
           ++j) {  // selects instead of a dynamic index, which would use local memory
        scores[j] = j == k ? score_now : scores[j];
        stamps[j] = j == k ? step : stamps[j];
      }
      expired_slots &= ~(1u << k);
      digests = (digests & ~(255u << (8 * k))) | place.digest << (8 * k);
      table.ids[at] = wanted;
      table.scores[at] = score_now;
      table.stamps[at] = step;
    }
  }
  table.digests[static_cast<Index>(bucket) * 32 + lane] = digests;
  if (lane != 0) return;
  if (inserted > 0) atomicAdd(&table.counts->inserted, static_cast<UInt64>(inserted));
  if (evicted > 0) atomicAdd(&table.counts->evicted, static_cast<UInt64>(evicted));
  if (refused > 0) atomicAdd(&table.counts->refused, static_cast<UInt64>(refused));
  if (expired > 0) atomicAdd(&table.counts->expired, static_cast<UInt64>(expired));
  atomicAdd(&table.counts->misses, static_cast<UInt64>(end - begin));
}
RECAST_KERNEL(id_insert)

// Empties the slots of n rows, as id_probe found them (-1: none); adds to *erased how many were
// taken. Grid: ceil(n / 256).
extern "C" __global__ void __launch_bounds__(kThreads)
    id_erase(const Table* table, const Index* rows, int n, UInt64* erased) {
  const int entry = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x;
  if (entry >= n || rows[entry] < 1) return;
  const Index at = rows[entry] - 1, bucket = at / table->slots;
  const int slot = static_cast<int>(at % table->slots), shift = slot % kEach * 8;
  const unsigned before = atomicAnd(&table->digests[bucket * 32 + slot / kEach], ~(255u << shift));
  if ((before >> shift & 255u) != 0) atomicAdd(erased, 1ull);  // the batch may contain an id twice
}
RECAST_KERNEL(id_erase)

// Halves all scores after more than `most` lookups, so that old lookups count less.
// Grid: any; a grid-stride loop over slots.
extern "C" __global__ void __launch_bounds__(kThreads) id_age(const Table* from, Index most) {
  const Table table = *from;
  if (table.clock[2] <= static_cast<UInt64>(most)) return;
  const Index stride = static_cast<Index>(gridDim.x) * kThreads;
  for (Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
       at < table.buckets * kSlots; at += stride)
    table.scores[at] >>= 1;
}
RECAST_KERNEL(id_age)

// Begins the next step, and copies the statistics to `told`, which the host may read at any time.
// Grid: 1; one thread works.
extern "C" __global__ void __launch_bounds__(kThreads)
    id_advance(const Table* table, Index most, Counts* told) {
  if (threadIdx.x != 0) return;
  table->clock[0] += 1;
  if (table->clock[2] > static_cast<UInt64>(most)) table->clock[2] = 0;
  *told = *table->counts;
}
RECAST_KERNEL(id_advance)
