// Attention between the fields of a sample, and its gradients
// (runtime/layers/field_attention.py has the formulas). A block takes some heads into shared
// memory, as fp32; then a thread has one query, or one key, whose vectors it keeps in registers.
// Weights are made again where they are needed.
//
// Macros:
//   RECAST_IN      dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_WIDTH   a multiple of 8, at least as long as queries, keys and values; behind their
//                  elements there are zeros
//   RECAST_BLOCK   threads of a block, a multiple of 32
//
// Launch: grid = ceil(heads in all / heads), block = RECAST_BLOCK, dynamic shared memory: as said
// at each kernel.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kWidth = RECAST_WIDTH;
// In shared memory rows lie four floats further apart, so that neighbours fall into other banks.
constexpr int kRow = kWidth + 4;

// (N, H, rows, width) with elements side by side: five fields of 8 bytes, as the host writes them.
struct View {
  In* at;
  Index sample, head, row;  // elements from one to the next
  Index width;
};

// The heads of this block.
struct Heads {
  int first, count, each;  // `each`: heads of a sample
};

// rows[(h * n + r) * kRow + c] for the vectors of all heads of the block, or back.
__device__ __forceinline__ void take(const View& from, const Heads& heads, int n, float* rows) {
  for (int w = threadIdx.x; w < heads.count * n * kWidth; w += RECAST_BLOCK) {
    const int c = w % kWidth, r = w / kWidth % n, h = w / kWidth / n, head = heads.first + h;
    const Index at = head / heads.each * from.sample + head % heads.each * from.head + r * from.row;
    rows[(h * n + r) * kRow + c] = c < from.width ? recast::widen(from.at[at + c]) : 0.0f;
  }
}

__device__ __forceinline__ void give(const float* rows, const Heads& heads, int n, const View& to) {
  for (int w = threadIdx.x; w < heads.count * n * kWidth; w += RECAST_BLOCK) {
    const int c = w % kWidth, r = w / kWidth % n, h = w / kWidth / n, head = heads.first + h;
    if (c >= to.width) continue;
    const Index at = head / heads.each * to.sample + head % heads.each * to.head + r * to.row;
    recast::narrow(rows[(h * n + r) * kRow + c], to.at[at + c]);
  }
}

__device__ __forceinline__ void hold(const float* row, float (&to)[kWidth]) {
#pragma unroll
  for (int c = 0; c < kWidth; c += 4) {
    const auto four = recast::load<4>(row + c);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[c + e] = four.at[e];
  }
}

__device__ __forceinline__ void put(const float (&values)[kWidth], float* row) {
#pragma unroll
  for (int c = 0; c < kWidth; ++c) row[c] = values[c];
}

__device__ __forceinline__ float dot(const float (&a)[kWidth], const float* row) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kWidth; c += 4) {
    const auto four = recast::load<4>(row + c);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += a[c + e] * four.at[e];
  }
  return sum;
}

__device__ __forceinline__ void add(float factor, const float* row, float (&to)[kWidth]) {
#pragma unroll
  for (int c = 0; c < kWidth; c += 4) {
    const auto four = recast::load<4>(row + c);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[c + e] += factor * four.at[e];
  }
}

__device__ __forceinline__ float at_or(const In* from, Index at, float otherwise) {
  return from == nullptr ? otherwise : recast::widen(from[at]);
}

// The largest score of a query, by which its weights are scaled.
__device__ __forceinline__ float largest(const float (&q)[kWidth], const float* keys, int n_keys,
                                         float scale) {
  float most = __uint_as_float(0xff800000u);
#pragma unroll 1
  for (int j = 0; j < n_keys; ++j) most = fmaxf(most, scale * dot(q, keys + j * kRow));
  return most;
}

__device__ __forceinline__ Heads heads_of(int heads, int per_block, int each) {
  const int first = blockIdx.x * per_block;
  return {first, min(per_block, heads - first), each};
}

}  // namespace

// views: q, k, v, out. noise, weights: (heads, queries, keys), contiguous, or null.
// Shared memory: per_block * (queries + 2 keys) * kRow floats.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    attention_forward(const View* __restrict__ views, int heads, int per_block, int each,
                      int n_queries, int n_keys, float scale, const In* __restrict__ noise,
                      In* __restrict__ weights) {
  RECAST_DYNAMIC_SHARED(float, queries);
  float* const keys = queries + per_block * n_queries * kRow;
  float* const values = keys + per_block * n_keys * kRow;
  const Heads mine = heads_of(heads, per_block, each);
  take(views[0], mine, n_queries, queries);
  take(views[1], mine, n_keys, keys);
  take(views[2], mine, n_keys, values);
  __syncthreads();
  for (int w = threadIdx.x; w < mine.count * n_queries; w += RECAST_BLOCK) {
    const float* const k = keys + w / n_queries * n_keys * kRow;
    const float* const v = values + w / n_queries * n_keys * kRow;
    const Index row = (static_cast<Index>(mine.first) * n_queries + w) * n_keys;
    float q[kWidth], out[kWidth] = {}, sum = 0.0f;
    hold(queries + w * kRow, q);
    const float most = largest(q, k, n_keys, scale);
#pragma unroll 1
    for (int j = 0; j < n_keys; ++j) {
      const float a = expf(scale * dot(q, k + j * kRow) - most);
      sum += a;
      add(a * at_or(noise, row + j, 1.0f), v + j * kRow, out);
    }
    const float share = 1.0f / sum;
    if (weights != nullptr)
#pragma unroll 1
      for (int j = 0; j < n_keys; ++j)
        recast::narrow(share * expf(scale * dot(q, k + j * kRow) - most), weights[row + j]);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) out[c] *= share;
    put(out, queries + w * kRow);  // no other thread reads this query
  }
  __syncthreads();
  give(queries, mine, n_queries, views[3]);
}
RECAST_KERNEL(attention_forward)

