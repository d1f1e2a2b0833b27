// Attention between the fields of a sample, and its gradients, in fp32 without tensor cores
// (runtime/layers/field_attention.py has the formulas; attention_tiles.cu is the faster kernel
// where it applies). A block loads some heads to shared memory, as fp32; then a thread takes one
// query, in backward then one key, and keeps its vectors in registers. Weights are recomputed where
// they are needed again.
//
// Macros:
//   RECAST_IN      dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_WIDTH   a multiple of 8, at least the length of queries, keys and values, which are
//                  padded with zeros
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
// Rows in shared memory are padded by four floats against bank conflicts.
constexpr int kRow = kWidth + 4;

// (N, H, rows, width), contiguous in the last dimension: five fields of 8 bytes, as the host writes
// them.
struct View {
  In* at;
  Index sample, head, row;  // elements from one to the next
  Index width;
};

// The heads of this block.
struct Heads {
  int first, count, each;  // `each`: heads of a sample
};

// Loads the vectors of all heads of the block to rows[(h * n + r) * kRow + c]; store_heads: back.
__device__ __forceinline__ void load_heads(const View& from, const Heads& heads, int n,
                                           float* rows) {
  for (int w = threadIdx.x; w < heads.count * n * kWidth; w += RECAST_BLOCK) {
    const int c = w % kWidth, r = w / kWidth % n, h = w / kWidth / n, head = heads.first + h;
    const Index at = head / heads.each * from.sample + head % heads.each * from.head + r * from.row;
    rows[(h * n + r) * kRow + c] = c < from.width ? recast::widen(from.at[at + c]) : 0.0f;
  }
}

__device__ __forceinline__ void store_heads(const float* rows, const Heads& heads, int n,
                                            const View& to) {
  for (int w = threadIdx.x; w < heads.count * n * kWidth; w += RECAST_BLOCK) {
    const int c = w % kWidth, r = w / kWidth % n, h = w / kWidth / n, head = heads.first + h;
    if (c >= to.width) continue;
    const Index at = head / heads.each * to.sample + head % heads.each * to.head + r * to.row;
    recast::narrow(rows[(h * n + r) * kRow + c], to.at[at + c]);
  }
}

__device__ __forceinline__ void load_vector(const float* row, float (&to)[kWidth]) {
#pragma unroll
  for (int c = 0; c < kWidth; c += 4) {
    const auto four = recast::load<4>(row + c);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[c + e] = four.at[e];
  }
}

