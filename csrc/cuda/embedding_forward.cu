// Embedding lookups, any number in one launch. For each bag of ids one of
//     out[bag] = Σ w[i] table[ids[i]]    their mean    their maximum    table[ids[bag]] (a gather)
// with tables of different rows, widths and id dtypes.
//
// A group of LANES lanes takes a bag, and each lane VEC columns of its rows; a block takes
// consecutive bags of one lookup. A warp first loads the offsets and ids of all its bags, so that
// it waits once for each, then their rows, several loads in flight. The order of every sum is fixed
// by the shape of the bag: results are bitwise reproducible.
//
// One launch serves the lookups of one class, which the macros define:
//   RECAST_TABLE   dtype of tables and per-sample weights: 0 fp32, 1 fp16, 2 bf16
//   RECAST_OUT     dtype of outputs, likewise; sums are fp32
//   RECAST_VEC     columns that a lane reads at once; divides dim and row_stride of each table, and
//                  the tables start at multiples of VEC elements: 1, 2, 4, and 8 for 16-bit tables
//   RECAST_LANES   lanes that share a bag, a power of two up to 32: about dim / VEC
//   RECAST_CHUNKS  loads of VEC columns of a row that a lane has in flight: 1, 2 or 4. A row wider
//                  than LANES * VEC * CHUNKS takes several walks over the bag's ids
//   RECAST_MAX     1: the class pools by max, 0: by sum, mean or not at all
//   RECAST_BAGS    bags of a group of lanes in a round; BAGS * CHUNKS is 4 at most. If no bag of a
//                  warp has two ids, the rows of all BAGS are loaded together, which hides the
//                  latency that bounds lookups of one id a bag
//   RECAST_LONG    a bag of so many ids or more is summed by its whole block; 0: never, as always
//                  where the class pools by max
//   RECAST_BLOCK   threads of a block
//
// Launch: grid = Σ over the lookups of max(1, ceil(bags / (BLOCK / LANES * BAGS * rounds))), each
// lookup's `first_block` being the sum of those before; block = RECAST_BLOCK; no dynamic shared
// memory. `rounds`, 8 and 32 / (32 / LANES * BAGS) at most, or 1: a warp loads the ids of the
// bags of so many rounds at once, which pays where there are enough bags to fill the device anyway.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::UInt64;
using Table = recast::Dtype<RECAST_TABLE>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

#include "embedding_lookups.cuh"

constexpr int kLanes = RECAST_LANES;
constexpr int kChunks = RECAST_CHUNKS;
constexpr int kBags = RECAST_BAGS;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;
constexpr int kWarpGroups = 32 / kLanes;
constexpr int kWarpBags = kWarpGroups * kBags;  // consecutive bags of a warp's round
constexpr int kBlockBags = kGroups * kBags;     // the same of a block
constexpr int kMaxRounds = kWarpBags >= 32 ? 1 : kWarpBags > 4 ? 32 / kWarpBags : 8;
constexpr int kBagsPerLane = (kWarpBags * kMaxRounds + 31) / 32;  // bags whose ids a lane loads
// Resident blocks of a multiprocessor, as many as registers allow without spills; a maximum keeps
// the winners' positions in registers too.
constexpr int kHeld = kChunks * kVec * (RECAST_MAX ? 2 : 1);
constexpr int kResident = (kHeld > 32 ? 256 : kHeld > 16 ? 512 : 768) / RECAST_BLOCK;
constexpr int kWidth = kLanes * kVec;       // columns of one chunk
constexpr int kColumns = kWidth * kChunks;  // columns of one walk

// The ids of a bag. `row`: the row of a bag's only id, kNoRow if that is invalid or padding.
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

// The first of equal values wins; a NaN wins only if it comes first, as in torch.
__device__ __forceinline__ void pool_max(const Lookup& lookup, Index bag, Errors* errors) {
  const int lane = threadIdx.x % kLanes;
  const Span ids = checked(lookup, bag, bag_of(lookup, bag), lane == 0, errors);
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
      if (column == 0 && lane == 0 && reader.is_bad(id)) reader.report_bad(reader.start + i);
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

constexpr int kUnroll = kChunks >= 4 ? 1 : 4 / kChunks;  // rows in flight
constexpr bool kPrefetchIds =
    kChunks * kVec <= 4;  // whether registers suffice to load the next ids early

// total += Σ over ids [first, last) of the bag; returns how many of them are valid. The next ids
// are loaded while the rows of the present ones are in flight. Bad ids are reported by the first
// lane, unless the bag `is_single`: find() has reported those.
__device__ __forceinline__ int sum_rows(const Reader& reader, const Table* weights, int first,
                                        int last, int column, bool is_single,
                                        float (&total)[kChunks][kVec]) {
  const int lane = threadIdx.x % kLanes;
  const bool reports = column == 0 && lane == 0 && !(kBags > 1 && is_single);
  column += lane * kVec;
  int counted = 0;
  bool bad = false;
  Index id[kUnroll];
  const auto load_ids = [&](int i) {
#pragma unroll
    for (int r = 0; r < kUnroll; ++r)
      if (i + r < last) id[r] = reader.id(reader.start + i + r);
  };
  if (kPrefetchIds) load_ids(first);
  for (int i = first; i < last; i += kUnroll) {
    unsigned row[kUnroll];
    recast::Pack<Table, kVec> read[kUnroll][kChunks];
    if (!kPrefetchIds) load_ids(i);
#pragma unroll
    for (int r = 0; r < kUnroll; ++r) {
      const bool inside = i + r < last;
      row[r] = inside ? reader.row_of(id[r]) : kNoRow;
      bad = bad || (inside && reader.is_bad(id[r]));
    }
#pragma unroll
    for (int r = 0; r < kUnroll; ++r)
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + k * kWidth;
        read[r][k] = row[r] != kNoRow && c < reader.dim ? reader.read(row[r], c)
                                                        : recast::zeros<kVec, Table>();
      }
    if (kPrefetchIds) load_ids(i + kUnroll);
#pragma unroll
    for (int r = 0; r < kUnroll; ++r) {
      const bool counts = row[r] != kNoRow;
      counted += counts;
      const float factor = counts && weights ? recast::widen(weights[reader.start + i + r]) : 1.0f;
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] += factor * recast::widen(read[r][k].at[e]);
    }
  }
  if (bad && reports)
