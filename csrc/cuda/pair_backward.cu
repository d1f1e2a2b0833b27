// The gradients of pair_forward.cu: of every vector, the sum over the pairs that it is in of the
// upstream gradient times the pair's other vector, and of the weights. pair_lists first gathers the
// pairs of each vector, so that no atomics are needed and sums are in the order of the pairs.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM      what is summed: 0 nothing, (batch, pairs, D); 1 columns, (batch, pairs);
//                   2 pairs, (batch, D); 3 both, (batch, 1)
//   RECAST_VEC      columns that a thread reads at once; divides D and all strides, and vectors
//                   start at multiples of VEC elements: 1, 2, 4, and 8 for 16-bit vectors
//
// Launch of pair_lists: grid = vectors of both sides, block = 256, no dynamic shared memory. Of
// pair_backward: grid = (as many blocks as are resident at once, ceil(D / columns)), block = 128,
// dynamic shared memory as said at the kernel.
#include "pair_products.cuh"

namespace {

constexpr int kListThreads = 256;

// A pair that a vector is in: its index, and the other vector.
struct alignas(8) Entry {
  int pair, other;
};

}  // namespace

// The entries of all vectors, left ones first, each vector's in the order of the pairs: those of
// vector v are starts[v] to starts[v + 1] of `entries`, which has buffer_size for two a pair.
extern "C" __global__ void __launch_bounds__(kListThreads)
    pair_lists(const Index* __restrict__ li, const Index* __restrict__ lj, int n_pairs, int n_left,
               int n_right, Entry* __restrict__ entries, int* __restrict__ starts) {
  RECAST_SHARED(int[kListThreads / 32], tally);
  Shape shape{};
  shape.n_left = n_left;
  shape.n_right = n_right;
  const Pairs given{li, lj, nullptr, 0, n_pairs};
  const int vector = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  int before = 0;
  for (int p = thread; p < n_pairs; p += kListThreads) {
    const int i = left_of(given, shape, p), j = right_of(given, shape, p);
    if (i >= 0 && j >= 0) before += (i < vector) + (j < vector);
  }
  for (int d = 16; d > 0; d /= 2) before += __shfl_xor_sync(kFull, before, d);
  if (lane == 0) tally[warp] = before;
  __syncthreads();
  int at = 0;
  for (int w = 0; w < kListThreads / 32; ++w) at += tally[w];
  if (thread == 0) starts[vector] = at;
  for (int from = 0; from < n_pairs; from += kListThreads) {
    const int p = from + thread;
    int i = -1, j = -1;
    if (p < n_pairs) {
      i = left_of(given, shape, p);
      j = right_of(given, shape, p);
      if (i < 0 || j < 0) i = j = -1;
    }
    const unsigned first = __ballot_sync(kFull, i == vector);
    const unsigned second = __ballot_sync(kFull, j == vector);
    __syncthreads();  // all threads have read the tallies of the step before
    if (lane == 0) tally[warp] = __popc(first) + __popc(second);
    __syncthreads();
    int all = 0, ahead = 0;
    for (int w = 0; w < kListThreads / 32; ++w) {
      ahead += w < warp ? tally[w] : 0;
      all += tally[w];
    }
    const unsigned lower = (1u << lane) - 1;
    int to = at + ahead + __popc(first & lower) + __popc(second & lower);
    if (i == vector) entries[to++] = {p, j};
    if (j == vector) entries[to] = {p, i};
    at += all;
  }
  if (thread == 0 && vector == n_left + n_right - 1) starts[vector + 1] = at;
}
RECAST_KERNEL(pair_lists)