__device__ __forceinline__ void store_vector(const float (&values)[kWidth], float* row) {
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

__device__ __forceinline__ float value_or(const In* from, Index at, float otherwise) {
  return from == nullptr ? otherwise : recast::widen(from[at]);
}

// The largest score of a query, subtracted in its softmax.
__device__ __forceinline__ float largest(const float (&q)[kWidth], const float* keys, int n_keys,
                                         float scale) {
  float max_score = __uint_as_float(0xff800000u);
#pragma unroll 1
  for (int j = 0; j < n_keys; ++j) max_score = fmaxf(max_score, scale * dot(q, keys + j * kRow));
  return max_score;
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
  load_heads(views[0], mine, n_queries, queries);
  load_heads(views[1], mine, n_keys, keys);
  load_heads(views[2], mine, n_keys, values);
  __syncthreads();
  for (int w = threadIdx.x; w < mine.count * n_queries; w += RECAST_BLOCK) {
    const float* const k = keys + w / n_queries * n_keys * kRow;
    const float* const v = values + w / n_queries * n_keys * kRow;
    const Index row = (static_cast<Index>(mine.first) * n_queries + w) * n_keys;
    float q[kWidth], out[kWidth] = {}, sum = 0.0f;
    load_vector(queries + w * kRow, q);
    const float max_score = largest(q, k, n_keys, scale);
#pragma unroll 1
    for (int j = 0; j < n_keys; ++j) {
      const float a = expf(scale * dot(q, k + j * kRow) - max_score);
      sum += a;
      add(a * value_or(noise, row + j, 1.0f), v + j * kRow, out);
    }
    const float inverse_sum = 1.0f / sum;
    if (weights != nullptr)
#pragma unroll 1
      for (int j = 0; j < n_keys; ++j)
        recast::narrow(inverse_sum * expf(scale * dot(q, k + j * kRow) - max_score),
                       weights[row + j]);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) out[c] *= inverse_sum;
    store_vector(out, queries + w * kRow);  // no other thread reads this query
  }
  __syncthreads();
  store_heads(queries, mine, n_queries, views[3]);
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
  float* const stats =
      values +
      per_block * n_keys * kRow;  // of a query: largest score, 1 / sum, Σ weight * gradient
  const Heads mine = heads_of(heads, per_block, each);
  load_heads(views[0], mine, n_queries, queries);
  load_heads(views[1], mine, n_keys, keys);
  load_heads(views[2], mine, n_keys, values);
  load_heads(views[3], mine, n_queries, upstream);
  __syncthreads();
  for (int w = threadIdx.x; w < mine.count * n_queries; w += RECAST_BLOCK) {
    const float* const k = keys + w / n_queries * n_keys * kRow;
    const float* const v = values + w / n_queries * n_keys * kRow;
    const Index row = (static_cast<Index>(mine.first) * n_queries + w) * n_keys;
    float q[kWidth], g[kWidth], sum = 0.0f, weighted_grad = 0.0f;
    load_vector(queries + w * kRow, q);
    load_vector(upstream + w * kRow, g);
    const float max_score = largest(q, k, n_keys, scale);
#pragma unroll 1
    for (int j = 0; j < n_keys; ++j) {
      const float a = expf(scale * dot(q, k + j * kRow) - max_score);
      const float through = value_or(noise, row + j, 1.0f) * dot(g, v + j * kRow);
      sum += a;
      weighted_grad += a * (through + value_or(of_weights, row + j, 0.0f));
    }
    const float inverse_sum = 1.0f / sum;
    weighted_grad *= inverse_sum;
    stats[3 * w] = max_score, stats[3 * w + 1] = inverse_sum, stats[3 * w + 2] = weighted_grad;
    float dq[kWidth] = {};
#pragma unroll 1
    for (int j = 0; j < n_keys; ++j) {
      const float a = inverse_sum * expf(scale * dot(q, k + j * kRow) - max_score);
      const float through = value_or(noise, row + j, 1.0f) * dot(g, v + j * kRow);
      const float da = through + value_or(of_weights, row + j, 0.0f);
      add(scale * a * (da - weighted_grad), k + j * kRow, dq);
    }
    store_vector(dq, into + w * kRow);
  }
  __syncthreads();
  for (int w = threadIdx.x; w < mine.count * n_keys; w += RECAST_BLOCK) {
    const int head = w / n_keys, j = w % n_keys, first = head * n_queries;
    const Index plane = static_cast<Index>(mine.first + head) * n_queries * n_keys + j;
    float k[kWidth], v[kWidth], dk[kWidth] = {}, dv[kWidth] = {};
    load_vector(keys + w * kRow, k);
    load_vector(values + w * kRow, v);
#pragma unroll 1
    for (int i = 0; i < n_queries; ++i) {
      const float* const q = queries + (first + i) * kRow;
      const float* const g = upstream + (first + i) * kRow;
      const float* const of = stats + 3 * (first + i);
      const Index at = plane + static_cast<Index>(i) * n_keys;
      const float a = of[1] * expf(scale * dot(k, q) - of[0]);
      const float n = value_or(noise, at, 1.0f);
      const float da = n * dot(v, g) + value_or(of_weights, at, 0.0f);
      add(scale * a * (da - of[2]), q, dk);
      add(n * a, g, dv);
    }
    store_vector(dk, keys + w * kRow);  // no other thread reads this key
    store_vector(dv, values + w * kRow);
  }
  __syncthreads();
  store_heads(into, mine, n_queries, views[4]);
  store_heads(keys, mine, n_keys, views[5]);
  store_heads(values, mine, n_keys, views[6]);
}
RECAST_KERNEL(attention_backward)
