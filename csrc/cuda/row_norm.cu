// The norm of every table's summed gradient, without writing it out. Reads the runs that
// row_sort.cu leaves; nothing is read back by the host.
//
// A row's gradient g counts as torch would hold it, rounded to the table's dtype. Order 2 sums g^2,
// order 1 |g|, and infinity takes the largest |g|; what is not finite stays so in each. The host
// takes the root.
//
// Macros:
//   RECAST_ORDER       0 for infinity, 1 or 2
//   RECAST_GRAD        dtype of gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_TABLE       dtype of tables and per-sample weights, likewise
//   RECAST_VEC, RECAST_LANES, RECAST_CHUNKS, RECAST_BLOCK, RECAST_WIDE_KEY  as for row_update.cu
//
// Launch, in this order, no dynamic shared memory; the first two as row_update and row_combine, for
// each class:
//   row_norm           a number for every run of whole rows; zero for parts of rows
//   row_norm_combine   the numbers of rows of several parts
//   table_norms        grid: (shares, tables); block: RECAST_BLOCK; of all classes at once
// `norms` has room for a number a run, at most `entries`; `tile_runs` for one a tile.
#include "row_sums.cuh"

namespace {

using recast::Index;
using recast::kChunks;
using recast::kColumns;
using recast::kLanes;
using recast::kVec;
using recast::kWidth;
using recast::Piece;
using recast::Room;
using recast::Rows;
using recast::Sorted;
using recast::Sums;
using recast::Table;

__device__ __forceinline__ float join(float a, float b) {
#if RECAST_ORDER == 0
  return a != a || a > b ? a : b;  // NaN stays
#else
  return a + b;
#endif
}

// Of one row, in every lane of the group.
template <class Sum>
__device__ __forceinline__ float norm_of(const Sorted& sorted, int table, const Sum& sum) {
  const int dim = static_cast<int>(sorted.tables[table].dim);
  float norm = 0.0f;
  Sums g;
  for (int column = 0; column < dim; column += kColumns) {
    sum(column, dim, g, [] {});
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (column + static_cast<int>(threadIdx.x) % kLanes * kVec + k * kWidth >= dim) break;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        Table held;
        recast::narrow(g[k][e], held);
        const float value = recast::widen(held);
        norm = join(norm, RECAST_ORDER == 2 ? value * value : fabsf(value));
      }
    }
  }
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2)
    norm = join(norm, __shfl_xor_sync(recast::group_mask(), norm, d, kLanes));
  return norm;
}

// Of a row nothing counts but its gradient.
struct NoTarget {
  struct Target {};
  __device__ __forceinline__ Target target(int, Key) const { return {}; }
};

struct NormOfRun : NoTarget {
  const Sorted& sorted;
  float* norms;
  template <class Sum>
  __device__ __forceinline__ void operator()(unsigned run, int table, Target,
                                             const Sum& sum) const {
    const float norm = norm_of(sorted, table, sum);
    if (threadIdx.x % kLanes == 0) norms[run] = norm;
  }
};

struct NoteRun {
  float* norms;
  unsigned* tile_runs;
  __device__ __forceinline__ void operator()(unsigned run, unsigned tile, bool begins) const {
    if (threadIdx.x % kLanes != 0) return;
    if (begins) tile_runs[tile] = run;
    norms[run] = 0.0f;
  }
};

struct NormOfParts : NoTarget {
  const Sorted& sorted;
  float* norms;
  const unsigned* tile_runs;
  template <class Sum>
  __device__ __forceinline__ void operator()(unsigned tile, int table, Target,
                                             const Sum& sum) const {
    const float norm = norm_of(sorted, table, sum);
    if (threadIdx.x % kLanes == 0) norms[tile_runs[tile]] = norm;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, recast::kResident)
    row_norm(const Piece* __restrict__ pieces, int bag_bits, const Rows* __restrict__ tables,
             int n_tables, const Key* __restrict__ keys, const unsigned* __restrict__ values,
             const unsigned* __restrict__ starts, const unsigned* __restrict__ from,
             const unsigned* __restrict__ past, int entries, int longest, float* partials,
             int partial_stride, float* norms, unsigned* tile_runs) {
  const Sorted sorted = {pieces, bag_bits, tables, n_tables, keys, values, entries, longest};
  RECAST_SHARED(recast::Found<NoTarget::Target>[RECAST_BLOCK], room);
  recast::each_run(sorted, starts, from, past, partials, partial_stride, room,
                   NormOfRun{{}, sorted, norms}, NoteRun{norms, tile_runs});
}
RECAST_KERNEL(row_norm)

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    row_norm_combine(const Rows* __restrict__ tables, int n_tables, const Key* __restrict__ keys,
                     int entries, int longest, float* partials, int partial_stride, float* norms,
                     const unsigned* tile_runs) {
  RECAST_SHARED(Room, room);
  const Sorted sorted = {nullptr, 0, tables, n_tables, keys, nullptr, entries, longest};
  recast::each_row_of_parts(sorted, partials, partial_stride, room,
                            NormOfParts{{}, sorted, norms, tile_runs});
}
RECAST_KERNEL(row_norm_combine)

// shares[table][s] = that of the s-th share of the table's runs. Which runs those are, and in what
// order they are joined, depends on their number and the size of the grid alone.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    table_norms(const float* norms, const unsigned* table_runs, float* shares) {
  RECAST_SHARED(float[RECAST_BLOCK], joined);
  const Index from = table_runs[blockIdx.y], past = table_runs[blockIdx.y + 1];
  const Index share = (past - from + gridDim.x - 1) / gridDim.x;
  const Index first = from + blockIdx.x * share, last = first + share < past ? first + share : past;
  float norm = 0.0f;
  for (Index run = first + threadIdx.x; run < last; run += RECAST_BLOCK)
    norm = join(norm, norms[run]);
  joined[threadIdx.x] = norm;
  __syncthreads();
  for (int half = RECAST_BLOCK / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half)
      joined[threadIdx.x] = join(joined[threadIdx.x], joined[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) shares[blockIdx.y * gridDim.x + blockIdx.x] = joined[0];
}
RECAST_KERNEL(table_norms)
