// Sums of vectors weighted by gates, any number of gates over one set of vectors, and their
// gradients (runtime/layers/gated_sums.py has the formulas):
//     sum_t[b] = Σ_k weight_t[b, k] vectors[chosen[k]][b]    over the columns k of gate t
// with the gate's values as weights, or their softmax.
//
// A group of `lanes` lanes takes a sample. Its weights are in shared memory, and so are its vectors
// (in backward the upstream gradients too) where they fit, as every gate reads them. A lane reads
// only columns that it copied itself, so copies need no barrier.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_VEC      columns that a lane reads at once; divides D and all strides, and rows start at
//                   multiples of VEC elements: 1, 4, and 8 for 16-bit vectors
//   RECAST_BLOCK    threads of a block, a multiple of 32
//
// Launch: grid = ceil(batch / (BLOCK / lanes)), block = RECAST_BLOCK. Dynamic shared memory for
// BLOCK / lanes samples: if `kept`, (vectors, D) elements, in gated_backward (vectors + gates, D);
// then a float for each column of all gates, in gated_backward two. `lanes` is a power of two up to
// 32, about D / VEC. `softmax`: weights are the softmax of each gate.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::UInt64;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kVec = RECAST_VEC;
// Resident threads of a multiprocessor, as registers allow.
constexpr int kForwardThreads = kVec > 4 ? 768 : 1024, kBackwardThreads = kVec > 4 ? 512 : 768;
constexpr int kBatch = 4;  // gates, or columns of one, that are reduced together
constexpr int kPacks = 2;  // VECs of columns that a lane sums at once

// One vector of all samples: the address in sample 0, and the stride of samples in elements.
struct Row {
  In* at;
  Index stride;
};

// One gate of all samples: eight fields of 8 bytes, as the host writes them.
struct Gate {
  const In* at;
  Index stride, step;  // of samples and of columns, in elements
  Index first, count;  // its columns among those of all gates
  In* sum;             // its result (batch, D), in backward the upstream gradient
  Index sum_stride;
  In* into;  // its gradient (batch, count), contiguous, in backward
};

__device__ __forceinline__ In* vector_of(const Row& row, Index sample) {
  return row.at + sample * row.stride;
}

// Rounds an address up to a multiple of 4 bytes.
__device__ __forceinline__ float* floats(In* from) {
  return reinterpret_cast<float*>((reinterpret_cast<UInt64>(from) + 3) / 4 * 4);
}

// The lanes of one sample.
struct Group {
  int lanes, lane;
  unsigned mask;

  // Each value summed, or its maximum, over all lanes.
  template <int N>
  __device__ __forceinline__ void sum(float (&values)[N]) const {
    for (int d = lanes / 2; d > 0; d /= 2)
#pragma unroll
      for (int n = 0; n < N; ++n) values[n] += __shfl_xor_sync(mask, values[n], d, lanes);
  }
  template <int N>
  __device__ __forceinline__ void max(float (&values)[N]) const {
    for (int d = lanes / 2; d > 0; d /= 2)
#pragma unroll
      for (int n = 0; n < N; ++n)
        values[n] = fmaxf(values[n], __shfl_xor_sync(mask, values[n], d, lanes));
  }
};

__device__ __forceinline__ Group group_of(int lanes) {
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const unsigned mask = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
  return {lanes, lane, mask << (threadIdx.x % 32 / lanes * lanes)};
}

// Copies this lane's columns of a vector to shared memory; complete after wait_copies().
__device__ __forceinline__ void copy(const In* from, In* to, int dim, const Group& group) {
  for (int c = group.lane * kVec; c < dim; c += group.lanes * kVec) {
    if constexpr (kVec * sizeof(In) == 16)
      recast::async_copy_16(to + c, from + c);
    else
      recast::store<kVec>(to + c, recast::load<kVec>(from + c));
  }
}
__device__ __forceinline__ void wait_copies() {
  recast::async_commit();
  recast::async_wait<0>();
}