namespace {

// An upstream gradient: strides in elements of samples, pairs and vectors. The lists in shared
// memory hold offsets already multiplied by these strides, which are then 1.
template <class Step>
struct Gradients {
  const In* at;
  Step stride, pair_step, vector_step;
};

// The samples and columns that a block works on at a time.
struct Tile {
  const In* values;  // (samples, vectors, pitch)
  int first, count;  // samples
  int start, columns;
};

// Writes the gradients of all vectors of a tile. `each`: the upstream gradient of each pair, where
// kPerPair; else `up`, that of each sample.
template <class Step>
__device__ __forceinline__ void vector_gradients(const Tile& tile, const Shape& shape,
                                                 const Pairs& given, const Gradients<Step>& each,
                                                 const In* up, Index up_stride,
                                                 const Entry* entries, const Entry* plain,
                                                 const int* starts, In* into_left, In* into_right) {
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const int slot = static_cast<int>(threadIdx.x) / shape.lanes, vectors = shape.vectors();
  for (SampleItems at(slot, kThreads / shape.lanes, vectors); at.sample < tile.count; at.next()) {
    const Index sample = tile.first + at.sample;
    const int f = at.item, from = starts[f], last = starts[f + 1];
    for (int c = lane * kVec; c < tile.columns; c += shape.lanes * kVec) {
      const In* const values = tile.values + at.sample * vectors * shape.pitch + c;
      const In* const gradients = each.at + at.sample * each.stride + (kSum == none ? c : 0);
      float sum[kVec] = {};
      if (given.weight == nullptr) {
#pragma unroll 4
        for (int k = from; k < last; ++k) {
          const Entry entry = entries[k];
          const auto y = widened(values + entry.other * each.vector_step);
          if constexpr (kSum == none) {
            const auto g = widened(gradients + entry.pair * each.pair_step);
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += g.at[e] * y.at[e];
          } else if constexpr (kSum == columns) {
            const float g = recast::widen(gradients[entry.pair * each.pair_step]);
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += g * y.at[e];
          } else {
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += y.at[e];
          }
        }
      } else {
#pragma unroll 1
        for (int k = from; k < last; ++k) {
          const Entry entry = entries[k];
          const float weight = weight_of(given, sample, plain[k].pair);
          const auto y = widened(values + entry.other * each.vector_step);
          const auto g = kSum == none ? widened(gradients + entry.pair * each.pair_step)
                         : kSum == columns
                             ? filled(recast::widen(gradients[entry.pair * each.pair_step]))
                             : filled(1.0f);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[e] += weight * g.at[e] * y.at[e];
        }
      }
      if constexpr (!kPerPair) {
        const In* const of_sample = up + sample * up_stride;
        const auto g =
            kSum == both ? filled(recast::widen(*of_sample)) : widened(of_sample + tile.start + c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[e] *= g.at[e];
      }
      Pack<In, kVec> result;
#pragma unroll
      for (int e = 0; e < kVec; ++e) recast::narrow(sum[e], result.at[e]);
      In* const to = f < shape.n_left
                         ? into_left + (sample * shape.n_left + f) * shape.dim
                         : into_right + (sample * shape.n_right + f - shape.n_left) * shape.dim;
      recast::store<kVec>(to + tile.start + c, result);
    }
  }
}

// Writes the gradients of the weights of a tile, which must have all columns.
template <class Step>
__device__ __forceinline__ void weight_gradients(const Tile& tile, const Shape& shape,
                                                 const Pairs& given, const In* each, Step stride,
                                                 Step pair_stride, const In* up, Index up_stride,
                                                 In* into) {
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const int slot = static_cast<int>(threadIdx.x) / shape.lanes, vectors = shape.vectors();
  SampleItems at(slot, kThreads / shape.lanes, given.count);
  // All lanes stay in the loop: group_sum is called by whole warps.
  for (int left = tile.count * given.count; left > 0; left -= kThreads / shape.lanes, at.next()) {
    const bool mine = at.sample < tile.count;
    const unsigned start = starts_of(given, shape, at.item);
    const In* const values = tile.values + at.sample * vectors * shape.pitch;
    const In *const x = values + (start & 0xffffu), *const y = values + (start >> 16);
    const In* const gradients = each + at.sample * stride + at.item * pair_stride;
    const In* const of_sample = up + (tile.first + at.sample) * up_stride;
    float sum = 0.0f;
    if (mine && start != kAbsent)
#pragma unroll 1
      for (int c = lane * kVec; c < tile.columns; c += shape.lanes * kVec) {
        const auto a = widened(x + c), b = widened(y + c);
        const auto g = kSum == none         ? widened(gradients + c)
                       : kSum == columns    ? filled(recast::widen(*gradients))
                       : kSum == Sum::pairs ? widened(of_sample + c)
                                            : filled(recast::widen(*of_sample));
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum += g.at[e] * a.at[e] * b.at[e];
      }
    sum = group_sum(sum, shape.lanes);
    if (mine && lane == 0)
      recast::narrow(sum, into[static_cast<Index>(tile.first + at.sample) * given.count + at.item]);
  }
}

}  // namespace

// Shared memory: two buffers of values (samples, vectors, pitch) and, where `in_shared`, of
// gradients of pairs that have their own (samples, pairs, columns), each rounded up to 16 bytes;
// where `in_shared`, entries and starts of pair_lists. grad: as the result of pair_forward, with
// strides of samples and of pairs; into_left: (batch, n_left, dim), into_right: (batch, n_right,
// dim), into_weight: (batch, n_pairs) or null.
extern "C" __global__ void __launch_bounds__(kThreads, kSum == none ? 4 : kBlocks)
    pair_backward(const Row* __restrict__ rows, int n_left, int n_right,
                  const Index* __restrict__ li, const Index* __restrict__ lj,
                  const In* __restrict__ weights, Index weight_stride, int n_pairs, int dim,
                  int batch, int samples, int pitch, int copy_lanes, int lanes, int n_columns,
                  int in_shared, const In* __restrict__ grad, Index grad_stride, Index pair_stride,
                  const Entry* __restrict__ entries, const int* __restrict__ starts,
                  In* __restrict__ into_left, In* __restrict__ into_right,
                  In* __restrict__ into_weight) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const Pairs given{li, lj, weights, weight_stride, n_pairs};
  const Shape shape{n_left, n_right,    dim,   batch,     samples,
                    pitch,  copy_lanes, lanes, n_columns, in_shared};
  const int thread = static_cast<int>(threadIdx.x), vectors = shape.vectors();
  const int wide = kSum == none ? n_columns : 1;
  const int values_size = rounded(samples * vectors * pitch, kPer16);
  const int buffer_size =
      values_size + (kPerPair && in_shared ? rounded(samples * n_pairs * wide, kPer16) : 0);
  Entry* const own_entries = reinterpret_cast<Entry*>(shared + 2 * buffer_size);
  int* const own_starts = reinterpret_cast<int*>(own_entries + 2 * n_pairs);
  if (in_shared) {
    for (int v = thread; v <= vectors; v += kThreads) own_starts[v] = starts[v];
    const int last = starts[vectors];
    for (int k = thread; k < last; k += kThreads)
      own_entries[k] = {entries[k].pair * wide, entries[k].other * pitch};
  }
  const int start = static_cast<int>(blockIdx.y) * n_columns;
  const int there = min(n_columns, dim - start);
  const int tiles = (batch + samples - 1) / samples, step = static_cast<int>(gridDim.x);
  const auto fetch = [&](int first, In* to) {
    const int count = min(samples, batch - first);
    if (kPerPair && in_shared) {
      const In* const from = grad + first * grad_stride + (kSum == none ? start : 0);
      const bool whole = (n_pairs == 1 || pair_stride == wide) && there == n_columns &&
                         (count == 1 || grad_stride == n_pairs * wide) &&
                         reinterpret_cast<UInt64>(from) % 16 == 0;
      if (whole)
        copy_contiguous(from, to + values_size, count * n_pairs * wide);
      else
        copy<kSum == none ? kVec : 1>(
            count, n_pairs, kSum == none ? there : 1, kSum == none ? copy_lanes : 1,
            [=](int sample, int item) { return from + sample * grad_stride + item * pair_stride; },
            [=](int sample, int item) {
              return to + values_size + (sample * n_pairs + item) * wide;
            });
    }
    read(rows, shape, first, count, start, to);
  };
  int tile = static_cast<int>(blockIdx.x), buffer = 0;
  if (tile < tiles) fetch(tile * samples, shared);
  recast::async_commit();
  for (; tile < tiles; tile += step, buffer ^= 1) {
    const int first = tile * samples;
    if (tile + step < tiles) fetch(first + step * samples, shared + (buffer ^ 1) * buffer_size);
    recast::async_commit();
    recast::async_wait<1>();
    __syncthreads();
    const In* const values = shared + buffer * buffer_size;
    const Tile now{values, first, min(samples, batch - first), start, there};
    // Two calls, so that the compiler knows which pointers are to shared memory.
    if (in_shared) {
      const Gradients<int> each{values + values_size, n_pairs * wide, 1, 1};
      vector_gradients(now, shape, given, each, grad, grad_stride, own_entries, entries, own_starts,
                       into_left, into_right);
      if (into_weight != nullptr)
        weight_gradients(now, shape, given, each.at, each.stride, wide, grad, grad_stride,
                         into_weight);
    } else {
      const Gradients<Index> each{grad + first * grad_stride + (kSum == none ? start : 0),
                                  grad_stride, pair_stride, pitch};
      vector_gradients(now, shape, given, each, grad, grad_stride, entries, entries, starts,
                       into_left, into_right);
      if (into_weight != nullptr)
        weight_gradients(now, shape, given, each.at, grad_stride, pair_stride, grad, grad_stride,
                         into_weight);
    }
    __syncthreads();
  }
  recast::async_wait<0>();
}
RECAST_KERNEL(pair_backward)
