// The elementwise steps around the matrix products of a compressed interaction layer, where those
// are computed by a library (runtime/interactions/compressed_cuda.py):
//     cin_products    products[h, m] = x[h] y[m] at every column
//     cin_gradients   from their gradient p: dx[h] = Σ_m p[h, m] y[m] and dy[m] = Σ_h p[h, m] x[h]
// A column is one element d of one sample; consecutive columns are contiguous in the matrix of
// products, and consecutive threads take consecutive columns.
//
// Macros:
//   RECAST_IN       dtype of the features and their gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_PRODUCT  dtype of the products and their gradient, likewise; sums are fp32
//   RECAST_BLOCK    threads of a block of cin_products, and the most of one of cin_gradients
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;
using Product = recast::Dtype<RECAST_PRODUCT>::type;

constexpr int kHeld = 8;  // outer features that a thread of cin_products holds in registers

// products[(h * m_count + m) * columns + r] = x[h] y[m] at column r, of samples `first` and on.
// Features are (batch, features, D) with any strides; kVec divides D.
template <int kVec>
__device__ __forceinline__ void multiply(const In* __restrict__ x, Index x_sample, Index x_feature,
                                         Index x_element, const In* __restrict__ y, Index y_sample,
                                         Index y_feature, Index y_element, int h_count, int m_count,
                                         int dim, int first, int columns,
                                         Product* __restrict__ products) {
  const int r = (blockIdx.x * RECAST_BLOCK + threadIdx.x) * kVec;
  if (r >= columns) return;
  const int sample = first + r / dim, d = r % dim, h0 = blockIdx.y * kHeld;
  const In* const from_x = x + sample * x_sample + d * x_element;
  const In* const from_y = y + sample * y_sample + d * y_element;
  float held[kHeld][kVec];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      held[i][e] =
          h0 + i < h_count ? recast::widen(from_x[(h0 + i) * x_feature + e * x_element]) : 0.0f;
  for (int m = 0; m < m_count; ++m) {
    float value[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) value[e] = recast::widen(from_y[m * y_feature + e * y_element]);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (h0 + i >= h_count) break;
      recast::Pack<Product, kVec> pack;
#pragma unroll
      for (int e = 0; e < kVec; ++e) recast::narrow(held[i][e] * value[e], pack.at[e]);
      const Index row = static_cast<Index>(h0 + i) * m_count + m;
      recast::store<kVec>(products + row * columns + r, pack);
    }
  }
}

}  // namespace

// Launch: grid = (ceil(columns / BLOCK), ceil(h_count / 8)), block = RECAST_BLOCK, no dynamic
// shared memory; for cin_products_4, where 4 divides D, a fourth of the columns.
#define RECAST_PRODUCTS(name, vec)                                                               \
  extern "C" __global__ void __launch_bounds__(RECAST_BLOCK) name(                               \
      const In* __restrict__ x, Index x_sample, Index x_feature, Index x_element,                \
      const In* __restrict__ y, Index y_sample, Index y_feature, Index y_element, int h_count,   \
      int m_count, int dim, int first, int columns, Product* __restrict__ products) {            \
    multiply<vec>(x, x_sample, x_feature, x_element, y, y_sample, y_feature, y_element, h_count, \
                  m_count, dim, first, columns, products);                                       \
  }                                                                                              \
  RECAST_KERNEL(name)
RECAST_PRODUCTS(cin_products, 1)
RECAST_PRODUCTS(cin_products_4, 4)

// of_outer[a] = Σ_b p[a, b] inner[b] and of_inner[b] = Σ_a p[a, b] outer[a] at every column r, with
// p[a, b] = gradient[(a * outer_step + b * inner_step) * columns + r]. A warp takes 32 columns and
// the outer features w, w + warps and so on. Launch: grid = ceil(columns / 32), block = 32 * warps,
// dynamic shared memory: (warps + 1) * inner_count * 32 floats.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    cin_gradients(const Product* __restrict__ gradient, Index outer_step, Index inner_step,
                  const In* __restrict__ outer, Index outer_sample, Index outer_feature,
                  Index outer_element, int outer_count, const In* __restrict__ inner,
                  Index inner_sample, Index inner_feature, Index inner_element, int inner_count,
                  int dim, int first, int columns, In* __restrict__ of_outer, Index into_sample,
                  Index into_feature, Index into_element, In* __restrict__ of_inner,
                  Index back_sample, Index back_feature, Index back_element) {
  RECAST_DYNAMIC_SHARED(float, values);  // (inner_count, 32), and sums of every warp likewise
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int r = blockIdx.x * 32 + lane, sample = first + r / dim, d = r % dim;
  float* const sums = values + (warp + 1) * inner_count * 32;
  const bool in_range = r < columns;
  if (in_range) {
    const In* const from = inner + sample * inner_sample + d * inner_element;
    for (int b = warp; b < inner_count; b += warps)
      values[b * 32 + lane] = recast::widen(from[b * inner_feature]);
    for (int b = 0; b < inner_count; ++b) sums[b * 32 + lane] = 0.0f;
  }
  __syncthreads();
  if (in_range) {
    const In* from = outer + sample * outer_sample + d * outer_element + warp * outer_feature;
    In* to = of_outer + sample * into_sample + d * into_element + warp * into_feature;
    const Product* row = gradient + warp * outer_step * columns + r;
    const Index next = inner_step * columns;
#pragma unroll 1  // unrolling would spill registers
    for (int a = warp; a < outer_count; a += warps) {
      const float x = recast::widen(*from);
      const Product* at = row;
      float sum = 0.0f;
#pragma unroll 4
      for (int b = lane; b < inner_count * 32; b += 32, at += next) {
        const float p = recast::widen(*at);
        sum += p * values[b];
        sums[b] += p * x;
      }
      recast::narrow(sum, *to);
      from += warps * outer_feature;
      to += warps * into_feature;
      row += warps * outer_step * columns;
    }
  }
  __syncthreads();
  if (!in_range) return;
  for (int b = warp; b < inner_count; b += warps) {
    float all = 0.0f;
    for (int w = 1; w <= warps; ++w) all += values[(w * inner_count + b) * 32 + lane];
    recast::narrow(all, of_inner[sample * back_sample + b * back_feature + d * back_element]);
  }
}
RECAST_KERNEL(cin_gradients)
