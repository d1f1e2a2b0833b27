// Embedding lookups whose results are columns of one matrix, in whole rows: a block takes all
// lookups for 2^bits samples and writes whole rows of the matrix. embedding_forward.cu, which takes
// one lookup after the other, would write short segments of many rows, and so partial lines of
// memory.
//
// The lookups gather, sum or average the same number of ids for every sample, without weights. A
// thread takes vectors of VEC columns: one of four samples where the lookup has one id a sample,
// else one of one sample. A sum adds its rows one by one: results are bitwise reproducible, and
// equal to those of embedding_forward.cu. Columns that are copied from other tensors are written
// beside them (joined_parts.cuh).
//
// Macros:
//   RECAST_TABLE  dtype of tables: 0 fp32, 1 fp16, 2 bf16
//   RECAST_OUT    dtype of the matrix, likewise; sums are fp32
//   RECAST_VEC    columns of a vector, which a thread reads and writes at once: 1, 2, 4, and 8 for
//                 16-bit tables. Divides dim and row_stride of each table and its first column in
//                 the matrix, which starts at a multiple of VEC elements as the tables do; and the
//                 row stride of the matrix
//   RECAST_BLOCK  threads of a block
//
// Launch: grid = ceil(samples / 2^bits), bits from 2 on, block = RECAST_BLOCK, dynamic shared
// memory = n_lookups * 48 + (vectors + ids + ids * 2^bits) * 4 bytes.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::UInt64;
using Table = recast::Dtype<RECAST_TABLE>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

#include "embedding_lookups.cuh"
#include "joined_parts.cuh"

constexpr int kWarps = RECAST_BLOCK / 32;
constexpr int kIdGroups = 2;  // groups of four ids that a thread loads together
constexpr int kUnroll = 4;    // vectors of a bag's rows that it loads together
// Resident blocks of a multiprocessor, as many as registers allow without spills.
constexpr int kResident = (kVec == 8 ? 768 : 1280) / RECAST_BLOCK;

enum { kWide = 1, kAligned = 2 };  // int64 ids; the block's ids start at a multiple of 16 bytes

// A lookup in shared memory, as three structures of 16 bytes that are used at different times.
struct alignas(16) Rows {
  const Table* table;
  unsigned stride;  // bytes
  int first;        // index of its first id among all ids of the block
};
struct alignas(16) Place {
  int column, fixed, mode, ids;  // kWide and kAligned
};
struct alignas(16) Ids {
  const void* from;  // those of this block
  unsigned rows, padding;
};
struct LookupInfo {
  Rows rows;
  Place place;
  Ids ids;
};
using Row = recast::Pack<Table, kVec>;

// What all threads of a block share; the arrays are in shared memory.
struct Block {
  const LookupInfo* infos;
  const unsigned*
      lookup_of_vector;  // lookup << 16 | vector within the row, of each vector of a sample
  const unsigned* rows;  // the row of each id, or kNoRow; by lookup, then by sample
  Out* out;              // of the first sample
  int out_stride;
};

// i / n for 0 <= i < 2^20, with `reciprocal` = 1 / n in fp32. The 0.5 exceeds the rounding error,
// so the quotient is exact.
__device__ __forceinline__ int quotient(int i, float reciprocal) {
  return static_cast<int>((static_cast<float>(i) + 0.5f) * reciprocal);
}

// A vector of a row; zeros for kNoRow. kSure: the row is known to be valid.
template <bool kValid>
__device__ __forceinline__ Row read(const char* vectors, unsigned stride, unsigned row) {
  if (!kValid && row == kNoRow) return recast::zeros<kVec, Table>();
  return recast::load<kVec>(
      reinterpret_cast<const Table*>(vectors + static_cast<UInt64>(row) * stride));
}

// The address of vector `which` of row 0 of its lookup's table.
__device__ __forceinline__ const char* vector_address(const Rows& of, unsigned which) {
  return reinterpret_cast<const char*>(recast::in_global(of.table) + (which & 0xffff) * kVec);
}

