// The gradients of both inputs of a compressed interaction layer on tensor cores
// (runtime/interactions/cin_tiles.py): with p[h, m] = Σ_o W[o, h, m] g[o] at every column,
// dx[h] = Σ_m p[h, m] y[m] and dy[m] = Σ_h p[h, m] x[h].
//
// A warp takes 8 * RECAST_ACROSS columns. It keeps g, y and the sums of dy in registers, and
// computes p of one h after the other from tiles of W, which cin_pack has put in the order of the
// lanes.
//
// Macros:
//   RECAST_IN       dtype of the features and their gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_PRODUCT  dtype of the weight, the result and its gradient, likewise; 0 multiplies in
//                   TF32. Sums are fp32
//   RECAST_STEPS    steps of 8 (TF32) or 16 outputs, all there are
//   RECAST_TILES    tiles of 16 inner features, all there are
//   RECAST_ACROSS   columns of a lane group: 2 or 4
//   RECAST_VEC      RECAST_ACROSS: so many columns belong to one sample and are contiguous; 1: any
#include "cin_tiles.cuh"

namespace {

constexpr int kSteps = RECAST_STEPS;
constexpr int kTiles = RECAST_TILES;
constexpr int kAcross = RECAST_ACROSS;
constexpr int kStageWords = kSteps * kTiles * 128;  // words of one outer feature
constexpr int kSums = 2 * kAcross;                  // columns for which a lane has sums of dx

// Sums over the eight lane groups. Each exchange halves the columns that a lane still sums, so that
// in the end a lane has the total of column kSums * t + g, or g / 2 if kSums is 4.
__device__ __forceinline__ float total(float (&sums)[kSums]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int lane_distance = 16, n = kSums / 2; lane_distance > 2; lane_distance /= 2, n /= 2) {
    if (n == 0) {
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], lane_distance);
      continue;
    }
    const bool upper = lane & lane_distance;
#pragma unroll
    for (int k = 0; k < (n > 0 ? n : 1); ++k) {
      const float received =
          __shfl_xor_sync(0xffffffffu, upper ? sums[k] : sums[k + n], lane_distance);
      sums[k] = (upper ? sums[k + n] : sums[k]) + received;
    }
  }
  return sums[0];
}

}  // namespace

// grad, and result, null where there was no relu: (batch, outputs, D) with any strides. packed: as
// cin_pack makes it of slices of outer features, rows of inner ones and k of outputs.
// Launch: grid = ceil(columns / (32 * RECAST_ACROSS)), block = 128, dynamic shared memory: 3 *
// RECAST_STEPS * RECAST_TILES * 512 bytes.
extern "C" __global__ void __launch_bounds__(128, 2)
    cin_inputs(const In* __restrict__ x, Index x_sample, Index x_feature, Index x_element,
               int x_count, const In* __restrict__ y, Index y_sample, Index y_feature,
               Index y_element, int y_count, int dim, int columns,
               const unsigned* __restrict__ packed, const Product* __restrict__ grad,
               Index grad_sample, Index grad_feature, Index grad_element,
               const Product* __restrict__ result, Index result_sample, Index result_feature,
               Index result_element, int outputs, In* __restrict__ dx, Index dx_sample,
               Index dx_feature, Index dx_element, In* __restrict__ dy, Index dy_sample,
               Index dy_feature, Index dy_element) {
  RECAST_DYNAMIC_SHARED(unsigned, shared);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = (blockIdx.x * 4 + threadIdx.x / 32) * 8 * kAcross;
  const auto prefetch_weight = [&](int h) {
    if (h < x_count)
      copy_async(shared + h % kStages * kStageWords, packed + static_cast<Index>(h) * kStageWords,
                 1, kStageWords, 0);
    recast::async_commit();
  };
  for (int h = 0; h < kStages - 1; ++h) prefetch_weight(h);

  // The gradient of the result: registers 0 and 1 of each step and tile of columns.
  unsigned grad_operand[kSteps][2][kAcross];
  {
    const View<const Product> grad_view{grad, grad_sample, grad_feature, grad_element};
    const View<const Product> result_view{result, result_sample, result_feature, result_element};
    const auto at = columns_of<kAcross>(grad_view, first + kAcross * g, dim, columns);
    const auto at_made = columns_of<kAcross>(result_view, first + kAcross * g, dim, columns);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float rows[2][kAcross] = {};
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int o = s * kDepth + t * kEach + r * kDepth / 2 + i;
          if (o >= outputs) continue;
          const auto pack = read<kAcross>(grad + o * grad_feature, at);
#pragma unroll
          for (int j = 0; j < kAcross; ++j) rows[i][j] = recast::widen(pack.at[j]);
          if (result == nullptr) continue;
          const auto output = read<kAcross>(result + o * result_feature, at_made);
#pragma unroll
          for (int j = 0; j < kAcross; ++j)
            if (recast::widen(output.at[j]) <= 0.0f) rows[i][j] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kAcross; ++j)
          grad_operand[s][r][j] = pack_operand(rows[0][j], rows[1][j]);
      }
  }

  // Rows g and g + 8 of each tile at the columns kSums * t and on.
  const int first_column = first + kSums * t;
  const View<const In> outer{x, x_sample, x_feature, x_element};
  const View<const In> inner{y, y_sample, y_feature, y_element};
  Columns<kAcross> of_x[2];
  float y_values[kTiles][2][kSums], dy_sums[kTiles][2][kSums] = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    of_x[e] = columns_of<kAcross>(outer, first_column + kAcross * e, dim, columns);
    const auto at = columns_of<kAcross>(inner, first_column + kAcross * e, dim, columns);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int m = tile * 16 + g + 8 * r;
        const auto pack =
            m < y_count ? read<kAcross>(y + m * y_feature, at) : recast::zeros<kAcross, In>();
