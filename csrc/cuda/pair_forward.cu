// Products of pairs of feature vectors, as they are or summed, for pairs p = (i, j) with weight w:
//     RECAST_SUM 0   out[b, p, c] = w[b, p] left[i][b, c] right[j][b, c]
//     RECAST_SUM 1   out[b, p]    = its sum over c        RECAST_SUM 2   out[b, c] = its sum over p
//     RECAST_SUM 3   out[b]       = its sum over both
// Consecutive threads write consecutive results. pair_rows is a faster kernel for unweighted
// products that are not summed.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM      what is summed: 0 nothing, (batch, pairs, D); 1 columns, (batch, pairs);
//                   2 pairs, (batch, D); 3 both, (batch, 1)
//   RECAST_VEC      columns that a thread reads at once; divides D and all strides, and vectors
//                   start at multiples of VEC elements: 1, 2, 4, and 8 for 16-bit vectors
//
// Launch of pair_forward: grid = as many blocks as are resident at once, block = 128, dynamic
// shared memory as said at the kernel. pair_rows says its own.
#include "pair_products.cuh"

namespace {

// Results of each pair of a tile, in the order of memory, each by `lanes` threads.
__device__ __forceinline__ void each_pair(const In* values, const unsigned* starts,
                                          const Pairs& given, const Shape& shape, int first,
                                          int count, In* out) {
  const int lanes = shape.lanes, slots = kThreads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int wide = kSum == none ? shape.dim : 1, each = shape.vectors() * shape.pitch;
  In* const own = out + static_cast<Index>(first) * given.count * wide;
  const int before = alignment_shift(own, wide, lanes * (kSum == none ? kVec : 1), slots);
  int item = static_cast<int>(threadIdx.x) / lanes - before;
  bool skips = item < 0;
  SampleItems at(skips ? item + slots : item, slots, given.count);
  if constexpr (kSum == none) {
    // The most frequent case: a thread has the same columns of all its pairs.
    if (shape.in_shared && given.weight == nullptr && wide == lanes * kVec) {
      const In* const columns_at = values + lane * kVec;
      In* to = own + static_cast<Index>(item) * wide + lane * kVec;
      for (; skips || at.sample < count; to += slots * wide, skips = false) {
        if (skips) continue;
        const unsigned start = starts[at.item];
        const In* const of_sample = columns_at + at.sample * each;
        at.next();
        Pack<float, kVec> a = filled(0.0f), b = a;
        if (start != kAbsent) {
          a = widened(of_sample + (start & 0xffffu));
          b = widened(of_sample + (start >> 16));
        }
        Pack<In, kVec> result;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(a.at[e] * b.at[e], result.at[e]);
        recast::store<kVec>(to, result);
      }
      return;
    }
  }
  // All lanes stay in the loop: group_sum is called by whole warps.
  for (int left = count * given.count + before; left > 0; left -= slots, item += slots) {
    const bool mine = !skips && at.sample < count;
    const unsigned start = !mine             ? kAbsent
                           : shape.in_shared ? starts[at.item]
                                             : starts_of(given, shape, at.item);
    const bool there = start != kAbsent;
    const In* const of_sample = values + (mine ? at.sample * each : 0);
    const In* const x = of_sample + (there ? start & 0xffffu : 0u);
    const In* const y = of_sample + (there ? start >> 16 : 0u);
    const float weight = mine ? weight_of(given, first + at.sample, at.item) : 0.0f;
    if (!skips) at.next();
    skips = false;
    if constexpr (kSum == none) {
      if (!mine) continue;
      In* const to = own + static_cast<Index>(item) * wide;
#pragma unroll 1
      for (int c = lane * kVec; c < wide; c += lanes * kVec) {
        const auto a = widened(x + c), b = widened(y + c);
        Pack<In, kVec> result;
#pragma unroll
        for (int e = 0; e < kVec; ++e)
          recast::narrow(there ? weight * a.at[e] * b.at[e] : 0.0f, result.at[e]);
        recast::store<kVec>(to + c, result);
      }
    } else {
      float sum = 0.0f;
      if (lanes == 1) {
        sum = product(x, y, shape.dim);
      } else {
#pragma unroll 1
        for (int c = lane * kVec; c < shape.dim; c += lanes * kVec) {
          const auto a = widened(x + c), b = widened(y + c);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum += a.at[e] * b.at[e];
        }
        sum = group_sum(sum, lanes);
      }
      if (mine && lane == 0) recast::narrow(there ? weight * sum : 0.0f, own[item]);
    }
  }
}

// Sums over the pairs, and RECAST_SUM 3 over the columns too: a warp takes a sample.
__device__ __forceinline__ void sum_pairs(const In* values, const unsigned* starts,
                                          const Pairs& given, const Shape& shape, int first,
                                          int count, In* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32, lanes = shape.lanes;
  const int column = lane % lanes * kVec, slices = 32 / lanes, dim = shape.dim;
  for (int s = static_cast<int>(threadIdx.x) / 32; s < count; s += kThreads / 32) {
    const In* const own = values + s * shape.vectors() * shape.pitch;
    const Index sample = first + s;
    float all = 0.0f;
    for (int from = 0; from < dim; from += lanes * kVec) {
      const int c = from + column;
      float sum[kVec] = {};
      if (c < dim)
#pragma unroll 4
        for (int p = lane / lanes; p < given.count; p += slices) {
          const unsigned start = shape.in_shared ? starts[p] : starts_of(given, shape, p);
          if (start == kAbsent) continue;
          const auto a = widened(own + (start & 0xffffu) + c), b = widened(own + (start >> 16) + c);
          const float weight = weight_of(given, sample, p);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[e] += weight * a.at[e] * b.at[e];
        }
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        for (int d = lanes; d < 32; d *= 2) sum[e] += __shfl_xor_sync(kFull, sum[e], d);
        all += sum[e];
      }
      if constexpr (kSum == Sum::pairs) {
        Pack<In, kVec> result;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(sum[e], result.at[e]);
        if (lane < lanes && c < dim) recast::store<kVec>(out + sample * dim + c, result);
      }
    }
    if constexpr (kSum == both) {
      all = group_sum(all, lanes);
      if (lane == 0) recast::narrow(all, out[sample]);
    }
  }
}

}  // namespace

