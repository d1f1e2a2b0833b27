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
//   RECAST_BAGS    bags of a group of lanes. Where none of them has two ids, their rows are under
//                  way at the same time, which is what a lookup of one id a bag waits for
//   RECAST_LONG    a bag of so many ids or more is summed by its whole block; 0: none is, as always
//                  where the class pools by max
//   RECAST_BLOCK   threads of a block
//
// Launch: grid = Σ over the lookups of max(1, ceil(bags / (BLOCK / LANES * BAGS))), each lookup's
// `first_block` being the sum of those before; block = RECAST_BLOCK; no dynamic shared memory.
//
// The order of every sum is fixed by the shape of the bag: results repeat bit by bit.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::Wide;
using Table = recast::Dtype<RECAST_TABLE>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

enum Mode { kSum, kMean, kMax, kNone };
enum Flag { kWideIds = 1, kWideOffsets = 2, kAlignedOut = 4 };

// One lookup, nineteen fields of 8 bytes as the host writes them.
struct Lookup {
  const Table* table;
  Index rows, dim, row_stride;  // rows below 2^32 - 1; strides in elements, below 2^31
  const void* ids;              // n_ids of int32 or int64
  Index n_ids;                  // below 2^40; a bag has fewer than 2^31
  const void* offsets;   // starts of the bags, int32 or int64; null: every bag has `fixed` ids
  Index n_offsets;       // bags, or bags + 1 with the end of the last
  Index fixed;           // 1 where nothing is pooled
  const Table* weights;  // n_ids factors, or null
  Index bags, mode;
  Index padding;  // this id is left out; -1: none, as always with kNone: a gather reads it
  Index flags;    // kAlignedOut: out and out_stride are multiples of VEC elements
  Out* out;       // (bags, dim)
  Index out_stride;
  Index* winner;  // (bags, dim) contiguous: where among the ids each maximum stood, n_ids: nowhere;
                  // or null
  Index first_block;
  Index number;  // what errors call it, below 2^23
};

// What was wrong, zeroed by the host. An id outside its table is left out like padding (a gather
// gives zeros); offsets are cut to the ids there are. `first` is ~(lookup << 40 | place) of the
// first of them, which is the largest of such numbers.
struct Errors {
  Wide bad_ids, first_id, bad_offsets, first_offset;
};

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kChunks = RECAST_CHUNKS;
constexpr int kBags = RECAST_BAGS;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;
constexpr int kOfBlock = kGroups * kBags;   // bags
constexpr int kWidth = kLanes * kVec;       // columns of one chunk
constexpr int kColumns = kWidth * kChunks;  // columns of one walk
constexpr unsigned kNoRow = ~0u;

__device__ __forceinline__ void report(Wide* counter, Wide* first, Index lookup, Index place) {
  atomicAdd(counter, 1ull);
  atomicMax(first, ~(static_cast<Wide>(lookup) << 40 | static_cast<Wide>(place)));
}

struct Bag {
  Index start, end;
};

__device__ __forceinline__ bool is_long(const Bag& ids) {
  return RECAST_LONG && ids.end - ids.start >= RECAST_LONG;
}

__device__ __forceinline__ Bag bag_of(const Lookup& lookup, Index bag, Errors* errors) {
  if (lookup.offsets == nullptr) return {bag * lookup.fixed, (bag + 1) * lookup.fixed};
  const bool wide = lookup.flags & kWideOffsets;
  const Index start = recast::integer(lookup.offsets, wide, bag);
  const Index end =
      bag + 1 < lookup.n_offsets ? recast::integer(lookup.offsets, wide, bag + 1) : lookup.n_ids;
  const bool wrong = start < 0 || start > end || end > lookup.n_ids || (bag == 0 && start != 0);
  if (!wrong) return {start, end};
  if (threadIdx.x % kLanes == 0)
    report(&errors->bad_offsets, &errors->first_offset, lookup.number, bag);
  const Index from = start < 0 ? 0 : start > lookup.n_ids ? lookup.n_ids : start;
  const Index to = end > lookup.n_ids ? lookup.n_ids : end;
  return {from, to < from ? from : to};
}

// Reads ids of one bag as rows; what it needs of the lookup stays in registers.
struct Reader {
  const Table* table;
  const void* ids;
  Index start;
  unsigned rows, padding, stride;
  int number, dim;
  bool wide;
  Errors* errors;

  __device__ __forceinline__ Reader(const Lookup& lookup, Errors* errors)
      : table(lookup.table),
        ids(lookup.ids),
        start(0),
        rows(static_cast<unsigned>(lookup.rows)),
        padding(static_cast<unsigned>(lookup.padding)),
        stride(static_cast<unsigned>(lookup.row_stride)),
        number(static_cast<int>(lookup.number)),
        dim(static_cast<int>(lookup.dim)),
        wide(lookup.flags & kWideIds),
        errors(errors) {}

  // The row of an id, or kNoRow when it does not count.
  __device__ __forceinline__ unsigned row_at(Index place, bool tell) const {
    const Index id = recast::integer(ids, wide, place);
    if (static_cast<Wide>(id) >= rows) {
      if (tell) report(&errors->bad_ids, &errors->first_id, number, place);
      return kNoRow;
    }
    return static_cast<unsigned>(id) == padding ? kNoRow : static_cast<unsigned>(id);
  }

  __device__ __forceinline__ unsigned row(int at, bool tell) const {
    return row_at(start + at, tell);
  }

