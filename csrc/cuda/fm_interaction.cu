// Factorisation machine: with x_f the feature vectors of a sample,
//     out[c] = factor * Σ_{f<g} x_f[c] x_g[c],  or its sum over c
//     dx_f[c] = factor * grad[c] * (Σ_g x_g[c] - x_f[c])
// LANES lanes share a sample, each with VEC columns. Forward is one pass that keeps the sum of the
// features before; backward reads every feature once where its registers suffice.
//
// Macros:
//   RECAST_IN      dtype of features and their gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_OUT     dtype of the result and its gradient, likewise; sums are fp32
//   RECAST_VEC     columns that a lane reads at once; divides D and all strides, and rows start at
//                  multiples of VEC elements: 1, 2, 4, and 8 for 16-bit features
//   RECAST_LANES   lanes that share a sample, a power of two up to 32: about D / VEC
//   RECAST_SPLITS  groups of so many lanes that share a sample in fm_backward, a power of two with
//                  LANES * SPLITS up to 32: no more than there are features
//   RECAST_HELD    features that a thread of fm_backward keeps in registers; those beyond
//                  SPLITS * HELD are read twice
//   RECAST_REDUCE  1: the result is summed over D, (batch, 1); 0: (batch, D)
//   RECAST_BLOCK   threads of a block, a multiple of 32
//
// Launch: grid = ceil(batch / (BLOCK / LANES)), in fm_backward / (LANES * SPLITS); block =
// RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"
#include "reductions.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Out = recast::Dtype<RECAST_OUT>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;

// One feature vector of all samples: the address in sample 0, and the stride of samples in
// elements.
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
  all = recast::group_sum<kLanes>(all);
  if (threadIdx.x % kLanes == 0) recast::narrow(factor * all, out[sample * out_stride]);
#endif
}
RECAST_KERNEL(fm_forward)

// grads[f][c] = factor * grad[c] * Σ_{g!=f} rows[g][c]; grad as the result of fm_forward. Rows
// whose grads[f].at is null need none.
//
// SPLITS groups of lanes share a sample, each with every SPLITS-th feature, so that a thread has
// few and keeps them in registers until the sum of all is known.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    fm_backward(const Row* __restrict__ rows, int n_rows, int dim, float factor, int batch,
                const Out* __restrict__ grad, Index grad_stride, const Row* __restrict__ grads) {
  constexpr int kSplits = RECAST_SPLITS, kHeld = RECAST_HELD, kSampleLanes = kLanes * kSplits;
  const int thread = static_cast<int>(threadIdx.x);
  const int sample =
      static_cast<int>(blockIdx.x) * (RECAST_BLOCK / kSampleLanes) + thread / kSampleLanes;
  if (sample >= batch) return;
  const int split = thread % kSampleLanes / kLanes;
  const unsigned mask = recast::group_mask<kSampleLanes>();
  for (int from = 0; from < dim; from += kLanes * kVec) {
    const int c = from + thread % kLanes * kVec;
    const bool in_range = c < dim;
    recast::Pack<In, kVec> held[kHeld];
    float sum[kVec] = {}, upstream[kVec] = {};
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int f = h * kSplits + split;
      held[h] = in_range && f < n_rows ? read(rows[f], sample, c) : recast::zeros<kVec, In>();
    }
    if (in_range)
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Index at = sample * grad_stride + (RECAST_REDUCE ? 0 : c + e);
        upstream[e] = factor * recast::widen(grad[at]);
      }
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] += recast::widen(held[h].at[e]);
    if (in_range)
#pragma unroll 2
      for (int f = kHeld * kSplits + split; f < n_rows; f += kSplits) {
        const auto vector = read(rows[f], sample, c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[e] += recast::widen(vector.at[e]);
      }
#pragma unroll
    for (int d = kLanes; d < kSampleLanes; d *= 2)
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] += __shfl_xor_sync(mask, sum[e], d, kSampleLanes);
    if (!in_range) continue;
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
