// Sums of vectors under gates, all gates over one set of vectors at once, and
// their gradients (runtime/layers/gated_sums.py has the formulas). A group of
// lanes works on a sample: its weights lie in shared memory, and so do its
// vectors, in backward with the gradients of the sums, where there is room:
// every gate asks for them. A lane reads only columns that it copied itself.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_VEC      columns that a lane reads at once; divides D and all
//   strides, and rows start at
//                   multiples of VEC elements: 1, 4, and 8 for 16-bit vectors
//   RECAST_BLOCK    threads of a block, a multiple of 32
//
// Launch: grid = ceil(batch / (BLOCK / lanes)), block = RECAST_BLOCK, dynamic
// shared memory: for BLOCK / lanes samples, where `kept`, (vectors, D)
// elements, in gated_backward (vectors + gates, D); then columns of all gates
// floats, and as many again in gated_backward. `lanes` share a sample, a power
// of two up to 32: about D / VEC. `softmax`: the weights are that of the gates,
// not the gates.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::Wide;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kVec = RECAST_VEC;
// Threads of a multiprocessor: that many registers are there.
constexpr int kForwardThreads = kVec > 4 ? 768 : 1024, kBackwardThreads = kVec > 4 ? 512 : 768;
constexpr int kTogether = 4;  // gates, or columns of one, that a warp sums over at once
constexpr int kPacks = 2;     // of columns that a lane sums at once

// One vector of all samples: where sample 0's starts, and elements from one
// sample's to the next.
struct Row {
  In* at;
  Index stride;
};

// One gate of all samples: eight fields of 8 bytes, as the host writes them.
struct Gate {
  const In* at;
  Index stride, step;  // elements from one sample to the next, and from one
                       // column to the next
  Index first, count;  // its columns among those of all gates
  In* sum;             // its result (batch, D), in backward the upstream gradient
  Index sum_stride;
  In* into;  // its gradient (batch, count), contiguous, in backward
};

__device__ __forceinline__ In* place_of(const Row& row, Index sample) {
  return row.at + sample * row.stride;
}

// The first address for floats after the end of what lies before them.
__device__ __forceinline__ float* floats(In* from) {
  return reinterpret_cast<float*>((reinterpret_cast<Wide>(from) + 3) / 4 * 4);
}

// The lanes of one sample.
struct Group {
  int lanes, lane;
  unsigned mask;

