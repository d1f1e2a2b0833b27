// Attention between the fields of a sample, and its gradients, on tensor cores
// (runtime/layers/field_attention.py has the formulas). A warp computes one head; attention weights
// stay in registers. Operands are rounded to TF32, which represents 16-bit numbers exactly.
//
// A sum may take its terms in any order. They are numbered such that each lane loads contiguous
// elements, and such that the result of one product is an operand of the next without moving
// between lanes: of a tile of 8 keys, lane t of a group has weights 2 t and 2 t + 1, and passes
// them to the next product as its terms t and t + 4 (intrinsics.cuh).
//
// Macros:
//   RECAST_IN      dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_STEPS   steps of 8 elements, at least as many as cover queries, keys and values
//   RECAST_KEYS    tiles of 8 keys, enough for all of them
//   RECAST_BARE    1: no dropout noise, and the weights are neither returned nor have a gradient
//   RECAST_VEC     elements read at once: divides all lengths and strides, and rows start at
//                  multiples of it: 1, 2 or 4
//
// Launch: grid = ceil(heads / warps), block = 32 * warps, at most 128.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kSteps = RECAST_STEPS;
constexpr int kKeys = RECAST_KEYS;
constexpr int kWidth = 8 * kSteps;
constexpr int kPart = 2 * kSteps;  // elements of a row that a lane holds
constexpr int kRow = kWidth + 4;   // row stride in shared memory, padded against bank conflicts
constexpr float kLog2 = 1.44269504088896341f;  // of e

// (N, H, rows, width), contiguous in the last dimension: five fields of 8 bytes, as the host writes
// them.
struct View {
  In* at;
  Index sample, head, row;  // elements from one to the next
  Index width;
};

__device__ __forceinline__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// The address of a head's first row; `each`: heads of a sample.
__device__ __forceinline__ In* start(const View& view, int head, int each) {
  return recast::in_global(view.at) + head / each * view.sample + head % each * view.head;
}

// Loads N elements of a row as fp32; zeros past its end, and all zeros unless `valid`.
template <int N>
__device__ __forceinline__ void load_row(const In* row, int first, Index width, bool valid,
                                         float (&to)[N]) {
  constexpr int step = gcd(RECAST_VEC, N);
#pragma unroll
  for (int c = 0; c < N; c += step) {
    auto pack = recast::zeros<step, In>();
    if (valid && first + c < width) pack = recast::load<step>(row + first + c);
#pragma unroll
    for (int e = 0; e < step; ++e) to[c + e] = recast::widen(pack.at[e]);
  }
}

template <int N>
__device__ __forceinline__ void store_row(In* row, int first, Index width, const float (&from)[N]) {
  constexpr int step = gcd(RECAST_VEC, N);
#pragma unroll
  for (int c = 0; c < N; c += step) {
    if (first + c >= width) continue;
    recast::Pack<In, step> pack;
#pragma unroll
    for (int e = 0; e < step; ++e) recast::narrow(from[c + e], pack.at[e]);
    recast::store_whole<step>(row + first + c, pack);
  }
}

template <int N>
__device__ __forceinline__ void round_to_tf32(const float (&from)[N], unsigned (&to)[N]) {
#pragma unroll
  for (int c = 0; c < N; ++c) to[c] = recast::to_tf32(from[c]);
}

// Loads N words from shared memory.
template <int N>
__device__ __forceinline__ void load_words(const unsigned* from, unsigned (&to)[N]) {
  constexpr int step = gcd(4, N);
#pragma unroll
  for (int c = 0; c < N; c += step) {
    const auto pack = recast::load<step>(from + c);
#pragma unroll
    for (int e = 0; e < step; ++e) to[c + e] = pack.at[e];
  }
}

// c += A B, summed over a whole row: `low` and `high` are rows g and g + 8 of A, `b` column g of B.
__device__ __forceinline__ void multiply_rows(float (&c)[4], const unsigned (&low)[kPart],
                                              const unsigned (&high)[kPart],
                                              const unsigned (&b)[kPart]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const unsigned left[4] = {low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]};
    const unsigned right[2] = {b[2 * s], b[2 * s + 1]};
    recast::mma_tf32(c, left, right, c);
  }
}

