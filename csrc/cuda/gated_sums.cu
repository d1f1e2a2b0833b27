// Sums of vectors under gates, all gates over one set of vectors at once, and their gradients
// (runtime/layers/gated_sums.py has the formulas). A group of lanes works on a sample: its weights
// lie in shared memory, its vectors are read where they are, and again from the nearest cache by
// every gate that weighs them.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_VEC      columns that a lane reads at once; divides D and all strides, and rows start at
//                   multiples of VEC elements: 1, 4, and 8 for 16-bit vectors
//   RECAST_BLOCK    threads of a block, a multiple of 32
//
// Launch: grid = ceil(batch / (BLOCK / lanes)), block = RECAST_BLOCK, dynamic shared memory:
// BLOCK / lanes * columns of all gates floats, and as many again in gated_backward. `lanes` share a
// sample, a power of two up to 32: about D / VEC. `softmax`: the weights are that of the gates, not
// the gates.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kVec = RECAST_VEC;

// One vector of all samples: where sample 0's starts, and elements from one sample's to the next.
struct Row {
  In* at;
  Index stride;
};

// One gate of all samples: eight fields of 8 bytes, as the host writes them.
struct Gate {
  const In* at;
  Index stride, step;  // elements from one sample to the next, and from one column to the next
  Index first, count;  // its columns among those of all gates
  In* sum;             // its result (batch, D), in backward the upstream gradient
  Index sum_stride;
  In* into;  // its gradient (batch, count), contiguous, in backward
};

// The lanes of one sample.
struct Group {
  int lanes, lane;
  unsigned mask;

  __device__ __forceinline__ float sum(float value) const {
    for (int d = lanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(mask, value, d, lanes);
    return value;
  }
  __device__ __forceinline__ float most(float value) const {
    for (int d = lanes / 2; d > 0; d /= 2)
      value = fmaxf(value, __shfl_xor_sync(mask, value, d, lanes));
    return value;
  }
};

__device__ __forceinline__ Group group_of(int lanes) {
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const unsigned mask = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
  return {lanes, lane, mask << (threadIdx.x % 32 / lanes * lanes)};
}

// Weights of one sample into shared memory, for all lanes of the group.
__device__ __forceinline__ void weigh(const Gate* gates, int n_gates, bool softmax, int sample,
                                      const Group& group, float* to) {
  for (int t = 0; t < n_gates; ++t) {
    const In* const from = gates[t].at + sample * gates[t].stride;
    const int count = static_cast<int>(gates[t].count);
    float* const weights = to + gates[t].first;
    float most = __uint_as_float(0xff800000u), sum = 0.0f;
    for (int k = group.lane; k < count; k += group.lanes) {
      weights[k] = recast::widen(from[k * gates[t].step]);
      most = fmaxf(most, weights[k]);
    }
    if (!softmax) continue;
    most = group.most(most);
    for (int k = group.lane; k < count; k += group.lanes) {
      weights[k] = expf(weights[k] - most);
      sum += weights[k];
    }
    sum = group.sum(sum);
    for (int k = group.lane; k < count; k += group.lanes) weights[k] /= sum;
  }
  __syncwarp(group.mask);
}

}  // namespace

