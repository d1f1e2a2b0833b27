// One layer of a compressed interaction network on tensor cores
// (runtime/interactions/cin_tiles.py): at every column, out[o] = act(bias[o] + Σ_h Σ_m W[o, h, m]
// x[h] y[m]).
//
// A warp takes 32 columns. It keeps DEEP steps of y in registers, forms the products x[h] y[m]
// there for one h after the other, and multiplies them by tiles of W, which cin_pack has put in the
// order of the lanes. So the (h, m) products are never written to memory.
//
// Macros:
//   RECAST_IN       dtype of the features: 0 fp32, 1 fp16, 2 bf16
//   RECAST_PRODUCT  dtype of products, weight and result, likewise; 0 multiplies in TF32. Sums are
//                   fp32
//   RECAST_DEEP     steps of 8 (TF32) or 16 inner features kept in registers at a time
//   RECAST_TILES    tiles of 16 outputs of a warp
//   RECAST_VEC      4: groups of four columns belong to one sample and are contiguous; 1: any
#include "cin_tiles.cuh"

namespace {

constexpr int kDeep = RECAST_DEEP;
constexpr int kTiles = RECAST_TILES;
constexpr int kAcross = 4;  // tiles of 8 columns: lane group g has columns 4 g to 4 g + 3 of a warp
constexpr int kLast =
    kDeep > 1 ? 2 : 1;  // of the kDeep steps, those that may reach past the last feature
constexpr int kRun = kTiles * 128;         // words of a step's tiles
constexpr int kStageWords = kDeep * kRun;  // words of one outer feature

// Kept: the inner features from which a lane makes one operand register. Factor: the outer feature
// that multiplies them.
#if RECAST_PRODUCT != 0 && RECAST_IN == RECAST_PRODUCT
using Kept = unsigned;
using Factor = unsigned;  // the number in both halves
__device__ __forceinline__ Kept kept_of(In low, In high) {
  return bits_of(low) | bits_of(high) << 16;
}
__device__ __forceinline__ Factor factor_of(In x) { return bits_of(x) * 0x10001u; }
__device__ __forceinline__ unsigned product(Kept kept, Factor by) { return times(kept, by); }
#else
struct Kept {
  float at[kEach];
};
using Factor = float;
__device__ __forceinline__ Kept kept_of(In low, [[maybe_unused]] In high) {
  Kept kept;
  kept.at[0] = recast::widen(low);
  if constexpr (kEach == 2) kept.at[kEach - 1] = recast::widen(high);
  return kept;
}
__device__ __forceinline__ Factor factor_of(In x) { return recast::widen(x); }
__device__ __forceinline__ unsigned product(const Kept& kept, Factor by) {
  return pack_operand(kept.at[0] * by, kept.at[kEach - 1] * by);
}
#endif

// Registers for sums and kept features, which decide whether two blocks fit on a multiprocessor.
constexpr int kHeld = kTiles * 16 + kDeep * 8 * static_cast<int>(sizeof(Kept) / 4);

// Loads the inner features of operand registers 0 and 1 of each step, for each tile of columns.
__device__ __forceinline__ void keep(Kept (&kept)[kDeep][2][kAcross], const View<const In>& y,
                                     const Columns<kAcross>& columns, int first, int count, int t) {
#pragma unroll
  for (int s = 0; s < kDeep; ++s)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      recast::Pack<In, kAcross> rows[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int m = first + s * kDepth + t * kEach + r * kDepth / 2 + i;
        rows[i] =
            m < count ? read<kAcross>(y.at + m * y.feature, columns) : recast::zeros<kAcross, In>();
      }
#pragma unroll
      for (int j = 0; j < kAcross; ++j)
        kept[s][r][j] = kept_of(rows[0].at[j], rows[kEach - 1].at[j]);
    }
}

}  // namespace

// The weight in the order of the lanes: packed[slice][step][tile][lane] are the four registers of
// A[row, k] = weight[slice * of_slice + row * of_row + k * of_k], zeros behind its end, with rows
// in tiles of 16 and k in steps of kDepth. Launch: grid = ceil(slices * steps * tiles / 8), block =
// 256.
extern "C" __global__ void __launch_bounds__(256)
    cin_pack(const Product* __restrict__ weight, Index of_slice, Index of_row, Index of_k,
             int slices, int steps, int tiles, int rows, int depth, unsigned* __restrict__ packed) {
  const int at = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (at >= slices * steps * tiles) return;
  const int tile = at % tiles, step = at / tiles % steps, slice = at / tiles / steps;
  const Product* const from = weight + slice * of_slice;
  __align__(16) unsigned words[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = tile * 16 + lane / 4 + q % 2 * 8;
    float values[2] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int k = step * kDepth + lane % 4 * kEach + q / 2 * (kDepth / 2) + i;
      if (row < rows && k < depth) values[i] = recast::widen(from[row * of_row + k * of_k]);
    }
    words[q] = pack_operand(values[0], values[1]);
  }
  recast::store<4>(packed + (static_cast<Index>(at) * 32 + lane) * 4,
                   *reinterpret_cast<const recast::Pack<unsigned, 4>*>(words));
}
RECAST_KERNEL(cin_pack)