__device__ __forceinline__ void write(Out* to, const float (&value)[kVec]) {
  recast::Pack<Out, kVec> pack;
#pragma unroll
  for (int e = 0; e < kVec; ++e) recast::narrow(value[e], pack.at[e]);
  recast::store_whole<kVec>(to, pack);
}

// Ids [place, place + 4) of a lookup, of which `left` exist; 0 for the others.
__device__ __forceinline__ void read_ids(const LookupInfo& of, int place, int left,
                                         Index (&id)[4]) {
  const void* const ids = recast::in_global(of.ids.from);
  const int kind = of.place.ids;
  if (left >= 4 && kind == (kWide | kAligned)) {
    const auto* const from = static_cast<const Index*>(ids) + place;
    const auto first = recast::load<2>(from), second = recast::load<2>(from + 2);
    id[0] = first.at[0], id[1] = first.at[1], id[2] = second.at[0], id[3] = second.at[1];
  } else if (left >= 4 && kind == kAligned) {
    const auto sample_group = recast::load<4>(static_cast<const int*>(ids) + place);
#pragma unroll
    for (int e = 0; e < 4; ++e) id[e] = sample_group.at[e];
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      id[e] = e < left ? recast::integer(ids, kind & kWide, place + e) : 0;
  }
}

// Writes the row of every id of the block to `rows`, four consecutive ids of a lookup at a time.
// Returns whether all ids that this thread saw are valid. Past the last sample it writes row 0,
// which is not used.
__device__ __forceinline__ bool find(const Lookup* lookups, const LookupInfo* infos,
                                     const unsigned* lookup_of_id, unsigned* rows, int ids,
                                     int bits, Index first_sample, int count, Errors* errors) {
  const int id_groups = ids << (bits - 2);
  bool all = true;
#pragma unroll 1
  for (int from = threadIdx.x; from < id_groups; from += kIdGroups * RECAST_BLOCK) {
    Index id[kIdGroups][4];
#pragma unroll
    for (int r = 0; r < kIdGroups; ++r) {
      const int at = 4 * (from + r * RECAST_BLOCK);
      if (at >= 4 * id_groups) continue;
      const LookupInfo& of = infos[lookup_of_id[at >> bits]];
      const int place = at - of.rows.first;
      read_ids(of, place, count * of.place.fixed - place, id[r]);
    }
#pragma unroll
    for (int r = 0; r < kIdGroups; ++r) {
      const int at = 4 * (from + r * RECAST_BLOCK);
      if (at >= 4 * id_groups) continue;
      const unsigned lookup = lookup_of_id[at >> bits];
      const Ids of = infos[lookup].ids;
      recast::Pack<unsigned, 4> found;
      bool bad = false;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned row = static_cast<unsigned>(id[r][e]);
        const bool outside = static_cast<UInt64>(id[r][e]) >= of.rows;
        found.at[e] = outside || row == of.padding ? kNoRow : row;
        all = all && found.at[e] != kNoRow;
        bad = bad || outside;
      }
      recast::store<4>(rows + at, found);
      if (!bad) continue;
      const Index first = first_sample * infos[lookup].place.fixed + at - infos[lookup].rows.first;
#pragma unroll
      for (int e = 0; e < 4; ++e)  // ids past the last one are 0, and not reported
        if (static_cast<UInt64>(id[r][e]) >= of.rows)
          report(&errors->bad_ids, &errors->first_id, lookups[lookup].number, first + e);
    }
  }
  return all;
}

// total += the vectors of `left` rows, at most kUnroll.
template <bool kValid, bool kFull>
__device__ __forceinline__ void add(const char* vectors, unsigned stride, const unsigned* rows,
                                    int left, float (&total)[kVec]) {
  Row found[kUnroll];
#pragma unroll
  for (int r = 0; r < kUnroll; ++r)
    found[r] = read < kValid && kFull > (vectors, stride, kFull || r < left ? rows[r] : kNoRow);
#pragma unroll
  for (int r = 0; r < kUnroll; ++r)
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[e] += recast::widen(found[r].at[e]);
}