// c += W B, summed over a tile of eight: W is the result of a product; `even` and `odd` are rows 2
// t and 2 t + 1 of B, of which a lane has the elements from kSteps g on.
__device__ __forceinline__ void multiply_tile(float (&c)[kSteps][4], const float (&weights)[4],
                                              const unsigned (&even)[kSteps],
                                              const unsigned (&odd)[kSteps]) {
  const unsigned left[4] = {recast::to_tf32(weights[0]), recast::to_tf32(weights[2]),
                            recast::to_tf32(weights[1]), recast::to_tf32(weights[3])};
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    const unsigned right[2] = {even[n], odd[n]};
    recast::mma_tf32(c[n], left, right, c[n]);
  }
}

// Elements kPart t and on of row g (0) or g + 8 (1) of the result of multiply_tile, times `factor`.
__device__ __forceinline__ void accumulator_row(const float (&c)[kSteps][4], int which,
                                                float factor, float (&to)[kPart]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) to[kSteps * e + n] = factor * c[n][2 * which + e];
}

__device__ __forceinline__ float value_or(const In* from, bool valid, Index at, float otherwise) {
  if constexpr (RECAST_BARE) return otherwise;
  return from == nullptr || !valid ? otherwise : recast::widen(from[at]);
}

// 2^x; 0 where that would be denormal: attention weights below 2^-126 do not change any sum.
__device__ __forceinline__ float exp2_flushed(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

__device__ __forceinline__ float group_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float group_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Softmax without the division: replaces scores by exp2(score - row_max), 0 past the last key;
// `sum`: their sum.
__device__ __forceinline__ void exponentials(float (&s)[kKeys][4], int n_keys, float scale,
                                             float (&row_max)[2], float (&sum)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_max[r] = __uint_as_float(0xff800000u);
#pragma unroll
    for (int j = 0; j < kKeys; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[j][2 * r + e];
        x = 8 * j + 2 * t + e < n_keys ? x * (scale * kLog2) : __uint_as_float(0xff800000u);
        row_max[r] = fmaxf(row_max[r], x);
      }
    row_max[r] = group_max(row_max[r]);
    sum[r] = 0.0f;
#pragma unroll
    for (int j = 0; j < kKeys; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[j][2 * r + e];
        x = exp2_flushed(x - row_max[r]);
        sum[r] += x;
      }
    sum[r] = group_sum(sum[r]);
  }
}

}  // namespace

// views: q, k, v, out. noise, weights: (heads, queries, keys), contiguous, or null. No shared
// memory.
extern "C" __global__ void __launch_bounds__(128, 2)
    attention_tiles_forward(const View* __restrict__ views, int heads, int each, int n_queries,
                            int n_keys, float scale, const In* __restrict__ noise,
                            In* __restrict__ weights) {
  const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (head >= heads) return;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const In* const q = start(views[0], head, each);
  const In* const k = start(views[1], head, each);
  const In* const v = start(views[2], head, each);
  In* const out = start(views[3], head, each);
  const Index q_row = views[0].row, k_row = views[1].row, v_row = views[2].row;
  const Index width = views[0].width, values = views[2].width;
  unsigned key_operand[kKeys][kPart], value_operand[kKeys][2][kSteps];
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    float row[kPart];
    load_row(k + (8 * j + g) * k_row, kPart * t, width, 8 * j + g < n_keys, row);
    round_to_tf32(row, key_operand[j]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = 8 * j + 2 * t + r;
      float part[kSteps];
      load_row(v + key * v_row, kSteps * g, values, key < n_keys, part);
      round_to_tf32(part, value_operand[j][r]);
    }
  }
#pragma unroll 1
  for (int top = 0; top < n_queries; top += 16) {
    unsigned query[2][kPart];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = top + g + 8 * r;
      float row[kPart];
      load_row(q + i * q_row, kPart * t, width, i < n_queries, row);
      round_to_tf32(row, query[r]);
    }
    float s[kKeys][4] = {}, row_max[2], sum[2];