// Shared memory: two buffers of values (samples, vectors, pitch), each rounded up to 16 bytes, and
// the offsets of all pairs where they are `in_shared`.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    pair_forward(const Row* __restrict__ rows, int n_left, int n_right,
                 const Index* __restrict__ li, const Index* __restrict__ lj,
                 const In* __restrict__ weights, Index weight_stride, int n_pairs, int dim,
                 int batch, int samples, int pitch, int copy_lanes, int lanes, int n_columns,
                 int in_shared, In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const Pairs given{li, lj, weights, weight_stride, n_pairs};
  const Shape shape{n_left, n_right,    dim,   batch,     samples,
                    pitch,  copy_lanes, lanes, n_columns, in_shared};
  const int buffer_size = rounded(samples * shape.vectors() * pitch, kPer16);
  unsigned* const starts = reinterpret_cast<unsigned*>(shared + 2 * buffer_size);
  if (in_shared)
    for (int p = static_cast<int>(threadIdx.x); p < n_pairs; p += kThreads)
      starts[p] = starts_of(given, shape, p);
  const int tiles = (batch + samples - 1) / samples, step = static_cast<int>(gridDim.x);
  int tile = static_cast<int>(blockIdx.x), buffer = 0;
  if (tile < tiles)
    read(rows, shape, tile * samples, min(samples, batch - tile * samples), 0, shared);
  recast::async_commit();
  for (; tile < tiles; tile += step, buffer ^= 1) {
    const int first = tile * samples, next = first + step * samples;
    if (tile + step < tiles)
      read(rows, shape, next, min(samples, batch - next), 0, shared + (buffer ^ 1) * buffer_size);
    recast::async_commit();
    recast::async_wait<1>();
    __syncthreads();
    const In* const values = shared + buffer * buffer_size;
    const int count = min(samples, batch - first);
    if constexpr (kPerPair)
      each_pair(values, starts, given, shape, first, count, out);
    else
      sum_pairs(values, starts, given, shape, first, count, out);
    __syncthreads();
  }
  recast::async_wait<0>();
}
RECAST_KERNEL(pair_forward)

