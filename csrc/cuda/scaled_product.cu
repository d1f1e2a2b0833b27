// A product of shape (rows, between, inner) multiplied by a scale (rows, inner):
//     out[r, e, i] = scale[r, i] product[r, e, i]
//     dscale[r, i] = Σ_e grad[r, e, i] product[r, e, i]
//     dproduct[r, e, i] = grad[r, e, i] scale[r, i]
// (runtime/interactions/scaled_einsum.py). A thread takes VEC columns i of a row r and all e, so
// that it loads its scale once.
//
// Macros:
//   RECAST_IN     dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_VEC    elements that a thread reads at once; divides `inner`: 1, 4, and 8 for 16 bits
//   RECAST_BLOCK  threads of a block
//
// Launch: grid = ceil(rows * inner / VEC / BLOCK), block = BLOCK, no dynamic shared memory. All
// tensors are contiguous and, where VEC is not 1, aligned to VEC elements.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kVec = RECAST_VEC;
using Pack = recast::Pack<In, kVec>;

// Where a thread works: in the scale, and first in the product.
struct Place {
  bool in_range;
  Index scale, product;
};

__device__ __forceinline__ Place place(Index rows, int between, int inner) {
  const Index at = static_cast<Index>(blockIdx.x) * RECAST_BLOCK + threadIdx.x;
  const int packs = inner / kVec;
  const Index row = at / packs;
  const Index column = at % packs * kVec;
  return {row < rows, row * inner + column, row * between * inner + column};
}

}  // namespace

// out may be the product itself.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    scaled_forward(const In* __restrict__ scale, const In* product, Index rows, int between,
                   int inner, In* out) {
  const Place at = place(rows, between, inner);
  if (!at.in_range) return;
  const Pack s = recast::load<kVec>(scale + at.scale);
#pragma unroll 4
  for (int k = 0; k < between; ++k) {
    Pack values = recast::load<kVec>(product + at.product + static_cast<Index>(k) * inner);
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      recast::narrow(recast::widen(values.at[e]) * recast::widen(s.at[e]), values.at[e]);
    recast::store<kVec>(out + at.product + static_cast<Index>(k) * inner, values);
  }
}
RECAST_KERNEL(scaled_forward)

extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    scaled_backward(const In* __restrict__ scale, const In* __restrict__ product,
                    const In* __restrict__ grad, Index rows, int between, int inner,
                    In* __restrict__ dscale, In* __restrict__ dproduct) {
  const Place at = place(rows, between, inner);
  if (!at.in_range) return;
  const Pack s = recast::load<kVec>(scale + at.scale);
  float sums[kVec] = {};
#pragma unroll 4
  for (int k = 0; k < between; ++k) {
    const Index from = at.product + static_cast<Index>(k) * inner;
    const Pack values = recast::load<kVec>(product + from);
    Pack g = recast::load<kVec>(grad + from);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      sums[e] += recast::widen(values.at[e]) * recast::widen(g.at[e]);
      recast::narrow(recast::widen(g.at[e]) * recast::widen(s.at[e]), g.at[e]);
    }
    recast::store<kVec>(dproduct + from, g);
  }
  Pack result;
#pragma unroll
  for (int e = 0; e < kVec; ++e) recast::narrow(sums[e], result.at[e]);
  recast::store<kVec>(dscale + at.scale, result);
}
RECAST_KERNEL(scaled_backward)