#pragma unroll
        for (int j = 0; j < kAcross; ++j)
          y_values[tile][r][kAcross * e + j] = recast::widen(pack.at[j]);
      }
  }

  const View<In> dx_view{dx, dx_sample, dx_feature, dx_element};
  const int column = first + kSums * t + (kSums == 8 ? g : g / 2);
  const bool writes = column < columns && (kSums == 8 || g % 2 == 0);
  const int known = column < columns ? column : 0;
  In* const to = dx + (known / dim * dx_view.sample + known % dim * dx_view.element);
  recast::Pack<In, kAcross> next[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) next[e] = read<kAcross>(x, of_x[e]);
#pragma unroll 1
  for (int h = 0; h < x_count; ++h) {
    float value[kSums];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) value[kAcross * e + j] = recast::widen(next[e].at[j]);
      next[e] = read<kAcross>(x + (h + 1 < x_count ? h + 1 : 0) * x_feature, of_x[e]);
    }
    recast::async_wait<kStages - 2>();
    __syncthreads();
    prefetch_weight(h + kStages - 1);
    const unsigned* const from = shared + h % kStages * kStageWords + lane * 4;
    float sums[kSums] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float p[kAcross][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const auto four = recast::load<4>(from + (s * kTiles + tile) * 128);
        unsigned a[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) a[q] = four.at[q];
#pragma unroll
        for (int j = 0; j < kAcross; ++j) {
          const unsigned b[2] = {grad_operand[s][0][j], grad_operand[s][1][j]};
          multiply(p[j], a, b);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool in_range = tile < kTiles - 1 || tile * 16 + g + 8 * r < y_count;
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int j = 0; j < kAcross; ++j) {
            const int c = kAcross * e + j;
            // Past the last feature, where weights are 0: an infinite gradient would give NaN.
            const float p_value = in_range ? p[j][2 * r + e] : 0.0f;
            sums[c] += p_value * y_values[tile][r][c];
            dy_sums[tile][r][c] += p_value * value[c];
          }
      }
    }
    const float dx_total = total(sums);
    if (writes) recast::narrow(dx_total, to[h * dx_feature]);
  }

  recast::async_wait<0>();  // unused copies, but a thread must not exit before its cp.async are
                            // complete
  const View<In> dy_view{dy, dy_sample, dy_feature, dy_element};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const auto at = columns_of<kAcross>(dy_view, first_column + kAcross * e, dim, columns);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int m = tile * 16 + g + 8 * r;
        if (m >= y_count) continue;
        recast::Pack<In, kAcross> pack;
#pragma unroll
        for (int j = 0; j < kAcross; ++j)
          recast::narrow(dy_sums[tile][r][kAcross * e + j], pack.at[j]);
        write<kAcross>(dy + m * dy_feature, at, first_column + kAcross * e, columns, pack);
      }
  }
}
RECAST_KERNEL(cin_inputs)