// chosen: the vector that each column of the gates weighs.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    gated_forward(const Row* __restrict__ vectors, const Gate* __restrict__ gates, int n_gates,
                  const Index* __restrict__ chosen, int columns, int dim, int batch, int lanes,
                  int softmax) {
  RECAST_DYNAMIC_SHARED(float, shared);
  const int place = static_cast<int>(threadIdx.x) / lanes;
  const int sample = static_cast<int>(blockIdx.x) * (RECAST_BLOCK / lanes) + place;
  if (sample >= batch) return;
  const Group group = group_of(lanes);
  float* const weights = shared + place * columns;
  weigh(gates, n_gates, softmax, sample, group, weights);
  for (int t = 0; t < n_gates; ++t) {
    const int first = static_cast<int>(gates[t].first);
    const int last = first + static_cast<int>(gates[t].count);
    In* const to = gates[t].sum + sample * gates[t].sum_stride;
    for (int c = group.lane * kVec; c < dim; c += lanes * kVec) {
      float sum[kVec] = {};
#pragma unroll 4
      for (int k = first; k < last; ++k) {
        const Row row = vectors[chosen[k]];
        const auto vector = recast::load<kVec>(row.at + sample * row.stride + c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[e] += weights[k] * recast::widen(vector.at[e]);
      }
      recast::Pack<In, kVec> pack;
#pragma unroll
      for (int e = 0; e < kVec; ++e) recast::narrow(sum[e], pack.at[e]);
      recast::store<kVec>(to + c, pack);
    }
  }
}
RECAST_KERNEL(gated_forward)

// into: the gradient of each vector. The columns that weigh vector v, with their gates, are at
// starts[v] to starts[v + 1] of `readers`: (gate, column) each.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    gated_backward(const Row* __restrict__ vectors, const Gate* __restrict__ gates, int n_gates,
                   const Index* __restrict__ chosen, int columns, int dim, int batch, int lanes,
                   int softmax, const Row* __restrict__ into, int n_vectors,
                   const Index* __restrict__ starts, const Index* __restrict__ readers) {
  RECAST_DYNAMIC_SHARED(float, shared);
  const int place = static_cast<int>(threadIdx.x) / lanes;
  const int sample = static_cast<int>(blockIdx.x) * (RECAST_BLOCK / lanes) + place;
  if (sample >= batch) return;
  const Group group = group_of(lanes);
  float* const weights = shared + place * 2 * columns;
  float* const along = weights + columns;  // the gradient of each weight
  weigh(gates, n_gates, softmax, sample, group, weights);
  for (int t = 0; t < n_gates; ++t) {
    const int first = static_cast<int>(gates[t].first);
    const int count = static_cast<int>(gates[t].count);
    const In* const upstream = gates[t].sum + sample * gates[t].sum_stride;
    float all = 0.0f;
    for (int k = first; k < first + count; ++k) {
      const Row row = vectors[chosen[k]];
      float sum = 0.0f;
      for (int c = group.lane * kVec; c < dim; c += lanes * kVec) {
        const auto vector = recast::load<kVec>(row.at + sample * row.stride + c);
        const auto g = recast::load<kVec>(upstream + c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum += recast::widen(g.at[e]) * recast::widen(vector.at[e]);
      }
      sum = group.sum(sum);
      if (group.lane == 0) along[k] = sum;
      all += weights[k] * sum;
    }
    __syncwarp(group.mask);
    In* const to = gates[t].into + static_cast<Index>(sample) * count;
    for (int k = group.lane; k < count; k += lanes) {
      const float plain = along[first + k];
      recast::narrow(softmax ? weights[first + k] * (plain - all) : plain, to[k]);
    }
  }
  for (int v = 0; v < n_vectors; ++v) {
    const int last = static_cast<int>(starts[v + 1]);
    In* const to = into[v].at + sample * into[v].stride;
    for (int c = group.lane * kVec; c < dim; c += lanes * kVec) {
      float sum[kVec] = {};
      for (int r = static_cast<int>(starts[v]); r < last; ++r) {
        const Gate gate = gates[readers[2 * r]];
        const float weight = weights[readers[2 * r + 1]];
        const auto g = recast::load<kVec>(gate.sum + sample * gate.sum_stride + c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[e] += weight * recast::widen(g.at[e]);
      }
      recast::Pack<In, kVec> pack;
#pragma unroll
      for (int e = 0; e < kVec; ++e) recast::narrow(sum[e], pack.at[e]);
      recast::store<kVec>(to + c, pack);
    }
  }
}
RECAST_KERNEL(gated_backward)
