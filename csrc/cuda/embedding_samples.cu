// Embedding lookups whose results lie side by side in a matrix: a block takes all of them for a few
// samples, so that it writes whole rows. embedding_forward.cu, which takes one lookup after the
// other, would write a few bytes of many rows at a time.
//
// These lookups gather, sum or average the same number of ids for every sample, without weights.
//
// Macros:
//   RECAST_TABLE  dtype of tables: 0 fp32, 1 fp16, 2 bf16
//   RECAST_OUT    dtype of the matrix, likewise; sums are fp32
//   RECAST_VEC    columns of a piece, which a thread reads and writes at once: 1, 2, 4, and 8 for
//                 16-bit tables. Divides dim and row_stride of each table and its first column in
//                 the matrix, which starts at a multiple of VEC elements as the tables do; and the
//                 row stride of the matrix
//   RECAST_BLOCK  threads of a block
//
// Launch: grid = ceil(samples / 2^bits), bits from 2 on, block = RECAST_BLOCK, dynamic shared
// memory = n_lookups * 48 + (pieces + ids + ids * 2^bits) * 4 bytes.
//
// A sum is that of its bag's rows one by one: results repeat bit by bit, and are those of
// embedding_forward.cu.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::Wide;
using Table = recast::Dtype<RECAST_TABLE>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

#include "embedding_lookups.cuh"
#include "joined_parts.cuh"

constexpr int kWarps = RECAST_BLOCK / 32;
constexpr int kFours = 2;   // that a thread asks for at once of the ids, four by four
constexpr int kAtOnce = 4;  // likewise, pieces of the rows of a bag
// Blocks that run at once, as many as registers allow without spills.
constexpr int kResident = (kVec == 8 ? 768 : 1280) / RECAST_BLOCK;

enum { kWide = 1, kAligned = 2 };  // ids of 64 bits, whose block of them starts at whole 16 bytes

// What is needed of a lookup, in parts of 16 bytes as they are needed.
struct alignas(16) Rows {
  const Table* table;
  unsigned stride;  // bytes
  int first;        // of its ids among all of the block
};
struct alignas(16) Place {
  int column, fixed, mode, ids;  // kWide and kAligned
};
struct alignas(16) Ids {
  const void* from;  // those of this block
  unsigned rows, padding;
};
struct Held {
  Rows rows;
  Place place;
  Ids ids;
};
using Row = recast::Pack<Table, kVec>;

// What all threads of a block need, in shared memory.
struct Block {
  const Held* held;
  const unsigned* of_piece;  // lookup << 16 | piece of its row
  const unsigned* rows;      // of all ids, or kNoRow: of each lookup sample by sample
  Out* out;                  // of the first sample
  int out_stride;
};

// i / by for 0 <= i < 2^20, where `part` is 1 / by: what is rounded is less than what is added.
__device__ __forceinline__ int quotient(int i, float part) {
  return static_cast<int>((static_cast<float>(i) + 0.5f) * part);
}

// Piece of a row. kSure: it counts.
template <bool kSure>
__device__ __forceinline__ Row read(const char* pieces, unsigned stride, unsigned row) {
  if (!kSure && row == kNoRow) return recast::zeros<kVec, Table>();
  return recast::load<kVec>(
      reinterpret_cast<const Table*>(pieces + static_cast<Wide>(row) * stride));
}

// Where the pieces of a lookup begin that `which` tells of.
__device__ __forceinline__ const char* pieces_of(const Rows& of, unsigned which) {
  return reinterpret_cast<const char*>(recast::in_global(of.table) + (which & 0xffff) * kVec);
}

__device__ __forceinline__ void write(Out* to, const float (&value)[kVec]) {
  recast::Pack<Out, kVec> pack;
#pragma unroll
  for (int e = 0; e < kVec; ++e) recast::narrow(value[e], pack.at[e]);
  recast::store_whole<kVec>(to, pack);
}

// Ids [place, place + 4) of a lookup, of which there are `left`.
__device__ __forceinline__ void read_ids(const Held& of, int place, int left, Index (&id)[4]) {
  const void* const ids = recast::in_global(of.ids.from);
  const int kind = of.place.ids;
  if (left >= 4 && kind == (kWide | kAligned)) {
    const auto* const from = static_cast<const Index*>(ids) + place;
    const auto first = recast::load<2>(from), second = recast::load<2>(from + 2);
    id[0] = first.at[0], id[1] = first.at[1], id[2] = second.at[0], id[3] = second.at[1];
  } else if (left >= 4 && kind == kAligned) {
    const auto four = recast::load<4>(static_cast<const int*>(ids) + place);
#pragma unroll
    for (int e = 0; e < 4; ++e) id[e] = four.at[e];
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      id[e] = e < left ? recast::integer(ids, kind & kWide, place + e) : 0;
  }
}