#pragma unroll 1
    for (int i = first; i < last; ++i)
      if (reader.is_bad(reader.id(reader.start + i))) reader.report_bad(reader.start + i);
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
    const float denominator = divisor(lookup, counted);
    if (denominator != 1.0f)
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] /= denominator;
    write(lookup, bag, column, total);
  }
}

// Loads the offsets and ids of `count` bags of a warp, from `first` on, each lane those of some
// bags. All loads of a step are issued before the first result is used: the warp waits once for the
// offsets of all its bags, and once for their ids.
__device__ __forceinline__ void find(const Lookup& lookup, Index first, int count, Bag* bags,
                                     Errors* errors) {
  const int lane = threadIdx.x % 32;
  const Reader reader(lookup, errors);
  bool in_range[kBagsPerLane];
  Span span[kBagsPerLane];
#pragma unroll
  for (int q = 0; q < kBagsPerLane; ++q) {
    in_range[q] = q * 32 + lane < count && first + q * 32 + lane < lookup.bags;
    span[q] = in_range[q] ? bag_of(lookup, first + q * 32 + lane) : Span{0, 0};
  }
#pragma unroll
  for (int q = 0; q < kBagsPerLane; ++q)
    if (in_range[q]) span[q] = checked(lookup, first + q * 32 + lane, span[q], true, errors);
  Index id[kBagsPerLane];
#pragma unroll
  for (int q = 0; q < kBagsPerLane; ++q)
    id[q] = kBags > 1 && span[q].end - span[q].start == 1 ? reader.id(span[q].start) : 0;
#pragma unroll
  for (int q = 0; q < kBagsPerLane; ++q) {
    const int ids = static_cast<int>(span[q].end - span[q].start);
    const unsigned row = kBags > 1 && ids == 1 ? reader.row_of(id[q]) : kNoRow;
    if (q * 32 + lane < count) bags[q * 32 + lane] = {span[q].start, ids, row};
  }
#pragma unroll
  for (int q = 0; q < kBagsPerLane; ++q)
    if (kBags > 1 && span[q].end - span[q].start == 1 && reader.is_bad(id[q]))
      reader.report_bad(span[q].start);
}

// Whether no bag of the warp's round has more than one id.
__device__ __forceinline__ bool are_singles(const Bag* bags) {
  bool singles = kBags > 1;
#pragma unroll
  for (int j = 0; j < kBags; ++j)
    singles = singles && bags[j * kWarpGroups + threadIdx.x % 32 / kLanes].count <= 1;
  return __all_sync(~0u, singles);
}

// Writes the warp's bags of a round, from `first` on, none of more than one id.
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

// A long bag by the whole block: each group of lanes sums an equal range of its ids, then each
// thread adds up those sums for some columns.
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
    const float denominator = divisor(lookup, all);
    for (int c = threadIdx.x; c < kColumns && column + c < reader.dim; c += RECAST_BLOCK) {
      float sum = 0.0f;
      for (int g = 0; g < kGroups; ++g) sum += partial[g][c];
      recast::narrow(sum / denominator, lookup.out[bag * lookup.out_stride + column + c]);
    }
    __syncthreads();
  }
}

#endif
#endif

// The lookup that this block belongs to. A 32-way search by the warp: a binary search would wait
// for one load after the other, about as long as the block's own work takes.
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
  const int block_bags = kBlockBags * rounds;
  const Index first = (blockIdx.x - lookup.first_block) * block_bags;
#if RECAST_MAX
  const int group = threadIdx.x / kLanes;
  for (Index bag = first + group; bag < first + block_bags && bag < lookup.bags; bag += kGroups)
    pool_max(lookup, bag, errors);
#else
  RECAST_SHARED(Bag[kBlockBags * kMaxRounds], all);
  const int warp_bags = kWarpBags * rounds, warp_first = threadIdx.x / 32 * warp_bags;
  Bag* const bags = &all[warp_first];
  find(lookup, first + warp_first, warp_bags, bags, errors);
  __syncwarp();
#pragma unroll 1
  for (int from = 0; from < warp_bags; from += kWarpBags) {
    if (are_singles(bags + from)) {
      pool_singles(lookup, first + warp_first + from, bags + from, errors);
      continue;
    }
#pragma unroll 1
    for (int at = from + threadIdx.x % 32 / kLanes; at < from + kWarpBags; at += kWarpGroups) {
      const Bag bag = bags[at];
      if (first + warp_first + at < lookup.bags && !is_long(bag))
        pool_sum(lookup, first + warp_first + at, bag, errors);
    }
  }
#if RECAST_LONG
  bool any = false;
  for (int at = threadIdx.x % 32; at < warp_bags; at += 32) any = any || is_long(bags[at]);
  if (!__syncthreads_or(any)) return;
  for (int b = 0; b < block_bags; ++b)
    if (is_long(all[b])) pool_long(lookup, first + b, all[b], errors);
#endif
#endif
}
RECAST_KERNEL(embedding_forward)
