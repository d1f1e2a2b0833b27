// All embedding lookups of a step: gather, sum, mean and max, with mixed tables, widths and ids.
//
// One launch for each class of lookups; a class is what the macros say:
//   RECAST_TABLE   dtype of tables and per-sample weights: 0 fp32, 1 fp16, 2 bf16
//   RECAST_OUT     dtype of outputs, likewise; sums are fp32
//   RECAST_VEC     columns that a lane reads at once; divides dim and row_stride of each table, and
//                  the tables start at multiples of VEC elements: 1, 2, 4, and 8 for 16-bit tables
//   RECAST_LANES   lanes that share a bag, a power of two up to 32: about dim / VEC
//   RECAST_CHUNKS  reads of VEC columns that a lane has under way: 1, 2 or 4. A row wider than
//                  LANES * VEC * CHUNKS is read in several walks over its ids
//   RECAST_MAX     1: the class pools by max, 0: by sum, mean or not at all
//   RECAST_BAGS    bags of a group of lanes in a round; BAGS * CHUNKS is 4 at most. Where none of
//                  a warp's has two ids, their rows are under way at the same time, which is what
//                  a lookup of one id a bag waits for
//   RECAST_LONG    a bag of so many ids or more is summed by its whole block; 0: none is, as always
//                  where the class pools by max
//   RECAST_BLOCK   threads of a block
//
// Launch: grid = Σ over the lookups of max(1, ceil(bags / (BLOCK / LANES * BAGS * rounds))), each
// lookup's `first_block` being the sum of those before; block = RECAST_BLOCK; no dynamic shared
// memory. `rounds`, 8 and 32 / (32 / LANES * BAGS) at most, or 1: a warp finds the ids of the bags
// of so many rounds at once. Many are good where there are bags for all of the device.
//
// The order of every sum is fixed by the shape of the bag: results repeat bit by bit.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::Wide;
using Table = recast::Dtype<RECAST_TABLE>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

#include "embedding_lookups.cuh"

constexpr int kLanes = RECAST_LANES;
constexpr int kChunks = RECAST_CHUNKS;
constexpr int kBags = RECAST_BAGS;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;
constexpr int kWarpGroups = 32 / kLanes;
constexpr int kOfWarp = kWarpGroups * kBags;  // bags of a round, neighbours
constexpr int kOfBlock = kGroups * kBags;     // likewise
constexpr int kMostRounds = kOfWarp >= 32 ? 1 : kOfWarp > 4 ? 32 / kOfWarp : 8;
constexpr int kEach = (kOfWarp * kMostRounds + 31) / 32;  // bags that a lane looks for
// Blocks that run at once, as many as registers allow without spills; a maximum also keeps its
// place in registers.
constexpr int kHeld = kChunks * kVec * (RECAST_MAX ? 2 : 1);
constexpr int kResident = (kHeld > 32 ? 256 : kHeld > 16 ? 512 : 768) / RECAST_BLOCK;
constexpr int kWidth = kLanes * kVec;       // columns of one chunk
constexpr int kColumns = kWidth * kChunks;  // columns of one walk

// The ids of a bag; `row` is that of the one id of a bag of one, kNoRow where it does not count.
struct Bag {
  Index start;
  int count;
  unsigned row;
};

[[maybe_unused]] __device__ __forceinline__ bool is_long(const Bag& bag) {
  return RECAST_LONG && bag.count >= RECAST_LONG;
}

__device__ __forceinline__ void write(const Lookup& lookup, Index bag, int column,
                                      const float (&value)[kChunks][kVec]) {
  Out* const out = lookup.out + bag * lookup.out_stride;
  const int dim = static_cast<int>(lookup.dim);
  column += threadIdx.x % kLanes * kVec;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int c = column + k * kWidth;
    if (c >= dim) break;
    recast::Pack<Out, kVec> pack;
#pragma unroll
    for (int e = 0; e < kVec; ++e) recast::narrow(value[k][e], pack.at[e]);
    if (lookup.flags & kAlignedOut) {
      recast::store_whole<kVec>(out + c, pack);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) out[c + e] = pack.at[e];
    }
  }
}