// Finds the rows of all ids of the block, four neighbours of a lookup at a time; returns whether
// all ids that this thread saw count. Past the last sample it writes rows that are valid but not
// used.
__device__ __forceinline__ bool find(const Lookup* lookups, const Held* held, const unsigned* of_id,
                                     unsigned* rows, int ids, int bits, Index top, int count,
                                     Errors* errors) {
  const int fours = ids << (bits - 2);
  bool all = true;
#pragma unroll 1
  for (int from = threadIdx.x; from < fours; from += kFours * RECAST_BLOCK) {
    Index id[kFours][4];
#pragma unroll
    for (int r = 0; r < kFours; ++r) {
      const int at = 4 * (from + r * RECAST_BLOCK);
      if (at >= 4 * fours) continue;
      const Held& of = held[of_id[at >> bits]];
      const int place = at - of.rows.first;
      read_ids(of, place, count * of.place.fixed - place, id[r]);
    }
#pragma unroll
    for (int r = 0; r < kFours; ++r) {
      const int at = 4 * (from + r * RECAST_BLOCK);
      if (at >= 4 * fours) continue;
      const unsigned lookup = of_id[at >> bits];
      const Ids of = held[lookup].ids;
      recast::Pack<unsigned, 4> found;
      bool bad = false;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned row = static_cast<unsigned>(id[r][e]);
        const bool outside = static_cast<Wide>(id[r][e]) >= of.rows;
        found.at[e] = outside || row == of.padding ? kNoRow : row;
        all = all && found.at[e] != kNoRow;
        bad = bad || outside;
      }
      recast::store<4>(rows + at, found);
      if (!bad) continue;
      const Index first = top * held[lookup].place.fixed + at - held[lookup].rows.first;
#pragma unroll
      for (int e = 0; e < 4; ++e)  // past the last id there are zeros
        if (static_cast<Wide>(id[r][e]) >= of.rows)
          report(&errors->bad_ids, &errors->first_id, lookups[lookup].number, first + e);
    }
  }
  return all;
}

// total += pieces of `left` rows, and no more than kAtOnce.
template <bool kSure, bool kAll>
__device__ __forceinline__ void add(const char* pieces, unsigned stride, const unsigned* rows,
                                    int left, float (&total)[kVec]) {
  Row found[kAtOnce];
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r)
    found[r] = read < kSure && kAll > (pieces, stride, kAll || r < left ? rows[r] : kNoRow);
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[e] += recast::widen(found[r].at[e]);
}

// Piece `i` of those of several ids, `pieces` a sample, whose inverse is `part`.
template <bool kSure>
__device__ __forceinline__ void pool(const Block& block, int i, int pieces, float part) {
  const int sample = quotient(i, part);
  const unsigned which = block.of_piece[i - sample * pieces];
  const Rows of = block.held[which >> 16].rows;
  const Place place = block.held[which >> 16].place;
  const char* const from = pieces_of(of, which);
  const unsigned* const rows = block.rows + of.first + sample * place.fixed;
  float total[kVec] = {};
  int k = 0;
#pragma unroll 1
  for (; k + kAtOnce <= place.fixed; k += kAtOnce)
    add<kSure, true>(from, of.stride, rows + k, kAtOnce, total);
  if (k < place.fixed) add<kSure, false>(from, of.stride, rows + k, place.fixed - k, total);
  if (place.mode == kMean) {
    int counted = 0;
    for (k = 0; k < place.fixed; ++k) counted += rows[k] != kNoRow;
    const float by = counted > 0 ? static_cast<float>(counted) : 1.0f;
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[e] /= by;
  }
  const int column = place.column + static_cast<int>(which & 0xffff) * kVec;
  write(block.out + sample * block.out_stride + column, total);
}

// Piece `i` of those of one id, for four samples: `pieces` of four, whose inverse is `part`, behind
// the `before` of several ids.
template <bool kSure>
__device__ __forceinline__ void copy(const Block& block, int i, int before, int pieces, float part,
                                     int count) {
  const int four = quotient(i, part), sample = 4 * four;
  const unsigned which = block.of_piece[before + i - four * pieces];
  const Rows of = block.held[which >> 16].rows;
  const char* const from = pieces_of(of, which);
  const auto rows = recast::load<4>(block.rows + of.first + sample);
  Row found[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) found[r] = read<kSure>(from, of.stride, rows.at[r]);
  const int column = block.held[which >> 16].place.column + static_cast<int>(which & 0xffff) * kVec;
  Out* to = block.out + sample * block.out_stride + column;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (sample + r >= count) break;
    float value[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) value[e] = recast::widen(found[r].at[e]);
    write(to, value);
    to += block.out_stride;
  }
}

// The other tensors of the matrix.
struct Others {
  const Part* parts;
  int n_parts, columns;
  Out* matrix;
  Index out_stride;
};

