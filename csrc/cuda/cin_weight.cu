// The gradient of the weight of a compressed interaction layer on tensor cores
// (runtime/interactions/cin_tiles.py): dW[o, h, m] = Σ g[o] x[h] y[m] over all columns, and Σ g[o]
// for the bias.
//
// A block of eight warps takes some outputs, outer and inner features, and every gridDim.x-th chunk
// of columns, which it stages in shared memory, double-buffered: the next chunk is loaded to
// registers while the present one is multiplied. Blocks with other columns of the same outputs
// write partial sums, which the host adds in the order of the blocks.
//
// Macros:
//   RECAST_IN       dtype of the features: 0 fp32, 1 fp16, 2 bf16
//   RECAST_PRODUCT  dtype of the result and its gradient, likewise; 0 multiplies in TF32. Sums are
//                   fp32
//   RECAST_OUTER    outer features of a warp
//   RECAST_INNER    tiles of 8 inner features of a warp
//   RECAST_SPLIT    1, 2, 4 or 8 warps of a block share outer features and divide the inner ones
//   RECAST_VEC      4: groups of four columns belong to one sample and are contiguous; 1: any
#include "cin_tiles.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kOuter = RECAST_OUTER;
constexpr int kInner = RECAST_INNER;
constexpr int kSplit = RECAST_SPLIT;
constexpr int kOuters = kOuter * (8 / kSplit);  // of a block
constexpr int kInners = 8 * kInner * kSplit;
constexpr int kTiles = 2;  // tiles of 16 outputs
constexpr int kOuts = 16 * kTiles;
constexpr int kChunk = 32 * kEach;  // columns
// Shared memory holds the gradients of outputs, two rows interleaved in one, then inner and outer
// features. The strides in words avoid bank conflicts.
constexpr int kPair = 68;
constexpr int kRow = 48;
constexpr int kGrads = kOuts / 2 * kPair;
constexpr int kBufferWords = kGrads + (kInners + kOuters) * kRow;
constexpr int kFeatures = 8 * (kInners + kOuters);  // 16 bytes each
constexpr int kRowsOfThread = (kFeatures + kThreads - 1) / kThreads;
static_assert(8 * kOuts == kThreads, "a thread loads 16 bytes of a gradient row");

// A row of which a thread loads 16 bytes of every chunk. Null: zeros.
template <class T>
struct Row {
  const T* at;
  Index sample, element;
};

// Sample and element of four columns; sample -1 behind the last one: zeros.
struct Place {
  int sample[RECAST_VEC == 4 ? 1 : 4], element[RECAST_VEC == 4 ? 1 : 4];
};

__device__ __forceinline__ Place place(int column, int dim, int end) {
  Place found;
#pragma unroll
  for (int j = 0; j < (RECAST_VEC == 4 ? 1 : 4); ++j) {
    found.sample[j] = column + j < end ? (column + j) / dim : -1;
    found.element[j] = (column + j) % dim;
  }
  return found;
}

template <class T>
__device__ __forceinline__ recast::Pack<T, 4> take(const Row<T>& row, const Place& place) {
  auto found = recast::zeros<4, T>();
  if constexpr (RECAST_VEC == 4) {
    if (row.at != nullptr && place.sample[0] >= 0)
      found = recast::load<4>(row.at + place.sample[0] * row.sample + place.element[0]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row.at != nullptr && place.sample[j] >= 0)
        found.at[j] = row.at[place.sample[j] * row.sample + place.element[j] * row.element];
  }
  return found;
}

// Stores features to shared memory. For TF32 they stay fp32, as only their products are rounded.
__device__ __forceinline__ void write(const recast::Pack<In, 4> (&values)[kEach], unsigned* to) {
  recast::Pack<unsigned, 4> words;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float low = recast::widen(values[kEach * q / 4].at[kEach * q % 4]);
    const float high = recast::widen(values[kEach * q / 4].at[(kEach * q + kEach - 1) % 4]);
    words.at[q] = kHalf ? pack_operand(low, high) : __float_as_uint(low);
  }
  recast::store<4>(to, words);
}