#if RECAST_MAX

// The first of equal rows wins, and a NaN only when it comes first.
__device__ __forceinline__ void pool_max(const Lookup& lookup, Index bag, Errors* errors) {
  const int lane = threadIdx.x % kLanes;
  const Stretch ids = checked(lookup, bag, bag_of(lookup, bag), lane == 0, errors);
  const int count = static_cast<int>(ids.end - ids.start);
  Reader reader(lookup, errors);
  reader.start = ids.start;
  for (int column = 0; column < reader.dim; column += kColumns) {
    float best[kChunks][kVec] = {};
    unsigned winner[kChunks][kVec];
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) winner[k][e] = kNoRow;
    for (int i = 0; i < count; ++i) {
      const Index id = reader.id(reader.start + i);
      if (column == 0 && lane == 0 && reader.is_bad(id)) reader.tell(reader.start + i);
      const unsigned row = reader.row_of(id);
      if (row == kNoRow) continue;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + lane * kVec + k * kWidth;
        if (c >= reader.dim) break;
        const auto read = reader.read(row, c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const float value = recast::widen(read.at[e]);
          const bool better = winner[k][e] == kNoRow || value > best[k][e];
          best[k][e] = better ? value : best[k][e];
          winner[k][e] = better ? static_cast<unsigned>(i) : winner[k][e];
        }
      }
    }
    write(lookup, bag, column, best);
    if (lookup.winner == nullptr) continue;
    Index* const winners = lookup.winner + bag * reader.dim;
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int c = column + lane * kVec + k * kWidth + e;
        const unsigned at = winner[k][e];
        if (c < reader.dim) winners[c] = at == kNoRow ? lookup.n_ids : ids.start + at;
      }
  }
}

#else

constexpr int kAtOnce = kChunks >= 4 ? 1 : 4 / kChunks;  // rows under way
constexpr bool kIdsAhead = kChunks * kVec <= 4;          // whether registers are left for more ids

// total += Σ over ids [first, last) of the bag; returns how many of them count. The ids of some
// rows are asked for at once, of the next ones beside these rows. Of the one id of a bag that
// `is_single`, find() has told what is wrong.
__device__ __forceinline__ int sum_rows(const Reader& reader, const Table* weights, int first,
                                        int last, int column, bool is_single,
                                        float (&total)[kChunks][kVec]) {
  const int lane = threadIdx.x % kLanes;
  const bool tell = column == 0 && lane == 0 && !(kBags > 1 && is_single);
  column += lane * kVec;
  int counted = 0;
  bool bad = false;
  Index id[kAtOnce];
  const auto ask = [&](int i) {
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
      if (i + r < last) id[r] = reader.id(reader.start + i + r);
  };
  if (kIdsAhead) ask(first);
  for (int i = first; i < last; i += kAtOnce) {
    unsigned row[kAtOnce];
    recast::Pack<Table, kVec> read[kAtOnce][kChunks];
    if (!kIdsAhead) ask(i);
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const bool inside = i + r < last;
      row[r] = inside ? reader.row_of(id[r]) : kNoRow;
      bad = bad || (inside && reader.is_bad(id[r]));
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + k * kWidth;
        read[r][k] = row[r] != kNoRow && c < reader.dim ? reader.read(row[r], c)
                                                        : recast::zeros<kVec, Table>();
      }
    if (kIdsAhead) ask(i + kAtOnce);
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const bool counts = row[r] != kNoRow;
      counted += counts;
      const float factor = counts && weights ? recast::widen(weights[reader.start + i + r]) : 1.0f;
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] += factor * recast::widen(read[r][k].at[e]);
    }
  }
  if (bad && tell)
#pragma unroll 1
    for (int i = first; i < last; ++i)
      if (reader.is_bad(reader.id(reader.start + i))) reader.tell(reader.start + i);
  return counted;
}

__device__ __forceinline__ float divisor(const Lookup& lookup, int counted) {
  return lookup.mode == kMean && counted > 0 ? static_cast<float>(counted) : 1.0f;
}

