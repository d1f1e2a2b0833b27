// One optimizer step on any number of fp32 tensors in one launch; each element is read and written
// once. A block takes one chunk of one tensor.
//
// With g the gradient, negated to maximize, and `rate` the learning rate; the same operations in
// the same order as torch.optim's foreach steps on a GPU, with fused multiply-adds where those have
// them:
//   all         g = decay p + g                     with weight decay, where it is not decoupled
//   0 SGD       p = -rate g + p
//   1 momentum  b = add g + b keep,  g = b, or with Nesterov keep b + g,  p = -rate g + p
//   2 Adagrad   s = g g + s,  p = p + (-rate g) / (sqrt(s) + eps)
//   3 Adam      p = p (1 - rate decay)              where the decay is decoupled
//               m = lerp(m, g, add),  v = second_add g^2 + v second_keep
//               p = p + m / ((sqrt(v) / sqrt(1 - second_keep^t) + eps) / (rate / (keep^t - 1)))
//               where the host counts t: p = size (m / (sqrt(v) / root + eps)) + p
//   4 AMSGrad   the same, with x = max(x, v) in place of v in the last lines
//
// Macros:
//   RECAST_RULE   0 to 4, as above
//   RECAST_BLOCK  threads of a block
//
// Launch: grid = chunks, block = RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;

constexpr int kVec = 4;       // elements read at once
constexpr int kInFlight = 2;  // such loads of a thread in flight
constexpr int kTensors = RECAST_RULE == 0 ? 1 : RECAST_RULE <= 2 ? 2 : RECAST_RULE;

using Vector = recast::Pack<float, kVec>;

enum Flag { kMaximizes = 1, kDecays = 2, kDecoupled = 4, kNesterov = 8, kCounted = 16 };

// Consecutive elements of one parameter, at most BLOCK * kInFlight * kVec: eight fields of 8 bytes,
// as the host writes them.
struct Chunk {
  float* at[4];  // the parameter, then its states, in the order of the formulas
  const float* gradient;
  const float* steps;  // Adam: t including this step, if the device counts it
  Index count;
  Index aligned;  // 1: all of these start at multiples of 16 bytes
};

struct Numbers {
  int flags;
  float rate, decay, eps, keep, add, second_keep, second_add;
};

// Adam's bias corrections, the same for all elements of a parameter.
struct Corrections {
  float size, root, shrink;
};

// Loads kVec elements, zeros past the first `count`.
__device__ __forceinline__ Vector read(const float* from, int count, bool aligned) {
  if (aligned && count >= kVec) return recast::load<kVec>(from);
  Vector found = recast::zeros<kVec, float>();
#pragma unroll
  for (int e = 0; e < kVec; ++e)
    if (e < count) found.at[e] = from[e];
  return found;
}

__device__ __forceinline__ void write(float* to, const Vector& from, int count, bool aligned) {
  if (aligned && count >= kVec) {
    recast::store<kVec>(to, from);
    return;
  }
#pragma unroll
  for (int e = 0; e < kVec; ++e)
    if (e < count) to[e] = from.at[e];
}

[[maybe_unused]] __device__ __forceinline__ Corrections corrections(const Numbers& by, float t) {
  const float first = __fadd_rn(powf(by.keep, t), -1.0f);
  const float second = -__fadd_rn(powf(by.second_keep, t), -1.0f);
  return {__fdiv_rn(1.0f, __fdiv_rn(first, by.rate)), __fsqrt_rn(second),
          __fadd_rn(1.0f, -__fmul_rn(by.rate, by.decay))};
}

// value: one element of the parameter, then of each of its states.
__device__ __forceinline__ void update(float (&value)[kTensors], float g, const Numbers& by,
                                       [[maybe_unused]] const Corrections& adam) {
  float& p = value[0];
  if (by.flags & kMaximizes) g = -g;
  if (by.flags & kDecays) g = __fmaf_rn(by.decay, p, g);
#if RECAST_RULE <= 1
#if RECAST_RULE == 1
  float& b = value[1];
  b = __fmaf_rn(by.add, g, __fmul_rn(b, by.keep));
  g = by.flags & kNesterov ? __fmaf_rn(by.keep, b, g) : b;
#endif
  p = __fmaf_rn(-by.rate, g, p);
#elif RECAST_RULE == 2
  float& s = value[1];
  s = __fmaf_rn(g, g, s);
  p = __fadd_rn(p, __fdiv_rn(__fmul_rn(g, -by.rate), __fadd_rn(__fsqrt_rn(s), by.eps)));
#else
  if (by.flags & kDecoupled) p = __fmul_rn(p, adam.shrink);
  float &m = value[1], &v = value[2];
  const float difference = __fadd_rn(g, -m);
  m = by.add < 0.5f ? __fmaf_rn(by.add, difference, m)
                    : __fmaf_rn(-difference, __fadd_rn(1.0f, -by.add), g);
  v = __fmaf_rn(by.second_add, __fmul_rn(g, g), __fmul_rn(v, by.second_keep));
#if RECAST_RULE == 4
  float& max_v = value[3];
  max_v = max_v > v || max_v != max_v ? max_v : v;
#else
  const float max_v = v;
#endif
  const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(max_v), adam.root), by.eps);
  p = by.flags & kCounted ? __fmaf_rn(adam.size, __fdiv_rn(m, root), p)
                          : __fadd_rn(p, __fdiv_rn(m, __fdiv_rn(root, adam.size)));
#endif
}

}  // namespace

// `rate`: a scalar on the device; if the host counts t, three: size, root and 1 - rate decay.
// `found`: a scalar on the device, or null; nothing is done if it is not 0.
// Parameters and states may not overlap.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    dense_update(const Chunk* __restrict__ chunks, const float* __restrict__ rate, int flags,
                 float decay, float eps, float keep, float add, float second_keep, float second_add,
                 const float* __restrict__ found) {
  if (found != nullptr && *found != 0.0f) return;
  const Chunk chunk = chunks[blockIdx.x];
  const bool aligned = chunk.aligned != 0;
  const int count = static_cast<int>(chunk.count);
  Vector held[kInFlight][kTensors], gradient[kInFlight];
#pragma unroll
  for (int a = 0; a < kInFlight; ++a) {
    const int first = (a * RECAST_BLOCK + threadIdx.x) * kVec;
    gradient[a] = read(chunk.gradient + first, count - first, aligned);
#pragma unroll
    for (int t = 0; t < kTensors; ++t)
      held[a][t] = read(chunk.at[t] + first, count - first, aligned);
  }
  const Numbers by = {flags, *rate, decay, eps, keep, add, second_keep, second_add};
#if RECAST_RULE >= 3
  const bool counted = (flags & kCounted) != 0;
  const Corrections adam =
      counted ? Corrections{rate[0], rate[1], rate[2]} : corrections(by, *chunk.steps);
#else
  const Corrections adam = {};
#endif
#pragma unroll
  for (int a = 0; a < kInFlight; ++a) {
    const int first = (a * RECAST_BLOCK + threadIdx.x) * kVec;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float value[kTensors];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) value[t] = held[a][t].at[e];
      update(value, gradient[a].at[e], by, adam);
#pragma unroll
      for (int t = 0; t < kTensors; ++t) held[a][t].at[e] = value[t];
    }
#pragma unroll
    for (int t = 0; t < kTensors; ++t)
      write(chunk.at[t] + first, held[a][t], count - first, aligned);
  }
}
RECAST_KERNEL(dense_update)
