// Factorisation machine: the sum over all pairs of feature vectors of their products, column by
// column or in all, and its gradient. Every feature is read once.
//
// Macros:
//   RECAST_IN      dtype of features and their gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_OUT     dtype of the result and its gradient, likewise; sums are fp32
//   RECAST_VEC     columns that a lane reads at once; divides D and all strides, and rows start at
//                  multiples of VEC elements: 1, 2, 4, and 8 for 16-bit features
//   RECAST_LANES   lanes that share a sample, a power of two up to 32: about D / VEC
//   RECAST_SPLITS  groups of so many lanes that share a sample in fm_backward, a power of two with
//                  LANES * SPLITS up to 32: no more than there are features
//   RECAST_HELD    features that a thread of fm_backward keeps in registers; it reads what is more
//                  than SPLITS * HELD twice
//   RECAST_REDUCE  1: the result is summed over D, (batch, 1); 0: (batch, D)
//   RECAST_BLOCK   threads of a block, a multiple of 32
//
// Launch: grid = ceil(batch / (BLOCK / LANES)), in fm_backward / (LANES * SPLITS); block =
// RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;

// One feature vector of all samples: where sample 0's starts, and elements from one sample's to the
// next.
struct Row {
  In* at;
  Index stride;
};

__device__ __forceinline__ recast::Pack<In, kVec> read(const Row& row, Index sample, int column) {
  return recast::load<kVec>(row.at + sample * row.stride + column);
}

// The gradient of one feature vector, if it needs one.
__device__ __forceinline__ void write(const Row& into, Index sample, int column,
                                      const float (&upstream)[kVec], const float (&sum)[kVec],
                                      const recast::Pack<In, kVec>& vector) {
  if (into.at == nullptr) return;
  recast::Pack<In, kVec> pack;
#pragma unroll
  for (int e = 0; e < kVec; ++e)
    recast::narrow(upstream[e] * (sum[e] - recast::widen(vector.at[e])), pack.at[e]);
  recast::store<kVec>(into.at + sample * into.stride + column, pack);
}

#if RECAST_REDUCE

// Sum over the lanes of this thread's group.
__device__ __forceinline__ float group_sum(float value) {
  const unsigned lanes = kLanes == 32 ? 0xffffffffu : (1u << (kLanes % 32)) - 1;
  const unsigned mask = lanes << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(mask, value, d, kLanes);
  return value;
}

#endif

}  // namespace

// out[c] = factor * Σ_{f<g} rows[f][c] * rows[g][c], or its sum over c; any row stride.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    fm_forward(const Row* __restrict__ rows, int n_rows, int dim, float factor, int batch, Out* out,
               Index out_stride) {
  const int sample = blockIdx.x * kGroups + threadIdx.x / kLanes;
  if (sample >= batch) return;
  [[maybe_unused]] float all = 0.0f;
  for (int c = threadIdx.x % kLanes * kVec; c < dim; c += kLanes * kVec) {
    float before[kVec] = {}, pairs[kVec] = {};
#pragma unroll 4
    for (int f = 0; f < n_rows; ++f) {
      const auto vector = read(rows[f], sample, c);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float x = recast::widen(vector.at[e]);
        pairs[e] += x * before[e];
        before[e] += x;
      }
    }
#if RECAST_REDUCE
#pragma unroll
    for (int e = 0; e < kVec; ++e) all += pairs[e];
#else
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      recast::narrow(factor * pairs[e], out[sample * out_stride + c + e]);
#endif
  }
#if RECAST_REDUCE
  all = group_sum(all);
  if (threadIdx.x % kLanes == 0) recast::narrow(factor * all, out[sample * out_stride]);
#endif
}
RECAST_KERNEL(fm_forward)

// grads[f][c] = factor * grad[c] * Σ_{g!=f} rows[g][c]; grad as the result of fm_forward. Rows
// whose grads[f].at is null need none.
//
// SPLITS groups of lanes share a sample, each with every SPLITS-th feature: a thread has few, and
// keeps them until the sum of all is known.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    fm_backward(const Row* __restrict__ rows, int n_rows, int dim, float factor, int batch,
                const Out* __restrict__ grad, Index grad_stride, const Row* __restrict__ grads) {
  constexpr int kSplits = RECAST_SPLITS, kHeld = RECAST_HELD, kTeam = kLanes * kSplits;
  const int thread = static_cast<int>(threadIdx.x);
  const int sample = static_cast<int>(blockIdx.x) * (RECAST_BLOCK / kTeam) + thread / kTeam;
  if (sample >= batch) return;
  const int split = thread % kTeam / kLanes;
  const unsigned team = kTeam == 32 ? 0xffffffffu : (1u << (kTeam % 32)) - 1;
  const unsigned mask = team << (thread % 32 / kTeam * kTeam);
  for (int from = 0; from < dim; from += kLanes * kVec) {
    const int c = from + thread % kLanes * kVec;
    const bool there = c < dim;
    recast::Pack<In, kVec> held[kHeld];
    float sum[kVec] = {}, upstream[kVec] = {};
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int f = h * kSplits + split;
      held[h] = there && f < n_rows ? read(rows[f], sample, c) : recast::zeros<kVec, In>();
    }
    if (there)
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Index at = sample * grad_stride + (RECAST_REDUCE ? 0 : c + e);
        upstream[e] = factor * recast::widen(grad[at]);
      }
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] += recast::widen(held[h].at[e]);
    if (there)
#pragma unroll 2
      for (int f = kHeld * kSplits + split; f < n_rows; f += kSplits) {
        const auto vector = read(rows[f], sample, c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[e] += recast::widen(vector.at[e]);
      }
#pragma unroll
    for (int d = kLanes; d < kTeam; d *= 2)
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] += __shfl_xor_sync(mask, sum[e], d, kTeam);
    if (!there) continue;
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int f = h * kSplits + split;
      if (f < n_rows) write(grads[f], sample, c, upstream, sum, held[h]);
    }
    for (int f = kHeld * kSplits + split; f < n_rows; f += kSplits)
      write(grads[f], sample, c, upstream, sum, read(rows[f], sample, c));
  }
}
RECAST_KERNEL(fm_backward)