// Writes the weights of one sample to shared memory, kBatch gates at a time.
__device__ __forceinline__ void load_weights(const Gate* gates, int n_gates, bool softmax,
                                             int sample, const Group& group, float* to) {
  const float minus_infinity = __uint_as_float(0xff800000u);
  for (int t = 0; t < n_gates; t += kBatch) {
    float own[kBatch], max[kBatch], sum[kBatch];
    float* weights[kBatch];
    int count[kBatch];
#pragma unroll
    for (int a = 0; a < kBatch; ++a) {
      own[a] = minus_infinity;
      count[a] = 0;
      weights[a] = to;
      if (t + a >= n_gates) continue;
      const Gate& gate = gates[t + a];
      count[a] = static_cast<int>(gate.count);
      weights[a] = to + gate.first;
      if (group.lane < count[a])
        own[a] = recast::widen(gate.at[sample * gate.stride + group.lane * gate.step]);
    }
    // Most gates have at most one column per lane, kept in a register; others use shared memory.
#pragma unroll
    for (int a = 0; a < kBatch; ++a) {
      max[a] = own[a];
      for (int k = group.lane + group.lanes; k < count[a]; k += group.lanes) {
        const Gate& gate = gates[t + a];
        weights[a][k] = recast::widen(gate.at[sample * gate.stride + k * gate.step]);
        max[a] = fmaxf(max[a], weights[a][k]);
      }
    }
    if (softmax) {
      group.max(max);
#pragma unroll
      for (int a = 0; a < kBatch; ++a) {
        own[a] = sum[a] = group.lane < count[a] ? expf(own[a] - max[a]) : 0.0f;
        for (int k = group.lane + group.lanes; k < count[a]; k += group.lanes) {
          weights[a][k] = expf(weights[a][k] - max[a]);
          sum[a] += weights[a][k];
        }
      }
      group.sum(sum);
#pragma unroll
      for (int a = 0; a < kBatch; ++a) {
        own[a] /= sum[a];
        for (int k = group.lane + group.lanes; k < count[a]; k += group.lanes)
          weights[a][k] /= sum[a];
      }
    }
#pragma unroll
    for (int a = 0; a < kBatch; ++a)
      if (group.lane < count[a]) weights[a][group.lane] = own[a];
  }
  __syncwarp(group.mask);
}

}  // namespace