__device__ __forceinline__ int parts_of(int all, int each) { return (all + each - 1) / each; }

// The next part of the block's work; warps take parts as they become free.
__device__ __forceinline__ int take(int* next) {
  int taken = 0;
  if (threadIdx.x % 32 == 0) taken = atomicAdd(next, 1);
  return taken;  // in its first lane: it is not waited for
}
__device__ __forceinline__ int of_warp(int taken) { return __shfl_sync(~0u, taken, 0); }

// All columns of the block, the longest first.
template <bool kSure>
__device__ __forceinline__ void write_all(const Block& block, Index top, int count, int pieces,
                                          int pooled, const Others& others, int* next) {
  const int lane = threadIdx.x % 32;
  int chunk = threadIdx.x / 32, before = 0;
  if (pooled > 0) {
    const int all = pooled * count;
    const float part = 1.0f / static_cast<float>(pooled);
#pragma unroll 1
    while (chunk * 32 < all) {
      const int i = chunk * 32 + lane, taken = take(next);
      if (i < all) pool<kSure>(block, i, pooled, part);
      chunk = of_warp(taken);
    }
    before = parts_of(all, 32);
  }
  const int singles = pieces - pooled;
  if (singles > 0) {
    const int all = singles * parts_of(count, 4);
    const float part = 1.0f / static_cast<float>(singles);
#pragma unroll 1
    while ((chunk - before) * 32 < all) {
      const int i = (chunk - before) * 32 + lane, taken = take(next);
      if (i < all) copy<kSure>(block, i, pooled, singles, part, count);
      chunk = of_warp(taken);
    }
    before += parts_of(all, 32);
  }
  const int all = others.columns * count;
#pragma unroll 1
  while ((chunk - before) * 32 < all) {
    const int i = (chunk - before) * 32 + lane, taken = take(next);
    if (i < all)
      join(others.parts, others.n_parts, top + i / others.columns, i % others.columns,
           others.matrix, others.out_stride);
    chunk = of_warp(taken);
  }
}

}  // namespace

// Lookups of several ids a sample come first: they have `pooled` of the `pieces` of a sample, and
// its `ids` are those of all lookups. The other tensors of the matrix, n_parts of them with
// `columns` columns, are written beside them, where these are not 0.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    embedding_samples(const Lookup* __restrict__ lookups, int n_lookups, Errors* errors,
                      Index samples, int bits, int pieces, int pooled, int ids,
                      const Part* __restrict__ parts, int n_parts, int columns, Out* matrix,
                      Index out_stride) {
  RECAST_DYNAMIC_SHARED(Held, held);
  unsigned* const rows = reinterpret_cast<unsigned*>(held + n_lookups);
  unsigned* const of_piece = rows + (ids << bits);
  unsigned* const of_id = of_piece + pieces;
  RECAST_SHARED(int, next);
  const Index top = static_cast<Index>(blockIdx.x) << bits;
  const int count = static_cast<int>(samples - top < 1 << bits ? samples - top : 1 << bits);

  for (int l = threadIdx.x; l < n_lookups; l += RECAST_BLOCK) {
    const Lookup& of = lookups[l];
    const int fixed = static_cast<int>(of.fixed), wide = (of.flags & kWideIds) != 0;
    const int first_id = static_cast<int>(of.first_block & 0xffffffff);
    const int first_piece = static_cast<int>(of.first_block >> 32);
    const char* const from = static_cast<const char*>(of.ids) + top * fixed * (wide ? 8 : 4);
    const bool aligned = (reinterpret_cast<size_t>(from) & 15) == 0;
    held[l].rows = {of.table, static_cast<unsigned>(of.row_stride * sizeof(Table)),
                    first_id << bits};
    held[l].place = {static_cast<int>(of.out - matrix), fixed, static_cast<int>(of.mode),
                     (wide ? kWide : 0) | (aligned ? kAligned : 0)};
    held[l].ids = {from, static_cast<unsigned>(of.rows), static_cast<unsigned>(of.padding)};
    const int own = static_cast<int>(of.dim) / kVec;
#pragma unroll 4
    for (int c = 0; c < own; ++c) of_piece[first_piece + c] = l << 16 | c;
#pragma unroll 4
    for (int i = 0; i < fixed; ++i) of_id[first_id + i] = l;
  }
  if (threadIdx.x == 0) next = kWarps;
  __syncthreads();
  const bool all_count = find(lookups, held, of_id, rows, ids, bits, top, count, errors);
  const Block block{held, of_piece, rows, matrix + top * out_stride, static_cast<int>(out_stride)};
  const Others others{parts, n_parts, columns, matrix, out_stride};
  if (__syncthreads_and(all_count))
    write_all<true>(block, top, count, pieces, pooled, others, &next);
  else
    write_all<false>(block, top, count, pieces, pooled, others, &next);
}
RECAST_KERNEL(embedding_samples)