__device__ __forceinline__ void pool_sum(const Lookup& lookup, Index bag, const Bag& ids,
                                         Errors* errors) {
  Reader reader(lookup, errors);
  reader.start = ids.start;
  const int count = ids.count;
  for (int column = 0; column < reader.dim; column += kColumns) {
    float total[kChunks][kVec] = {};
    const int counted = sum_rows(reader, lookup.weights, 0, count, column, count == 1, total);
    const float by = divisor(lookup, counted);
    if (by != 1.0f)
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] /= by;
    write(lookup, bag, column, total);
  }
}

// Reads offsets and ids of `count` bags of a warp, from `first` on; each lane handles some of them.
// All loads of one step are issued before the first result is used, so the warp waits once for the
// offsets of all its bags, and once for their ids.
__device__ __forceinline__ void find(const Lookup& lookup, Index first, int count, Bag* bags,
                                     Errors* errors) {
  const int lane = threadIdx.x % 32;
  const Reader reader(lookup, errors);
  bool is_there[kEach];
  Stretch said[kEach];
#pragma unroll
  for (int q = 0; q < kEach; ++q) {
    is_there[q] = q * 32 + lane < count && first + q * 32 + lane < lookup.bags;
    said[q] = is_there[q] ? bag_of(lookup, first + q * 32 + lane) : Stretch{0, 0};
  }
#pragma unroll
  for (int q = 0; q < kEach; ++q)
    if (is_there[q]) said[q] = checked(lookup, first + q * 32 + lane, said[q], true, errors);
  Index id[kEach];
#pragma unroll
  for (int q = 0; q < kEach; ++q)
    id[q] = kBags > 1 && said[q].end - said[q].start == 1 ? reader.id(said[q].start) : 0;
#pragma unroll
  for (int q = 0; q < kEach; ++q) {
    const int ids = static_cast<int>(said[q].end - said[q].start);
    const unsigned row = kBags > 1 && ids == 1 ? reader.row_of(id[q]) : kNoRow;
    if (q * 32 + lane < count) bags[q * 32 + lane] = {said[q].start, ids, row};
  }
#pragma unroll
  for (int q = 0; q < kEach; ++q)
    if (kBags > 1 && said[q].end - said[q].start == 1 && reader.is_bad(id[q]))
      reader.tell(said[q].start);
}

// Whether none of the warp's bags of a round has two ids.
__device__ __forceinline__ bool are_singles(const Bag* bags) {
  bool singles = kBags > 1;
#pragma unroll
  for (int j = 0; j < kBags; ++j)
    singles = singles && bags[j * kWarpGroups + threadIdx.x % 32 / kLanes].count <= 1;
  return __all_sync(~0u, singles);
}

// The warp's bags of a round, each of one id at most, from `first` on.
__device__ __forceinline__ void pool_singles(const Lookup& lookup, Index first, const Bag* bags,
                                             Errors* errors) {
  const Reader reader(lookup, errors);
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
  unsigned row[kBags];
#pragma unroll
  for (int j = 0; j < kBags; ++j) row[j] = bags[j * kWarpGroups + group].row;
  for (int column = 0; column < reader.dim; column += kColumns) {
    recast::Pack<Table, kVec> read[kBags][kChunks];
#pragma unroll
    for (int j = 0; j < kBags; ++j)
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + lane * kVec + k * kWidth;
        read[j][k] = row[j] != kNoRow && c < reader.dim ? reader.read(row[j], c)
                                                        : recast::zeros<kVec, Table>();
      }
#pragma unroll
    for (int j = 0; j < kBags; ++j) {
      const int at = j * kWarpGroups + group;
      if (first + at >= lookup.bags) break;
      const bool weighted = row[j] != kNoRow && lookup.weights != nullptr;
      const float factor = weighted ? recast::widen(lookup.weights[bags[at].start]) : 1.0f;
      float total[kChunks][kVec] = {};
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] += factor * recast::widen(read[j][k].at[e]);
      write(lookup, first + at, column, total);
    }
  }
}