// Writes vector `i`, counted through the samples of the block, of the lookups with several ids,
// which have `vectors` of them a sample; `reciprocal` = 1 / vectors.
template <bool kValid>
__device__ __forceinline__ void pool(const Block& block, int i, int vectors, float reciprocal) {
  const int sample = quotient(i, reciprocal);
  const unsigned which = block.lookup_of_vector[i - sample * vectors];
  const Rows of = block.infos[which >> 16].rows;
  const Place place = block.infos[which >> 16].place;
  const char* const from = vector_address(of, which);
  const unsigned* const rows = block.rows + of.first + sample * place.fixed;
  float total[kVec] = {};
  int k = 0;
#pragma unroll 1
  for (; k + kUnroll <= place.fixed; k += kUnroll)
    add<kValid, true>(from, of.stride, rows + k, kUnroll, total);
  if (k < place.fixed) add<kValid, false>(from, of.stride, rows + k, place.fixed - k, total);
  if (place.mode == kMean) {
    int counted = 0;
    for (k = 0; k < place.fixed; ++k) counted += rows[k] != kNoRow;
    const float denominator = counted > 0 ? static_cast<float>(counted) : 1.0f;
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[e] /= denominator;
  }
  const int column = place.column + static_cast<int>(which & 0xffff) * kVec;
  write(block.out + sample * block.out_stride + column, total);
}

// Writes vector `i` of the lookups with one id, for four samples at once. They have `vectors`
// vectors a sample behind the `before` vectors of lookups with several ids; `reciprocal` = 1 /
// vectors.
template <bool kValid>
__device__ __forceinline__ void copy(const Block& block, int i, int before, int vectors,
                                     float reciprocal, int count) {
  const int sample_group = quotient(i, reciprocal), sample = 4 * sample_group;
  const unsigned which = block.lookup_of_vector[before + i - sample_group * vectors];
  const Rows of = block.infos[which >> 16].rows;
  const char* const from = vector_address(of, which);
  const auto rows = recast::load<4>(block.rows + of.first + sample);
  Row found[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) found[r] = read<kValid>(from, of.stride, rows.at[r]);
  const int column =
      block.infos[which >> 16].place.column + static_cast<int>(which & 0xffff) * kVec;
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

// The columns that are copied from other tensors.
struct CopiedColumns {
  const Part* parts;
  int n_parts, columns;
  Out* matrix;
  Index out_stride;
};

__device__ __forceinline__ int parts_of(int all, int each) { return (all + each - 1) / each; }

// Claims the block's next chunk of work for this warp: chunks take different times, so warps take
// the next one as they become free. Only lane 0 holds the result, and the atomic's latency is
// hidden until broadcast() is called.
__device__ __forceinline__ int claim(int* next) {
  int claimed = 0;
  if (threadIdx.x % 32 == 0) claimed = atomicAdd(next, 1);
  return claimed;
}
__device__ __forceinline__ int broadcast(int claimed) { return __shfl_sync(~0u, claimed, 0); }

// Writes all columns of the block, those that take longest first.
template <bool kValid>
__device__ __forceinline__ void write_all(const Block& block, Index first_sample, int count,
                                          int vectors, int pooled, const CopiedColumns& copied,
                                          int* next) {
  const int lane = threadIdx.x % 32;
  int chunk = threadIdx.x / 32, before = 0;
  if (pooled > 0) {
    const int all = pooled * count;
    const float reciprocal = 1.0f / static_cast<float>(pooled);
#pragma unroll 1
    while (chunk * 32 < all) {
      const int i = chunk * 32 + lane, claimed = claim(next);
      if (i < all) pool<kValid>(block, i, pooled, reciprocal);
      chunk = broadcast(claimed);
    }
    before = parts_of(all, 32);
  }
  const int singles = vectors - pooled;
  if (singles > 0) {
    const int all = singles * parts_of(count, 4);
    const float reciprocal = 1.0f / static_cast<float>(singles);
#pragma unroll 1
    while ((chunk - before) * 32 < all) {
      const int i = (chunk - before) * 32 + lane, claimed = claim(next);
      if (i < all) copy<kValid>(block, i, pooled, singles, reciprocal, count);
      chunk = broadcast(claimed);
    }
    before += parts_of(all, 32);
  }
  const int all = copied.columns * count;
#pragma unroll 1
  while ((chunk - before) * 32 < all) {
    const int i = (chunk - before) * 32 + lane, claimed = claim(next);
    if (i < all)
      join(copied.parts, copied.n_parts, first_sample + i / copied.columns, i % copied.columns,
           copied.matrix, copied.out_stride);
    chunk = broadcast(claimed);
  }
}

}  // namespace