#if RECAST_SUM == 0
namespace {

// The addresses of a pair's vectors of one sample; null if one is out of range.
struct alignas(16) Factors {
  const In* left;
  const In* right;
};

constexpr int kRounds = 16;              // vectors that a group of lanes writes
constexpr int kHeld = kVec > 4 ? 2 : 4;  // loads of a thread in flight, of either side

// kHeld products, of factors `slots` apart, to rows `apart` elements apart. `all`: all of them
// exist; else those before `count` do.
template <bool all>
__device__ __forceinline__ void write_rows(const Factors* factors, int slots, int column, int count,
                                           In* to, int apart) {
  Pack<In, kVec> left[kHeld], right[kHeld];
#pragma unroll
  for (int a = 0; a < kHeld; ++a) {
    left[a] = right[a] = recast::zeros<kVec, In>();
    if (!all && a * slots >= count) continue;
    const Factors of = factors[a * slots];
    if (of.left == nullptr) continue;
    left[a] = recast::load<kVec>(recast::in_global(of.left) + column);
    right[a] = recast::load<kVec>(recast::in_global(of.right) + column);
  }
#pragma unroll
  for (int a = 0; a < kHeld; ++a) {
    if (!all && a * slots >= count) continue;
    Pack<In, kVec> result;
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      recast::narrow(recast::widen(left[a].at[e]) * recast::widen(right[a].at[e]), result.at[e]);
    recast::store_whole<kVec>(to + a * apart, result);
  }
}

}  // namespace

// Products that are neither summed nor weighted, with D = lanes * VEC and `lanes` a power of two.
// The writes are nearly all of the time: each block writes one short contiguous range, in the order
// of the blocks, so that the resident blocks write neighbouring memory. Vectors come from the L1
// cache. Launch: grid = ceil(batch * n_pairs / items) with items = 128 / lanes * 16, block = 128,
// dynamic shared memory: 16 bytes an item.
extern "C" __global__ void __launch_bounds__(kThreads, kVec > 4 ? 6 : 8)
    pair_rows(const Row* __restrict__ rows, int n_left, int n_right, const Index* __restrict__ li,
              const Index* __restrict__ lj, int n_pairs, int dim, int batch, int lanes,
              In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(Factors, factors);
  Shape shape{};
  shape.n_left = n_left;
  shape.n_right = n_right;
  const Pairs given{li, lj, nullptr, 0, n_pairs};
  const int thread = static_cast<int>(threadIdx.x), slots = kThreads / lanes;
  const Index first = static_cast<Index>(blockIdx.x) * (slots * kRounds), start = first / n_pairs;
  const int before = static_cast<int>(first - start * n_pairs);
  const Index left_over = static_cast<Index>(batch) * n_pairs - first;
  const int count = static_cast<int>(min(left_over, static_cast<Index>(slots * kRounds)));
#pragma unroll 1
  for (int k = thread; k < count; k += kThreads) {
    const int past = (before + k) / n_pairs, p = before + k - past * n_pairs;
    const int i = left_of(given, shape, p), j = right_of(given, shape, p);
    Factors found{nullptr, nullptr};
    if (i >= 0 && j >= 0)
      found = {rows[i].at + (start + past) * rows[i].stride,
               rows[j].at + (start + past) * rows[j].stride};
    factors[k] = found;
  }
  __syncthreads();
  const int slot = thread / lanes, column = thread % lanes * kVec, apart = slots * dim;
  In* const to = out + (first + slot) * dim + column;
  if (count == slots * kRounds) {  // a full block needs no bounds checks
#pragma unroll 1
    for (int r = 0; r < kRounds; r += kHeld)
      write_rows<true>(factors + slot + r * slots, slots, column, 0, to + r * apart, apart);
  } else {
#pragma unroll 1
    for (int k = slot; k < count; k += kHeld * slots)
      write_rows<false>(factors + k, slots, column, count - k, to + (k - slot) / slots * apart,
                        apart);
  }
}
RECAST_KERNEL(pair_rows)
#endif