#if RECAST_LONG

// A long bag: each group of lanes sums one stretch of its ids, then each thread some columns.
__device__ __forceinline__ void pool_long(const Lookup& lookup, Index bag, const Bag& ids,
                                          Errors* errors) {
  RECAST_SHARED(float[kGroups][kColumns], partial);
  RECAST_SHARED(int[kGroups], counts);
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int count = ids.count;
  const int share = (count + kGroups - 1) / kGroups;
  const int first = group * share < count ? group * share : count;
  const int last = count - first < share ? count : first + share;
  Reader reader(lookup, errors);
  reader.start = ids.start;
  for (int column = 0; column < reader.dim; column += kColumns) {
    float total[kChunks][kVec] = {};
    const int counted = sum_rows(reader, lookup.weights, first, last, column, false, total);
    if (lane == 0) counts[group] = counted;
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) partial[group][k * kWidth + lane * kVec + e] = total[k][e];
    __syncthreads();
    int all = 0;
    for (int g = 0; g < kGroups; ++g) all += counts[g];
    const float by = divisor(lookup, all);
    for (int c = threadIdx.x; c < kColumns && column + c < reader.dim; c += RECAST_BLOCK) {
      float sum = 0.0f;
      for (int g = 0; g < kGroups; ++g) sum += partial[g][c];
      recast::narrow(sum / by, lookup.out[bag * lookup.out_stride + column + c]);
    }
    __syncthreads();
  }
}

#endif
#endif

// The last lookup that starts at this block or before. Each step compares 32 of them at once: a
// binary search would wait for one read after the other, about as long as the block's own work.
__device__ __forceinline__ int lookup_of_block(const Lookup* lookups, int n_lookups) {
  const int lane = threadIdx.x % 32;
  int first = 0, count = n_lookups;
  while (count > 1) {
    const int stride = (count + 31) / 32, at = lane * stride;
    const bool before =
        at < count && lookups[first + at].first_block <= static_cast<Index>(blockIdx.x);
    const int passed = (__popc(__ballot_sync(~0u, before)) - 1) * stride;
    first += passed;
    count = count - passed < stride ? count - passed : stride;
  }
  return first;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    embedding_forward(const Lookup* __restrict__ lookups, int n_lookups, Errors* errors,
                      int rounds) {
  const Lookup& lookup = lookups[lookup_of_block(lookups, n_lookups)];
  const int of_block = kOfBlock * rounds;
  const Index first = (blockIdx.x - lookup.first_block) * of_block;
#if RECAST_MAX
  const int group = threadIdx.x / kLanes;
  for (Index bag = first + group; bag < first + of_block && bag < lookup.bags; bag += kGroups)
    pool_max(lookup, bag, errors);
#else
  RECAST_SHARED(Bag[kOfBlock * kMostRounds], all);
  const int of_warp = kOfWarp * rounds, place = threadIdx.x / 32 * of_warp;
  Bag* const bags = &all[place];
  find(lookup, first + place, of_warp, bags, errors);
  __syncwarp();
#pragma unroll 1
  for (int from = 0; from < of_warp; from += kOfWarp) {
    if (are_singles(bags + from)) {
      pool_singles(lookup, first + place + from, bags + from, errors);
      continue;
    }
#pragma unroll 1
    for (int at = from + threadIdx.x % 32 / kLanes; at < from + kOfWarp; at += kWarpGroups) {
      const Bag bag = bags[at];
      if (first + place + at < lookup.bags && !is_long(bag))
        pool_sum(lookup, first + place + at, bag, errors);
    }
  }
#if RECAST_LONG
  bool any = false;
  for (int at = threadIdx.x % 32; at < of_warp; at += 32) any = any || is_long(bags[at]);
  if (!__syncthreads_or(any)) return;
  for (int b = 0; b < of_block; ++b)
    if (is_long(all[b])) pool_long(lookup, first + b, all[b], errors);
#endif
#endif
}
RECAST_KERNEL(embedding_forward)