// chosen: the vector that each column of the gates multiplies.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kForwardThreads / RECAST_BLOCK)
    gated_forward(const Row* __restrict__ vectors, int n_vectors, const Gate* __restrict__ gates,
                  int n_gates, const Index* __restrict__ chosen, int columns, int dim, int batch,
                  int lanes, int softmax, int kept) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const int group_index = static_cast<int>(threadIdx.x) / lanes, samples = RECAST_BLOCK / lanes;
  const int sample = static_cast<int>(blockIdx.x) * samples + group_index;
  if (sample >= batch) return;
  const Group group = group_of(lanes);
  const int sample_elements = kept ? n_vectors * dim : 0;
  In* const own = shared + group_index * sample_elements;
  float* const weights = floats(shared + samples * sample_elements) + group_index * columns;
  if (kept)
    for (int v = 0; v < n_vectors; ++v)
      copy(vector_of(vectors[v], sample), own + v * dim, dim, group);
  load_weights(gates, n_gates, softmax, sample, group, weights);
  wait_copies();
  for (int t = 0; t < n_gates; ++t) {
    const int first = static_cast<int>(gates[t].first);
    const int last = first + static_cast<int>(gates[t].count);
    In* const to = gates[t].sum + sample * gates[t].sum_stride;
    const int step = lanes * kVec;
    for (int c = group.lane * kVec; c < dim; c += kPacks * step) {
      float sum[kPacks][kVec] = {};
#pragma unroll 4
      for (int k = first; k < last; ++k) {
        const int v = static_cast<int>(chosen[k]);
        const float weight = weights[k];
#pragma unroll
        for (int j = 0; j < kPacks; ++j) {
          if (c + j * step >= dim) continue;
          const auto vector =
              kept ? recast::load<kVec>(own + v * dim + c + j * step)
                   : recast::load<kVec>(vector_of(vectors[v], sample) + c + j * step);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[j][e] += weight * recast::widen(vector.at[e]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        if (c + j * step >= dim) continue;
        recast::Pack<In, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(sum[j][e], pack.at[e]);
        recast::store<kVec>(to + c + j * step, pack);
      }
    }
  }
}
RECAST_KERNEL(gated_forward)

// into: the gradient of each vector. readers[starts[v]] to readers[starts[v + 1]] are the (gate,
// column) pairs that multiply vector v.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kBackwardThreads / RECAST_BLOCK)
    gated_backward(const Row* __restrict__ vectors, int n_vectors, const Gate* __restrict__ gates,
                   int n_gates, const Index* __restrict__ chosen, int columns, int dim, int batch,
                   int lanes, int softmax, int kept, const Row* __restrict__ into,
                   const Index* __restrict__ starts, const Index* __restrict__ readers) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const int group_index = static_cast<int>(threadIdx.x) / lanes, samples = RECAST_BLOCK / lanes;
  const int sample = static_cast<int>(blockIdx.x) * samples + group_index;
  if (sample >= batch) return;
  const Group group = group_of(lanes);
  const int sample_elements = kept ? (n_vectors + n_gates) * dim : 0;
  In* const own = shared + group_index * sample_elements;
  In* const own_sums = own + n_vectors * dim;
  float* const weights = floats(shared + samples * sample_elements) + group_index * 2 * columns;
  float* const weight_grads = weights + columns;  // gradient of each weight
  if (kept) {
    for (int v = 0; v < n_vectors; ++v)
      copy(vector_of(vectors[v], sample), own + v * dim, dim, group);
    for (int t = 0; t < n_gates; ++t)
      copy(gates[t].sum + sample * gates[t].sum_stride, own_sums + t * dim, dim, group);
  }
  load_weights(gates, n_gates, softmax, sample, group, weights);
  wait_copies();
  for (int t = 0; t < n_gates; ++t) {
    const int first = static_cast<int>(gates[t].first);
    const int count = static_cast<int>(gates[t].count);
    const In* const upstream = gates[t].sum + sample * gates[t].sum_stride;
    float all = 0.0f;
    for (int k = first; k < first + count; k += kBatch) {
      float sum[kBatch] = {};
      int v[kBatch];
#pragma unroll
      for (int a = 0; a < kBatch; ++a)
        v[a] = static_cast<int>(chosen[min(k + a, first + count - 1)]);
      for (int c = group.lane * kVec; c < dim; c += lanes * kVec) {
        const auto g =
            kept ? recast::load<kVec>(own_sums + t * dim + c) : recast::load<kVec>(upstream + c);
#pragma unroll
        for (int a = 0; a < kBatch; ++a) {
          const auto vector = kept ? recast::load<kVec>(own + v[a] * dim + c)
                                   : recast::load<kVec>(vector_of(vectors[v[a]], sample) + c);
#pragma unroll
          for (int e = 0; e < kVec; ++e)
            sum[a] += recast::widen(g.at[e]) * recast::widen(vector.at[e]);
        }
      }
      group.sum(sum);
#pragma unroll
      for (int a = 0; a < kBatch; ++a) {
        if (k + a >= first + count) continue;
        if (group.lane == 0) weight_grads[k + a] = sum[a];
        all += weights[k + a] * sum[a];
      }
    }
    __syncwarp(group.mask);
    In* const to = gates[t].into + static_cast<Index>(sample) * count;
    for (int k = group.lane; k < count; k += lanes) {
      const float plain = weight_grads[first + k];
      recast::narrow(softmax ? weights[first + k] * (plain - all) : plain, to[k]);
    }
  }
  for (int v = 0; v < n_vectors; ++v) {
    const int last = static_cast<int>(starts[v + 1]);
    In* const to = into[v].at + sample * into[v].stride;
    const int step = lanes * kVec;
    for (int c = group.lane * kVec; c < dim; c += kPacks * step) {
      float sum[kPacks][kVec] = {};
      for (int r = static_cast<int>(starts[v]); r < last; ++r) {
        const int t = static_cast<int>(readers[2 * r]);
        const float weight = weights[readers[2 * r + 1]];
#pragma unroll
        for (int j = 0; j < kPacks; ++j) {
          const int at = c + j * step;
          if (at >= dim) continue;
          const auto g = kept
                             ? recast::load<kVec>(own_sums + t * dim + at)
                             : recast::load<kVec>(gates[t].sum + sample * gates[t].sum_stride + at);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[j][e] += weight * recast::widen(g.at[e]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        if (c + j * step >= dim) continue;
        recast::Pack<In, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(sum[j][e], pack.at[e]);
        recast::store<kVec>(to + c + j * step, pack);
      }
    }
  }
}
RECAST_KERNEL(gated_backward)
