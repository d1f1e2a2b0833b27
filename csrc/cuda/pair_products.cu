// Products of pairs of feature vectors, as they are or summed
// (runtime/interactions/pair_products.py has the formulas). The vectors of a sample are read once,
// into shared memory; a lane works on columns of its own throughout, so lanes never wait for each
// other.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM      what is summed: 0 nothing, (batch, pairs, D); 1 columns, (batch, pairs);
//                   2 pairs, (batch, D); 3 both, (batch, 1)
//
// Launch: grid = ceil(batch / samples), block = lanes * samples, at most 128; lanes is a power of
// two up to 32, about D; dynamic shared memory: samples * D * (vectors of both sides) floats, and
// as many again in pair_backward.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kMostThreads = 128;
enum Sum { none, columns, pairs, both };
constexpr Sum kSum = static_cast<Sum>(RECAST_SUM);

// One vector of all samples: where sample 0's starts, and elements from one sample's to the next.
struct Row {
  const In* at;
  Index stride;
};

// The pairs: places in the vectors of each side, counted from the end where negative, and their
// weights, (batch, count) with any row stride, or null.
struct Pairs {
  const Index* left;
  const Index* right;
  const In* weight;
  Index weight_stride;
};

[[maybe_unused]] __device__ __forceinline__ float group_sum(float value, int lanes) {
  const unsigned group = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
  const unsigned mask = group << (threadIdx.x % 32 / lanes * lanes);
  for (int d = lanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(mask, value, d, lanes);
  return value;
}

// The vectors of one sample in shared memory, and the columns of this thread.
struct Sample {
  int at, lane, lanes, dim;
  int n_left, n_right;  // no vectors on the right: those of the left
  float* values;        // (n_left + n_right, dim)

  __device__ __forceinline__ void read(const Row* rows) const {
    for (int f = 0; f < n_left + n_right; ++f)
      for (int c = lane; c < dim; c += lanes)
        values[f * dim + c] = recast::widen(rows[f].at[at * rows[f].stride + c]);
  }

  // Where in `values` a vector starts; -1 for one that is not there, whose pairs are left out.
  __device__ __forceinline__ int left(Index place) const { return start(place, n_left, 0); }
  __device__ __forceinline__ int right(Index place) const {
    return n_right == 0 ? start(place, n_left, 0) : start(place, n_right, n_left);
  }

 private:
  __device__ __forceinline__ int start(Index place, int count, int first) const {
    if (place < 0) place += count;
    return place < 0 || place >= count ? -1 : (first + static_cast<int>(place)) * dim;
  }
};

__device__ __forceinline__ Sample sample_of(int dim, int n_left, int n_right, float* shared,
                                            int copies, int lanes) {
  const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  const int floats = copies * (n_left + n_right) * dim;
  return {static_cast<int>(blockIdx.x) * groups + group,
          static_cast<int>(threadIdx.x) % lanes,
          lanes,
          dim,
          n_left,
          n_right,
          shared + group * floats};
}

__device__ __forceinline__ float weight_of(const Pairs& pairs, int sample, int p) {
  return pairs.weight == nullptr ? 1.0f
                                 : recast::widen(pairs.weight[sample * pairs.weight_stride + p]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMostThreads)
    pair_forward(const Row* __restrict__ rows, int n_left, int n_right,
                 const Index* __restrict__ li, const Index* __restrict__ lj,
                 const In* __restrict__ weights, Index weight_stride, int n_pairs, int dim,
                 int batch, int lanes, In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(float, shared);
  const Pairs pairs{li, lj, weights, weight_stride};
  const Sample sample = sample_of(dim, n_left, n_right, shared, 1, lanes);
  if (sample.at >= batch) return;
  sample.read(rows);
  const float* const values = sample.values;
  [[maybe_unused]] float all = 0.0f;
  if constexpr (kSum == none || kSum == columns) {
    for (int p = 0; p < n_pairs; ++p) {
      const int i = sample.left(pairs.left[p]), j = sample.right(pairs.right[p]);
      const bool there = i >= 0 && j >= 0;
      const float weight = weight_of(pairs, sample.at, p);
      [[maybe_unused]] float sum = 0.0f;
      for (int c = sample.lane; c < dim; c += sample.lanes) {
        const float product = there ? weight * values[i + c] * values[j + c] : 0.0f;
        if constexpr (kSum == none)
          recast::narrow(product, out[(static_cast<Index>(sample.at) * n_pairs + p) * dim + c]);
        else
          sum += product;
      }
      if constexpr (kSum == columns) {
        sum = group_sum(sum, lanes);
        if (sample.lane == 0) recast::narrow(sum, out[static_cast<Index>(sample.at) * n_pairs + p]);
      }
    }
  } else {
    for (int c = sample.lane; c < dim; c += sample.lanes) {
      float sum = 0.0f;
      for (int p = 0; p < n_pairs; ++p) {
        const int i = sample.left(pairs.left[p]), j = sample.right(pairs.right[p]);
        if (i >= 0 && j >= 0) sum += weight_of(pairs, sample.at, p) * values[i + c] * values[j + c];
      }
      if constexpr (kSum == Sum::pairs)
        recast::narrow(sum, out[static_cast<Index>(sample.at) * dim + c]);
      else
        all += sum;
    }
    if constexpr (kSum == both) {
      all = group_sum(all, lanes);
      if (sample.lane == 0) recast::narrow(all, out[sample.at]);
    }
  }
}
RECAST_KERNEL(pair_forward)

// grad: as the result of pair_forward, with strides of samples and of pairs; into_left: (batch,
// n_left, dim), into_right: (batch, n_right, dim), into_weight: (batch, n_pairs) or null.
extern "C" __global__ void __launch_bounds__(kMostThreads)
    pair_backward(const Row* __restrict__ rows, int n_left, int n_right,
                  const Index* __restrict__ li, const Index* __restrict__ lj,
                  const In* __restrict__ weights, Index weight_stride, int n_pairs, int dim,
                  int batch, int lanes, const In* __restrict__ grad, Index grad_stride,
                  Index pair_stride, In* __restrict__ into_left, In* __restrict__ into_right,
                  In* __restrict__ into_weight) {
  RECAST_DYNAMIC_SHARED(float, shared);
  const Pairs pairs{li, lj, weights, weight_stride};
  const Sample sample = sample_of(dim, n_left, n_right, shared, 2, lanes);
  if (sample.at >= batch) return;
  sample.read(rows);
  const float* const values = sample.values;
  const int vectors = n_left + n_right;
  float* const into = sample.values + vectors * dim;
  for (int f = 0; f < vectors; ++f)
    for (int c = sample.lane; c < dim; c += sample.lanes) into[f * dim + c] = 0.0f;
  const In* const upstream = grad + sample.at * grad_stride;
  for (int p = 0; p < n_pairs; ++p) {
    const int i = sample.left(pairs.left[p]), j = sample.right(pairs.right[p]);
    const bool there = i >= 0 && j >= 0;
    const float weight = weight_of(pairs, sample.at, p);
    float of_weight = 0.0f;
    if (there)
#pragma unroll 1  // a lane has few columns, and more would not fit into registers
      for (int c = sample.lane; c < dim; c += sample.lanes) {
        const Index at = kSum == none         ? p * pair_stride + c
                         : kSum == columns    ? p * pair_stride
                         : kSum == Sum::pairs ? c
                                              : 0;
        const float g = recast::widen(upstream[at]);
        const float x = values[i + c], y = values[j + c];
        into[i + c] += weight * g * y;
        into[j + c] += weight * g * x;
        of_weight += g * x * y;
      }
    if (into_weight != nullptr) {
      of_weight = group_sum(of_weight, lanes);
      if (sample.lane == 0)
        recast::narrow(of_weight, into_weight[static_cast<Index>(sample.at) * n_pairs + p]);
    }
  }
  for (int f = 0; f < vectors; ++f)
    for (int c = sample.lane; c < dim; c += sample.lanes) {
      In* const to =
          f < n_left ? into_left + (static_cast<Index>(sample.at) * n_left + f) * dim
                     : into_right + (static_cast<Index>(sample.at) * n_right + f - n_left) * dim;
      recast::narrow(into[f * dim + c], to[c]);
    }
}
RECAST_KERNEL(pair_backward)