// The product of two registers of features.
__device__ __forceinline__ unsigned of_pair(unsigned a, unsigned b) {
#if RECAST_PRODUCT != 0
  return times(a, b);
#else
  return recast::to_tf32(__uint_as_float(a) * __uint_as_float(b));
#endif
}

}  // namespace

// grad, and result, null where there was no relu: (batch, outputs, D) with any strides. Block
// blockIdx.x takes every gridDim.x-th chunk of columns. parts[blockIdx.x * part_stride + o *
// of_output + h * of_outer + m * of_inner] is a partial sum of the weight's gradient, and
// parts[blockIdx.x * part_stride + bias_offset + o] one of the bias's. Launch: grid = (any,
// ceil(x_count / outers) * ceil(outputs / 32), ceil(y_count / inners)) with outers = OUTER * 8 /
// SPLIT and inners = 8 * INNER * SPLIT, block = 256, dynamic shared memory: 8704 + 384 * (inners +
// outers) bytes.
extern "C" __global__ void __launch_bounds__(256, 1)
    cin_weight(const In* __restrict__ x, Index x_sample, Index x_feature, Index x_element,
               int x_count, const In* __restrict__ y, Index y_sample, Index y_feature,
               Index y_element, int y_count, int dim, int columns, const Product* __restrict__ grad,
               Index grad_sample, Index grad_feature, Index grad_element,
               const Product* __restrict__ result, Index result_sample, Index result_feature,
               Index result_element, int outputs, Index of_output, Index of_outer, Index of_inner,
               Index bias_offset, Index part_stride, float* __restrict__ parts) {
  RECAST_DYNAMIC_SHARED(unsigned, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int own_x = warp / kSplit * kOuter, own_y = warp % kSplit * 8 * kInner;
  const int groups = (x_count + kOuters - 1) / kOuters;
  const int x_first = static_cast<int>(blockIdx.y) % groups * kOuters;
  const int first = static_cast<int>(blockIdx.y) / groups * kOuts;
  const int y_first = blockIdx.z * kInners;
  // What this thread loads of every chunk: an output's gradient, and inner and outer features.
  const int vector_of_row = threadIdx.x % 8, row_of_thread = threadIdx.x / 8;
  Row<Product> of_grad{nullptr, grad_sample, grad_element};
  Row<Product> of_result{nullptr, result_sample, result_element};
  if (first + row_of_thread < outputs) {
    of_grad.at = grad + (first + row_of_thread) * grad_feature;
    if (result != nullptr) of_result.at = result + (first + row_of_thread) * result_feature;
  }
  Row<In> features[kRowsOfThread];
#pragma unroll
  for (int k = 0; k < kRowsOfThread; ++k) {
    const int row = row_of_thread + k * (kThreads / 8);
    const int m = y_first + row, h = x_first + row - kInners;
    features[k] = {nullptr, 0, 0};
    if (row < kInners && m < y_count)
      features[k] = {y + m * y_feature, y_sample, y_element};
    else if (row >= kInners && row < kInners + kOuters && h < x_count)
      features[k] = {x + h * x_feature, x_sample, x_element};
  }
  float sums[kOuter][kTiles][kInner][4] = {};
  float bias_sum = 0.0f;
  recast::Pack<Product, 4> next_grad[kEach], next_result[kEach];
  recast::Pack<In, 4> next_features[kRowsOfThread][kEach];
  const auto load_chunk = [&](int chunk) {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const Place at = place(chunk + vector_of_row * 4 * kEach + 4 * n, dim, columns);
      next_grad[n] = take(of_grad, at);
      next_result[n] = take(of_result, at);
#pragma unroll
      for (int k = 0; k < kRowsOfThread; ++k) next_features[k][n] = take(features[k], at);
    }
  };
  const auto store_chunk = [&](unsigned* to) {
    float values[4 * kEach];
#pragma unroll
    for (int j = 0; j < 4 * kEach; ++j) {
      const bool is_zero = result != nullptr && recast::widen(next_result[j / 4].at[j % 4]) <= 0.0f;
      values[j] = is_zero ? 0.0f : recast::widen(next_grad[j / 4].at[j % 4]);
      bias_sum += values[j];
    }
    recast::Pack<unsigned, 4> words;
#pragma unroll
    for (int q = 0; q < 4; ++q)
      words.at[q] = pack_operand(values[kEach * q], values[kEach * q + kEach - 1]);
    // Rows g and g + 8 interleaved: a lane then loads what it needs of both for a step as 16 bytes.
#pragma unroll
    for (int q = 0; q < 4; ++q)
      to[(row_of_thread / 16 * 8 + row_of_thread % 8) * kPair + (vector_of_row * 4 + q) * 2 +
         row_of_thread / 8 % 2] = words.at[q];
#pragma unroll
    for (int k = 0; k < kRowsOfThread; ++k) {
      const int row = row_of_thread + k * (kThreads / 8);
      if (row < kInners + kOuters)
        write(next_features[k], to + kGrads + row * kRow + vector_of_row * 4);
    }
  };
  const int step = gridDim.x * kChunk;
  int chunk = blockIdx.x * kChunk;
  if (chunk < columns) {
    load_chunk(chunk);
    store_chunk(shared);
  }
  __syncthreads();
#pragma unroll 1
  for (int buffer = 0; chunk < columns; chunk += step, buffer ^= 1) {
    const bool has_next = columns - chunk > step;
    if (has_next) load_chunk(chunk + step);
    const unsigned* const from = shared + buffer * kBufferWords;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 64 bytes of every row: two steps
      const auto four = [&](int row) {
        return recast::load<4>(from + kGrads + row * kRow + half * 16 + t * 4);
      };
      unsigned a[kTiles][2][4];
      recast::Pack<unsigned, 4> inner[kInner];
#pragma unroll
      for (int o = 0; o < kTiles; ++o)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const auto pack = recast::load<4>(from + (8 * o + g) * kPair + half * 32 + t * 8 + s * 4);
#pragma unroll
          for (int q = 0; q < 4; ++q) a[o][s][q] = pack.at[q];
        }
#pragma unroll
      for (int n = 0; n < kInner; ++n) inner[n] = four(own_y + 8 * n + g);
#pragma unroll
      for (int h = 0; h < kOuter; ++h) {
        const auto value = four(kInners + own_x + h);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int n = 0; n < kInner; ++n) {
            const unsigned b[2] = {of_pair(value.at[2 * s], inner[n].at[2 * s]),
                                   of_pair(value.at[2 * s + 1], inner[n].at[2 * s + 1])};
#pragma unroll
            for (int o = 0; o < kTiles; ++o) multiply(sums[h][o][n], a[o][s], b);
          }
      }
    }
    if (has_next) store_chunk(shared + (buffer ^ 1) * kBufferWords);
    __syncthreads();
  }
  float* const to = parts + blockIdx.x * part_stride;
#pragma unroll
  for (int h = 0; h < kOuter; ++h) {
    const int at = x_first + own_x + h;
    if (at >= x_count) continue;
#pragma unroll
    for (int o = 0; o < kTiles; ++o)
#pragma unroll
      for (int n = 0; n < kInner; ++n)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int row = first + 16 * o + g + q / 2 * 8,
                    m = y_first + own_y + 8 * n + 2 * t + q % 2;
          if (row < outputs && m < y_count)
            to[row * of_output + at * of_outer + m * of_inner] = sums[h][o][n][q];
        }
  }
  // Eight neighbouring threads have partial sums of the same output.
#pragma unroll
  for (int lane_distance = 4; lane_distance > 0; lane_distance /= 2)
    bias_sum += __shfl_xor_sync(0xffffffffu, bias_sum, lane_distance);
  if (first + row_of_thread < outputs && vector_of_row == 0 && x_first == 0 && y_first == 0)
    to[bias_offset + first + row_of_thread] = bias_sum;
}
RECAST_KERNEL(cin_weight)