// Lookups with several ids a sample come first and have `pooled` of a sample's `vectors` vectors;
// `ids`: ids of a sample, of all lookups. Other tensors give further `columns` columns in n_parts
// parts; 0: none.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    embedding_samples(const Lookup* __restrict__ lookups, int n_lookups, Errors* errors,
                      Index samples, int bits, int vectors, int pooled, int ids,
                      const Part* __restrict__ parts, int n_parts, int columns, Out* matrix,
                      Index out_stride) {
  RECAST_DYNAMIC_SHARED(LookupInfo, infos);
  unsigned* const rows = reinterpret_cast<unsigned*>(infos + n_lookups);
  unsigned* const lookup_of_vector = rows + (ids << bits);
  unsigned* const lookup_of_id = lookup_of_vector + vectors;
  RECAST_SHARED(int, next);
  const Index first_sample = static_cast<Index>(blockIdx.x) << bits;
  const int count =
      static_cast<int>(samples - first_sample < 1 << bits ? samples - first_sample : 1 << bits);

  for (int l = threadIdx.x; l < n_lookups; l += RECAST_BLOCK) {
    const Lookup& of = lookups[l];
    const int fixed = static_cast<int>(of.fixed), wide = (of.flags & kWideIds) != 0;
    const int first_id = static_cast<int>(of.first_block & 0xffffffff);
    const int first_vector = static_cast<int>(of.first_block >> 32);
    const char* const from =
        static_cast<const char*>(of.ids) + first_sample * fixed * (wide ? 8 : 4);
    const bool aligned = (reinterpret_cast<size_t>(from) & 15) == 0;
    infos[l].rows = {of.table, static_cast<unsigned>(of.row_stride * sizeof(Table)),
                     first_id << bits};
    infos[l].place = {static_cast<int>(of.out - matrix), fixed, static_cast<int>(of.mode),
                      (wide ? kWide : 0) | (aligned ? kAligned : 0)};
    infos[l].ids = {from, static_cast<unsigned>(of.rows), static_cast<unsigned>(of.padding)};
    const int own = static_cast<int>(of.dim) / kVec;
#pragma unroll 4
    for (int c = 0; c < own; ++c) lookup_of_vector[first_vector + c] = l << 16 | c;
#pragma unroll 4
    for (int i = 0; i < fixed; ++i) lookup_of_id[first_id + i] = l;
  }
  if (threadIdx.x == 0) next = kWarps;
  __syncthreads();
  const bool all_count =
      find(lookups, infos, lookup_of_id, rows, ids, bits, first_sample, count, errors);
  const Block block{infos, lookup_of_vector, rows, matrix + first_sample * out_stride,
                    static_cast<int>(out_stride)};
  const CopiedColumns copied{parts, n_parts, columns, matrix, out_stride};
  if (__syncthreads_and(all_count))
    write_all<true>(block, first_sample, count, vectors, pooled, copied, &next);
  else
    write_all<false>(block, first_sample, count, vectors, pooled, copied, &next);
}
RECAST_KERNEL(embedding_samples)