// views: q, k, v, the gradient of out, dq, dk, dv. noise as above; of_weights: the gradient of the
// weights, likewise.
// Shared memory: per_block * ((3 queries + 2 keys) * kRow + 3 queries) floats.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    attention_backward(const View* __restrict__ views, int heads, int per_block, int each,
                       int n_queries, int n_keys, float scale, const In* __restrict__ noise,
                       const In* __restrict__ of_weights) {
  RECAST_DYNAMIC_SHARED(float, queries);
  float* const upstream = queries + per_block * n_queries * kRow;
  float* const into = upstream + per_block * n_queries * kRow;
  float* const keys = into + per_block * n_queries * kRow;
  float* const values = keys + per_block * n_keys * kRow;
  float* const known = values + per_block * n_keys * kRow;  // of a query: most, share, along
  const Heads mine = heads_of(heads, per_block, each);
  take(views[0], mine, n_queries, queries);
  take(views[1], mine, n_keys, keys);
  take(views[2], mine, n_keys, values);
  take(views[3], mine, n_queries, upstream);
  __syncthreads();
  for (int w = threadIdx.x; w < mine.count * n_queries; w += RECAST_BLOCK) {
    const float* const k = keys + w / n_queries * n_keys * kRow;
    const float* const v = values + w / n_queries * n_keys * kRow;
    const Index row = (static_cast<Index>(mine.first) * n_queries + w) * n_keys;
    float q[kWidth], g[kWidth], sum = 0.0f, along = 0.0f;
    hold(queries + w * kRow, q);
    hold(upstream + w * kRow, g);
    const float most = largest(q, k, n_keys, scale);
#pragma unroll 1
    for (int j = 0; j < n_keys; ++j) {
      const float a = expf(scale * dot(q, k + j * kRow) - most);
      const float through = at_or(noise, row + j, 1.0f) * dot(g, v + j * kRow);
      sum += a;
      along += a * (through + at_or(of_weights, row + j, 0.0f));
    }
    const float share = 1.0f / sum;
    along *= share;
    known[3 * w] = most, known[3 * w + 1] = share, known[3 * w + 2] = along;
    float dq[kWidth] = {};
#pragma unroll 1
    for (int j = 0; j < n_keys; ++j) {
      const float a = share * expf(scale * dot(q, k + j * kRow) - most);
      const float through = at_or(noise, row + j, 1.0f) * dot(g, v + j * kRow);
      const float da = through + at_or(of_weights, row + j, 0.0f);
      add(scale * a * (da - along), k + j * kRow, dq);
    }
    put(dq, into + w * kRow);
  }
  __syncthreads();
  for (int w = threadIdx.x; w < mine.count * n_keys; w += RECAST_BLOCK) {
    const int head = w / n_keys, j = w % n_keys, first = head * n_queries;
    const Index plane = static_cast<Index>(mine.first + head) * n_queries * n_keys + j;
    float k[kWidth], v[kWidth], dk[kWidth] = {}, dv[kWidth] = {};
    hold(keys + w * kRow, k);
    hold(values + w * kRow, v);
#pragma unroll 1
    for (int i = 0; i < n_queries; ++i) {
      const float* const q = queries + (first + i) * kRow;
      const float* const g = upstream + (first + i) * kRow;
      const float* const of = known + 3 * (first + i);
      const Index at = plane + static_cast<Index>(i) * n_keys;
      const float a = of[1] * expf(scale * dot(k, q) - of[0]);
      const float n = at_or(noise, at, 1.0f);
      const float da = n * dot(v, g) + at_or(of_weights, at, 0.0f);
      add(scale * a * (da - of[2]), q, dk);
      add(n * a, g, dv);
    }
    put(dk, keys + w * kRow);  // no other thread reads this key
    put(dv, values + w * kRow);
  }
  __syncthreads();
  give(into, mine, n_queries, views[4]);
  give(keys, mine, n_keys, views[5]);
  give(values, mine, n_keys, views[6]);
}
RECAST_KERNEL(attention_backward)