// packed: as cin_pack makes it of slices of outer features, rows of outputs and k of inner
// features, with `steps` steps, a multiple of RECAST_DEEP and at most one more than there must be,
// and `tiles` tiles, one of RECAST_TILES. Launch: grid = (ceil(columns / 256), tiles /
// RECAST_TILES), block = 256, dynamic shared memory: 3 * RECAST_DEEP * RECAST_TILES * 512 bytes.
extern "C" __global__ void __launch_bounds__(256, kHeld <= (RECAST_VEC == 4 ? 80 : 64) ? 2 : 1)
    cin_forward(const In* __restrict__ x, Index x_sample, Index x_feature, Index x_element,
                int x_count, const In* __restrict__ y, Index y_sample, Index y_feature,
                Index y_element, int y_count, int dim, int columns,
                const unsigned* __restrict__ packed, int steps, int tiles,
                const Product* __restrict__ bias, Index bias_step, int outputs, int relu,
                Product* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(unsigned, shared);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = (blockIdx.x * 8 + threadIdx.x / 32) * 32, first_tile = blockIdx.y * kTiles;
  const View<const In> outer{x, x_sample, x_feature, x_element};
  const View<const In> inner{y, y_sample, y_feature, y_element};
  const auto x_columns = columns_of<kAcross>(outer, first + 4 * g, dim, columns);
  const auto y_columns = columns_of<kAcross>(inner, first + 4 * g, dim, columns);
  // The next stage of W to copy, kStages - 1 ahead of the one that is multiplied.
  const int all = steps / kDeep * x_count;
  const Index step_words = static_cast<Index>(tiles) * 128;  // from step to step
  const unsigned* group_start = packed + first_tile * 128;   // of the first feature
  const unsigned* next_tiles = group_start;
  int issued = 0, issued_h = 0, write_stage = 0;
  const auto prefetch_weight = [&]() {
    if (issued < all) {
      copy_async(shared + write_stage * kStageWords, next_tiles, kDeep, kRun, step_words);
      ++issued;
      next_tiles += steps * step_words;
      if (++issued_h == x_count) {
        issued_h = 0;
        group_start += kDeep * step_words;
        next_tiles = group_start;
      }
    }
    write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
    recast::async_commit();
  };
  for (int n = 0; n < kStages - 1; ++n) prefetch_weight();
  float sums[kTiles][kAcross][4] = {};
  Kept kept[kDeep][2][kAcross];
  unsigned feature_mask[kLast][2] = {};  // of the last steps: all ones where the feature exists
  recast::Pack<In, kAcross> next = read<kAcross>(x, x_columns);
  int h = 0, from_m = 0, read_stage = 0;
#pragma unroll 1
  for (int n = 0; n < all; ++n) {
    const auto value = next;
    if (h == 0) {
      keep(kept, inner, y_columns, from_m, y_count, t);
#pragma unroll
      for (int s = 0; s < kLast; ++s)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int m = from_m + (kDeep - kLast + s) * kDepth + t * kEach + r * kDepth / 2;
          feature_mask[s][r] = m >= y_count                ? 0u
                               : kHalf && m + 1 == y_count ? 0xffffu
                                                           : 0xffffffffu;
        }
    }
    if (++h == x_count) {
      h = 0;
      from_m += kDeep * kDepth;
    }
    next = read<kAcross>(x + h * x_feature, x_columns);
    recast::async_wait<kStages - 2>();
    __syncthreads();
    prefetch_weight();
    const unsigned* const from = shared + read_stage * kStageWords + lane * 4;
    read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
    Factor by[kAcross];
#pragma unroll
    for (int j = 0; j < kAcross; ++j) by[j] = factor_of(value.at[j]);
#pragma unroll
    for (int s = 0; s < kDeep; ++s) {
      unsigned a[kTiles][4];
#pragma unroll
      for (int o = 0; o < kTiles; ++o) {
        const auto four = recast::load<4>(from + s * kRun + o * 128);
#pragma unroll
        for (int q = 0; q < 4; ++q) a[o][q] = four.at[q];
      }
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        unsigned b[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          b[r] = product(kept[s][r][j], by[j]);
          // Past the last feature, where y is 0: an infinite x would make the product NaN.
          if (s >= kDeep - kLast)
            b[r] &= feature_mask[s < kDeep - kLast ? 0 : s - kDeep + kLast][r];
        }
#pragma unroll
        for (int o = 0; o < kTiles; ++o) multiply(sums[o][j], a[o], b);
      }
    }
  }
  recast::async_wait<0>();  // unused copies, but a thread must not exit before its cp.async are
                            // complete
  const View<Product> out_view{out, static_cast<Index>(outputs) * dim, dim, 1};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int column = first + 8 * t + 4 * e;
    const auto of_out = columns_of<kAcross>(out_view, column, dim, columns);
#pragma unroll
    for (int o = 0; o < kTiles; ++o)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = (first_tile + o) * 16 + g + 8 * r;
        if (row >= outputs) continue;
        const float bias_value = bias == nullptr ? 0.0f : recast::widen(bias[row * bias_step]);
        recast::Pack<Product, kAcross> pack;
#pragma unroll
        for (int j = 0; j < kAcross; ++j) {
          const float v = sums[o][j][2 * r + e] + bias_value;
          recast::narrow(relu && v < 0.0f ? 0.0f : v, pack.at[j]);
        }
        write<kAcross>(out + static_cast<Index>(row) * dim, of_out, column, columns, pack);
      }
  }
}
RECAST_KERNEL(cin_forward)