  __device__ __forceinline__ recast::Pack<Table, kVec> read(unsigned row, int column) const {
    return recast::load<kVec>(table + static_cast<Wide>(row) * stride + column);
  }
};

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
      recast::store<kVec>(out + c, pack);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) out[c + e] = pack.at[e];
    }
  }
}

#if RECAST_MAX

// The first of equal rows wins, and a NaN only when it comes first.
__device__ __forceinline__ void pool_max(const Lookup& lookup, Index bag, Errors* errors) {
  const Bag ids = bag_of(lookup, bag, errors);
  const int lane = threadIdx.x % kLanes, count = static_cast<int>(ids.end - ids.start);
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
      const unsigned row = reader.row(i, column == 0 && lane == 0);
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

// total += Σ over ids [first, last) of the bag; returns how many of them count.
__device__ __forceinline__ int sum_rows(const Reader& reader, const Table* weights, int first,
                                        int last, int column, float (&total)[kChunks][kVec]) {
  const int lane = threadIdx.x % kLanes;
  const bool tell = column == 0 && lane == 0;
  column += lane * kVec;
  int counted = 0;
  for (int i = first; i < last; i += kAtOnce) {
    unsigned row[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) row[r] = i + r < last ? reader.row(i + r, tell) : kNoRow;
    recast::Pack<Table, kVec> read[kAtOnce][kChunks];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + k * kWidth;
        read[r][k] = row[r] != kNoRow && c < reader.dim ? reader.read(row[r], c)
                                                        : recast::zeros<kVec, Table>();
      }
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
  return counted;
}

__device__ __forceinline__ float divisor(const Lookup& lookup, int counted) {
  return lookup.mode == kMean && counted > 0 ? static_cast<float>(counted) : 1.0f;
}

__device__ __forceinline__ void pool_sum(const Lookup& lookup, Index bag, const Bag& ids,
                                         Errors* errors) {
  Reader reader(lookup, errors);
  reader.start = ids.start;
  const int count = static_cast<int>(ids.end - ids.start);
  for (int column = 0; column < reader.dim; column += kColumns) {
    float total[kChunks][kVec] = {};
    const int counted = sum_rows(reader, lookup.weights, 0, count, column, total);
    const float by = divisor(lookup, counted);
    if (by != 1.0f)
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] /= by;
    write(lookup, bag, column, total);
  }
}

// Bags of one id at most, the first of which is `bag`; those after the last bag of all are empty.
__device__ __forceinline__ void pool_singles(const Lookup& lookup, Index bag,
                                             const Bag (&ids)[kBags], Errors* errors) {
  const Reader reader(lookup, errors);
  const int lane = threadIdx.x % kLanes;
  unsigned row[kBags];
#pragma unroll
  for (int j = 0; j < kBags; ++j)
    row[j] = ids[j].start < ids[j].end ? reader.row_at(ids[j].start, lane == 0) : kNoRow;
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
      if (bag + j * kGroups >= lookup.bags) break;
      const bool weighted = row[j] != kNoRow && lookup.weights != nullptr;
      const float factor = weighted ? recast::widen(lookup.weights[ids[j].start]) : 1.0f;
      float total[kChunks][kVec] = {};
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] += factor * recast::widen(read[j][k].at[e]);
      write(lookup, bag + j * kGroups, column, total);
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
  const int count = static_cast<int>(ids.end - ids.start);
  const int share = (count + kGroups - 1) / kGroups;
  const int first = group * share < count ? group * share : count;
  const int last = count - first < share ? count : first + share;
  Reader reader(lookup, errors);
  reader.start = ids.start;
  for (int column = 0; column < reader.dim; column += kColumns) {
    float total[kChunks][kVec] = {};
    const int counted = sum_rows(reader, lookup.weights, first, last, column, total);
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

// The last lookup that starts at this block or before: each step asks 32 of them at once, since a
// block lives hardly longer than the reads of a search one by one.
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

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 768 / RECAST_BLOCK)
    embedding_forward(const Lookup* __restrict__ lookups, int n_lookups, Errors* errors) {
  const Lookup& lookup = lookups[lookup_of_block(lookups, n_lookups)];
  const Index first = (blockIdx.x - lookup.first_block) * kOfBlock;
  const int group = threadIdx.x / kLanes;
#if RECAST_MAX
  for (Index bag = first + group; bag < first + kOfBlock && bag < lookup.bags; bag += kGroups)
    pool_max(lookup, bag, errors);
#else
  Bag ids[kBags];
  bool singles = kBags > 1;
#pragma unroll
  for (int j = 0; j < kBags; ++j) {
    const Index bag = first + group + j * kGroups;
    ids[j] = bag < lookup.bags ? bag_of(lookup, bag, errors) : Bag{0, 0};
    singles = singles && ids[j].end - ids[j].start <= 1;
  }
  if (singles) {
    pool_singles(lookup, first + group, ids, errors);
  } else {
#pragma unroll
    for (int j = 0; j < kBags; ++j) {
      const Index bag = first + group + j * kGroups;
      if (bag < lookup.bags && !is_long(ids[j])) pool_sum(lookup, bag, ids[j], errors);
    }
  }
#if RECAST_LONG
  RECAST_SHARED(Bag[kOfBlock], all);
  bool any = false;
#pragma unroll
  for (int j = 0; j < kBags; ++j) {
    if (threadIdx.x % kLanes == 0) all[group + j * kGroups] = ids[j];
    any = any || is_long(ids[j]);
  }
  if (!__syncthreads_or(any)) return;
  for (int b = 0; b < kOfBlock; ++b)
    if (is_long(all[b])) pool_long(lookup, first + b, all[b], errors);
#endif
#endif
}
RECAST_KERNEL(embedding_forward)
