// The norm of the summed gradient of every table, without writing that gradient out; used for
// gradient clipping. Reads the sorted entries of row_sort.cu; the host reads nothing back.
//
// A row's gradient g counts as torch would hold it, rounded to the table's dtype. Order 2 sums g^2,
// order 1 |g|, and order infinity takes the largest |g|; NaN and infinity propagate in each. The
// host takes the root.
//
// Macros:
//   RECAST_ORDER       0 for infinity, 1 or 2
//   RECAST_GRAD        dtype of gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_TABLE       dtype of tables and per-sample weights, likewise
//   RECAST_VEC, RECAST_LANES, RECAST_CHUNKS, RECAST_TILE, RECAST_BLOCK, RECAST_WIDE_KEY  as for
//                      row_update.cu
//
// Launch, in this order, no dynamic shared memory; the first two as row_update and row_combine, for
// each class:
//   row_norm           the norm of every row whose entries are all in one tile
//   row_norm_combine   the norms of the other rows
//   table_norms        grid: (tables, shares); block: RECAST_BLOCK; of all classes at once
// `norms` has one number an entry, zeroed by the host; a row's norm is stored at one of its
// entries.
#include "row_parts.cuh"

namespace {

using recast::Index;
using recast::kChunks;
using recast::kLanes;
using recast::kVec;
using recast::kWidth;
using recast::PartsShared;
using recast::Piece;
using recast::Rows;
using recast::Sorted;
using recast::Sums;
using recast::Table;

// Resident blocks of a multiprocessor, as registers allow.
constexpr int kResident = (recast::kGradientRegisters <= 8 ? 512 : 256) / RECAST_BLOCK;

__device__ __forceinline__ float join(float a, float b) {
#if RECAST_ORDER == 0
  return a != a || a > b ? a : b;  // NaN propagates
#else
  return a + b;
#endif
}

// The `Row` of row_sums.cuh that computes the norm of the gradient.
struct NormOfRow {
  struct Held {};
  static constexpr int kHeld = 0, kPasses = 1;
  const Sorted& sorted;
  float* norms;
  int dim = 0;
  Key past = 0;

  __device__ __forceinline__ NormOfRow(const Sorted& of, float* to) : sorted(of), norms(to) {}

  __device__ __forceinline__ void enter(int number, int) {
    const Rows& table = sorted.tables[number];
    dim = static_cast<int>(table.dim);
    past = static_cast<Key>(table.first_key + table.rows);
  }

  __device__ __forceinline__ void done(Key, unsigned entry, int column, int, float*, Held&,
                                       const Sums& sum) const {
    if (column >= dim) return;
    float norm = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (column + static_cast<int>(threadIdx.x) % kLanes * kVec + k * kWidth >= dim) break;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        Table held;
        recast::narrow(sum[k][e], held);
        const float value = recast::widen(held);
        norm = join(norm, RECAST_ORDER == 2 ? value * value : fabsf(value));
      }
    }
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2)
      norm = join(norm, __shfl_xor_sync(recast::group_mask<kLanes>(), norm, d, kLanes));
    if (threadIdx.x % kLanes != 0) return;
    norms[entry] = column == 0 ? norm : join(norms[entry], norm);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    row_norm(const Piece* __restrict__ pieces, int bag_bits, const Rows* __restrict__ tables,
             int n_tables, const Key* __restrict__ keys, const unsigned* __restrict__ values,
             const unsigned* __restrict__ from, const unsigned* __restrict__ past, int entries,
             int widest, float* partials, int partial_stride, float* norms) {
  RECAST_SHARED(recast::Shared<NormOfRow>, shared);
  const Sorted sorted = {
      pieces, bag_bits, tables, n_tables, keys, values, static_cast<unsigned>(entries),
      *from,  *past};
  NormOfRow row(sorted, norms);
  recast::each_tile(sorted, row, widest, shared, partials, partial_stride);
}
RECAST_KERNEL(row_norm)

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, recast::kCombineBlocks)
    row_norm_combine(const Rows* __restrict__ tables, int n_tables, const Key* __restrict__ keys,
                     const unsigned* __restrict__ from, const unsigned* __restrict__ past,
                     int entries, float* partials, int partial_stride, float* norms) {
  RECAST_SHARED(PartsShared, shared);
  const Sorted sorted = {
      nullptr, 0, tables, n_tables, keys, nullptr, static_cast<unsigned>(entries), *from, *past};
  NormOfRow row(sorted, norms);
  recast::each_row_of_parts(sorted, row, partials, partial_stride, shared);
}
RECAST_KERNEL(row_norm_combine)

// shares[table][s] = the norm of the s-th of gridDim.y equal shares of the table's entries. The
// order of the reduction depends on the number of entries and the grid only.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    table_norms(const float* norms, const unsigned* table_starts, float* shares) {
  RECAST_SHARED(float[RECAST_BLOCK], joined);
  const Index from = table_starts[blockIdx.x], past = table_starts[blockIdx.x + 1];
  const Index share = (past - from + gridDim.y - 1) / gridDim.y;
  const Index first = from + blockIdx.y * share, last = first + share < past ? first + share : past;
  float norm = 0.0f;
  for (Index at = first + threadIdx.x; at < last; at += RECAST_BLOCK) norm = join(norm, norms[at]);
  joined[threadIdx.x] = norm;
  __syncthreads();
  for (int half = RECAST_BLOCK / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half)
      joined[threadIdx.x] = join(joined[threadIdx.x], joined[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) shares[static_cast<Index>(blockIdx.x) * gridDim.y + blockIdx.y] = joined[0];
}
RECAST_KERNEL(table_norms)