#pragma unroll
    for (int j = 0; j < kKeys; ++j) multiply_rows(s[j], query[0], query[1], key_operand[j]);
    exponentials(s, n_keys, scale, row_max, sum);
    float inverse_sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) inverse_sum[r] = 1.0f / sum[r];
    float result[kSteps][4] = {};
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = top + g + n / 2 * 8, key = 8 * j + 2 * t + n % 2;
        const bool valid = i < n_queries && key < n_keys;
        const Index at = (static_cast<Index>(head) * n_queries + i) * n_keys + key;
        if (!RECAST_BARE && weights != nullptr && valid)
          recast::narrow(inverse_sum[n / 2] * s[j][n], weights[at]);
        s[j][n] *= value_or(noise, valid, at, 1.0f);
      }
      multiply_tile(result, s[j], value_operand[j][0], value_operand[j][1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = top + g + 8 * r;
      float row[kPart];
      accumulator_row(result, r, inverse_sum[r], row);
      if (i < n_queries) store_row(out + i * views[3].row, kPart * t, values, row);
    }
  }
}
RECAST_KERNEL(attention_tiles_forward)

// views: q, k, v, the gradient of out, dq, dk, dv. noise as above; of_weights: the gradient of the
// weights, likewise. Shared memory: a warp's rows of kRow words, of queries and of their gradients,
// of keys and of values, each padded with zero rows to a multiple of 16; and three words a
// query.
extern "C" __global__ void __launch_bounds__(128, 3)
    attention_tiles_backward(const View* __restrict__ views, int heads, int each, int n_queries,
                             int n_keys, float scale, const In* __restrict__ noise,
                             const In* __restrict__ of_weights) {
  RECAST_DYNAMIC_SHARED(unsigned, shared);
  const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (head >= heads) return;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int queries = (n_queries + 15) / 16 * 16, keys = (n_keys + 15) / 16 * 16;
  unsigned* const q = shared + threadIdx.x / 32 * (2 * (queries + keys) * kRow + 3 * queries);
  unsigned* const grad_rows = q + queries * kRow;
  unsigned* const k = grad_rows + queries * kRow;
  unsigned* const v = k + keys * kRow;
  float* const stats = reinterpret_cast<float*>(
      v + keys * kRow);  // a query's row_max, 1 / sum, and Σ weight * gradient
  {
    // Eight rows at a time, each by the four lanes of a group.
    unsigned* const to[4] = {q, k, v, grad_rows};
#pragma unroll
    for (int which = 0; which < 4; ++which) {
      const View view = views[which];
      const In* const from = start(view, head, each);
      const bool of_query = which == 0 || which == 3;
      const int all = of_query ? queries : keys, count = of_query ? n_queries : n_keys;
#pragma unroll 2
      for (int i = g; i < all; i += 8) {
        float row[kPart];
        unsigned words[kPart];
        load_row(from + i * view.row, kPart * t, view.width, i < count, row);
        round_to_tf32(row, words);
        constexpr int step = gcd(4, kPart);
#pragma unroll
        for (int c = 0; c < kPart; c += step) {
          recast::Pack<unsigned, step> pack;
#pragma unroll
          for (int e = 0; e < step; ++e) pack.at[e] = words[c + e];
          recast::store<step>(to[which] + i * kRow + kPart * t + c, pack);
        }
      }
    }
  }
  __syncwarp();
  const Index plane = static_cast<Index>(head) * n_queries * n_keys;
#pragma unroll 1
  for (int top = 0; top < n_queries; top += 16) {
    unsigned left[2][kPart], right[kPart];
    float s[kKeys][4] = {}, da[kKeys][4] = {}, row_max[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) load_words(q + (top + g + 8 * r) * kRow + kPart * t, left[r]);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      load_words(k + (8 * j + g) * kRow + kPart * t, right);
      multiply_rows(s[j], left[0], left[1], right);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      load_words(grad_rows + (top + g + 8 * r) * kRow + kPart * t, left[r]);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      load_words(v + (8 * j + g) * kRow + kPart * t, right);
      multiply_rows(da[j], left[0], left[1], right);
    }
    exponentials(s, n_keys, scale, row_max, sum);
    float inverse_sum[2], dots[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) inverse_sum[r] = 1.0f / sum[r];
#pragma unroll
    for (int j = 0; j < kKeys; ++j)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = top + g + n / 2 * 8, key = 8 * j + 2 * t + n % 2;
        const bool valid = i < n_queries && key < n_keys;
        const Index at = plane + static_cast<Index>(i) * n_keys + key;
        s[j][n] *= inverse_sum[n / 2];
        da[j][n] =
            da[j][n] * value_or(noise, valid, at, 1.0f) + value_or(of_weights, valid, at, 0.0f);
        dots[n / 2] += s[j][n] * da[j][n];
      }
    float result[kSteps][4] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dots[r] = group_sum(dots[r]);
      const int i = top + g + 8 * r;
      if (t == 0) {
        stats[3 * i] = row_max[r];
        stats[3 * i + 1] = i < n_queries ? inverse_sum[r] : 0.0f;
        stats[3 * i + 2] = dots[r];
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) s[j][n] *= scale * (da[j][n] - dots[n / 2]);
      unsigned even[kSteps], odd[kSteps];
      load_words(k + (8 * j + 2 * t) * kRow + kSteps * g, even);
      load_words(k + (8 * j + 2 * t + 1) * kRow + kSteps * g, odd);
      multiply_tile(result, s[j], even, odd);
    }
    In* const dq = start(views[4], head, each);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = top + g + 8 * r;
      float row[kPart];
      accumulator_row(result, r, 1.0f, row);
      if (i < n_queries) store_row(dq + i * views[4].row, kPart * t, views[4].width, row);
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int top = 0; top < n_keys; top += 16) {
    unsigned key_rows[2][kPart], value_rows[2][kPart];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      load_words(k + (top + g + 8 * r) * kRow + kPart * t, key_rows[r]);
      load_words(v + (top + g + 8 * r) * kRow + kPart * t, value_rows[r]);
    }
    float of_keys[kSteps][4] = {}, of_values[kSteps][4] = {};