  // Of each value over all lanes.
  template <int N>
  __device__ __forceinline__ void sum(float (&values)[N]) const {
    for (int d = lanes / 2; d > 0; d /= 2)
#pragma unroll
      for (int n = 0; n < N; ++n) values[n] += __shfl_xor_sync(mask, values[n], d, lanes);
  }
  template <int N>
  __device__ __forceinline__ void most(float (&values)[N]) const {
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

// Copies this lane's columns of a vector to shared memory: there after
// arrived().
__device__ __forceinline__ void copy(const In* from, In* to, int dim, const Group& group) {
  for (int c = group.lane * kVec; c < dim; c += group.lanes * kVec) {
    if constexpr (kVec * sizeof(In) == 16)
      recast::async_copy_16(to + c, from + c);
    else
      recast::store<kVec>(to + c, recast::load<kVec>(from + c));
  }
}
__device__ __forceinline__ void arrived() {
  recast::async_commit();
  recast::async_wait<0>();
}

// Weights of one sample into shared memory, for all lanes of the group: of several gates at once.
__device__ __forceinline__ void weigh(const Gate* gates, int n_gates, bool softmax, int sample,
                                      const Group& group, float* to) {
  const float none = __uint_as_float(0xff800000u);
  for (int t = 0; t < n_gates; t += kTogether) {
    float own[kTogether], most[kTogether], sum[kTogether];
    float* weights[kTogether];
    int count[kTogether];
#pragma unroll
    for (int a = 0; a < kTogether; ++a) {
      own[a] = none;
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
    for (int a = 0; a < kTogether; ++a) {
      most[a] = own[a];
      for (int k = group.lane + group.lanes; k < count[a]; k += group.lanes) {
        const Gate& gate = gates[t + a];
        weights[a][k] = recast::widen(gate.at[sample * gate.stride + k * gate.step]);
        most[a] = fmaxf(most[a], weights[a][k]);
      }
    }
    if (softmax) {
      group.most(most);
#pragma unroll
      for (int a = 0; a < kTogether; ++a) {
        own[a] = sum[a] = group.lane < count[a] ? expf(own[a] - most[a]) : 0.0f;
        for (int k = group.lane + group.lanes; k < count[a]; k += group.lanes) {
          weights[a][k] = expf(weights[a][k] - most[a]);
          sum[a] += weights[a][k];
        }
      }
      group.sum(sum);
#pragma unroll
      for (int a = 0; a < kTogether; ++a) {
        own[a] /= sum[a];
        for (int k = group.lane + group.lanes; k < count[a]; k += group.lanes)
          weights[a][k] /= sum[a];
      }
    }
#pragma unroll
    for (int a = 0; a < kTogether; ++a)
      if (group.lane < count[a]) weights[a][group.lane] = own[a];
  }
  __syncwarp(group.mask);
}

}  // namespace

// chosen: the vector that each column of the gates weighs.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kForwardThreads / RECAST_BLOCK)
    gated_forward(const Row* __restrict__ vectors, int n_vectors, const Gate* __restrict__ gates,
                  int n_gates, const Index* __restrict__ chosen, int columns, int dim, int batch,
                  int lanes, int softmax, int kept) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const int place = static_cast<int>(threadIdx.x) / lanes, samples = RECAST_BLOCK / lanes;
  const int sample = static_cast<int>(blockIdx.x) * samples + place;
  if (sample >= batch) return;
  const Group group = group_of(lanes);
  const int room = kept ? n_vectors * dim : 0;
  In* const own = shared + place * room;
  float* const weights = floats(shared + samples * room) + place * columns;
  if (kept)
    for (int v = 0; v < n_vectors; ++v)
      copy(place_of(vectors[v], sample), own + v * dim, dim, group);
  weigh(gates, n_gates, softmax, sample, group, weights);
  arrived();
  for (int t = 0; t < n_gates; ++t) {
    const int first = static_cast<int>(gates[t].first);
    const int last = first + static_cast<int>(gates[t].count);
    In* const to = gates[t].sum + sample * gates[t].sum_stride;
    const int on = lanes * kVec;
    for (int c = group.lane * kVec; c < dim; c += kPacks * on) {
      float sum[kPacks][kVec] = {};
#pragma unroll 4
      for (int k = first; k < last; ++k) {
        const int v = static_cast<int>(chosen[k]);
        const float weight = weights[k];
#pragma unroll
        for (int j = 0; j < kPacks; ++j) {
          if (c + j * on >= dim) continue;
          const auto vector = kept ? recast::load<kVec>(own + v * dim + c + j * on)
                                   : recast::load<kVec>(place_of(vectors[v], sample) + c + j * on);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[j][e] += weight * recast::widen(vector.at[e]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        if (c + j * on >= dim) continue;
        recast::Pack<In, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(sum[j][e], pack.at[e]);
        recast::store<kVec>(to + c + j * on, pack);
      }
    }
  }
}
RECAST_KERNEL(gated_forward)

// into: the gradient of each vector. The columns that weigh vector v, with
// their gates, are at starts[v] to starts[v + 1] of `readers`: (gate, column)
// each.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kBackwardThreads / RECAST_BLOCK)
    gated_backward(const Row* __restrict__ vectors, int n_vectors, const Gate* __restrict__ gates,
                   int n_gates, const Index* __restrict__ chosen, int columns, int dim, int batch,
                   int lanes, int softmax, int kept, const Row* __restrict__ into,
                   const Index* __restrict__ starts, const Index* __restrict__ readers) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const int place = static_cast<int>(threadIdx.x) / lanes, samples = RECAST_BLOCK / lanes;
  const int sample = static_cast<int>(blockIdx.x) * samples + place;
  if (sample >= batch) return;
  const Group group = group_of(lanes);
  const int room = kept ? (n_vectors + n_gates) * dim : 0;
  In* const own = shared + place * room;
  In* const own_sums = own + n_vectors * dim;
  float* const weights = floats(shared + samples * room) + place * 2 * columns;
  float* const along = weights + columns;  // the gradient of each weight
  if (kept) {
    for (int v = 0; v < n_vectors; ++v)
      copy(place_of(vectors[v], sample), own + v * dim, dim, group);
    for (int t = 0; t < n_gates; ++t)
      copy(gates[t].sum + sample * gates[t].sum_stride, own_sums + t * dim, dim, group);
  }
  weigh(gates, n_gates, softmax, sample, group, weights);
  arrived();
  for (int t = 0; t < n_gates; ++t) {
    const int first = static_cast<int>(gates[t].first);
    const int count = static_cast<int>(gates[t].count);
    const In* const upstream = gates[t].sum + sample * gates[t].sum_stride;
    float all = 0.0f;
    for (int k = first; k < first + count; k += kTogether) {
      float sum[kTogether] = {};
      int v[kTogether];
#pragma unroll
      for (int a = 0; a < kTogether; ++a)
        v[a] = static_cast<int>(chosen[min(k + a, first + count - 1)]);
      for (int c = group.lane * kVec; c < dim; c += lanes * kVec) {
        const auto g =
            kept ? recast::load<kVec>(own_sums + t * dim + c) : recast::load<kVec>(upstream + c);
#pragma unroll
        for (int a = 0; a < kTogether; ++a) {
          const auto vector = kept ? recast::load<kVec>(own + v[a] * dim + c)
                                   : recast::load<kVec>(place_of(vectors[v[a]], sample) + c);
#pragma unroll
          for (int e = 0; e < kVec; ++e)
            sum[a] += recast::widen(g.at[e]) * recast::widen(vector.at[e]);
        }
      }
      group.sum(sum);
#pragma unroll
      for (int a = 0; a < kTogether; ++a) {
        if (k + a >= first + count) continue;
        if (group.lane == 0) along[k + a] = sum[a];
        all += weights[k + a] * sum[a];
      }
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
    const int on = lanes * kVec;
    for (int c = group.lane * kVec; c < dim; c += kPacks * on) {
      float sum[kPacks][kVec] = {};
      for (int r = static_cast<int>(starts[v]); r < last; ++r) {
        const int t = static_cast<int>(readers[2 * r]);
        const float weight = weights[readers[2 * r + 1]];
#pragma unroll
        for (int j = 0; j < kPacks; ++j) {
          const int at = c + j * on;
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
        if (c + j * on >= dim) continue;
        recast::Pack<In, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(sum[j][e], pack.at[e]);
        recast::store<kVec>(to + c + j * on, pack);
      }
    }
  }
}
RECAST_KERNEL(gated_backward)