#pragma unroll 1
    for (int j = 0; j < n_queries; j += 8) {
      unsigned right[kPart];
      float s[4] = {}, da[4] = {}, a[4];
      load_words(q + (j + g) * kRow + kPart * t, right);
      multiply_rows(s, key_rows[0], key_rows[1], right);
      load_words(grad_rows + (j + g) * kRow + kPart * t, right);
      multiply_rows(da, value_rows[0], value_rows[1], right);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = j + 2 * t + n % 2, key = top + g + n / 2 * 8;
        const bool valid = i < n_queries && key < n_keys;
        const Index at = plane + static_cast<Index>(i) * n_keys + key;
        const float* const of = stats + 3 * i;
        const float w = of[1] * exp2_flushed(s[n] * (scale * kLog2) - of[0]);
        const float noise_value = value_or(noise, valid, at, 1.0f);
        const float d = da[n] * noise_value + value_or(of_weights, valid, at, 0.0f);
        a[n] = noise_value * w;
        s[n] = scale * w * (d - of[2]);
      }
      unsigned even[kSteps], odd[kSteps];
      load_words(q + (j + 2 * t) * kRow + kSteps * g, even);
      load_words(q + (j + 2 * t + 1) * kRow + kSteps * g, odd);
      multiply_tile(of_keys, s, even, odd);
      load_words(grad_rows + (j + 2 * t) * kRow + kSteps * g, even);
      load_words(grad_rows + (j + 2 * t + 1) * kRow + kSteps * g, odd);
      multiply_tile(of_values, a, even, odd);
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const View& view = views[5 + which];
      In* const to = start(view, head, each);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = top + g + 8 * r;
        float row[kPart];
        accumulator_row(which == 0 ? of_keys : of_values, r, 1.0f, row);
        if (key < n_keys) store_row(to + key * view.row, kPart * t, view.width, row);
      }
    }
  }
}
RECAST_KERNEL(attention_tiles_backward)
