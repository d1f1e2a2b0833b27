// What pair_forward.cu and pair_backward.cu share (runtime/interactions/pair_products.py has the
// formulas). Both work tile by tile: a block takes a few samples at a time and copies their vectors
// to shared memory by cp.async while it works on those before. The pairs are read once a block, for
// all its samples.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM      what is summed: 0 nothing, (batch, pairs, D); 1 columns, (batch, pairs);
//                   2 pairs, (batch, D); 3 both, (batch, 1)
//   RECAST_VEC      columns that a thread reads at once; divides D and all strides, and vectors
//                   start at multiples of VEC elements: 1, 2, 4, and 8 for 16-bit vectors
#pragma once

#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::Pack;
using recast::UInt64;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kThreads = 128;
constexpr int kVec = RECAST_VEC;
constexpr int kBlocks = kVec > 4          ? 4
                        : RECAST_SUM == 1 ? 8
                                          : 7;  // resident on a multiprocessor, by registers
constexpr int kInFlight = 4;                    // loads of a thread in flight
constexpr int kPer16 = 16 / sizeof(In);
enum Sum { none, columns, pairs, both };
constexpr Sum kSum = static_cast<Sum>(RECAST_SUM);
constexpr bool kPerPair =
    kSum == none || kSum == columns;  // whether each pair has results of its own
constexpr unsigned kFull = 0xffffffffu, kAbsent = 0xffffffffu;

// One vector of all samples: where sample 0's starts, and elements from one sample's to the next.
struct Row {
  const In* at;
  Index stride;
};

// The pairs: places in the vectors of each side, counted from the end where negative, and their
// weights, (batch, count) with any row stride, or null.
struct Pairs {
  const Index* left;
  const Index* right;
  const In* weight;
  Index weight_stride;
  int count;
};

// Sizes, and how the work is cut. n_right 0: both vectors of a pair are on the left.
struct Shape {
  int n_left, n_right;
  int dim, batch;
  int samples;     // of a tile
  int pitch;       // elements from one vector to the next in shared memory
  int copy_lanes;  // threads that copy one vector: a power of two up to 32
  int lanes;       // threads that compute on one; equal to copy_lanes in pair_backward
  int columns;     // of D in a tile: all in pair_forward
  int in_shared;   // whether the pairs are in shared memory too

  __device__ __forceinline__ int vectors() const { return n_left + n_right; }
};

// Sum over a group of `lanes` lanes; called by the whole warp.
__device__ __forceinline__ float group_sum(float value, int lanes) {
  for (int d = lanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(kFull, value, d, lanes);
  return value;
}

__device__ __forceinline__ int rounded(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Iterates over (sample, item) pairs with stride `step`, `count` items a sample, without dividing.
struct SampleItems {
  int sample, item;
  int samples_on, items_on, count;

  __device__ __forceinline__ SampleItems(int first, int step, int count)
      : sample(first / count),
        item(first % count),
        samples_on(step / count),
        items_on(step % count),
        count(count) {}
  __device__ __forceinline__ void next() {
    sample += samples_on;
    item += items_on;
    if (item >= count) {
      item -= count;
      ++sample;
    }
  }
};

// The vector at index `place` of a side; -1 if out of range: pairs of such vectors are skipped.
__device__ __forceinline__ int vector_at(Index place, int count, int first) {
  if (place < 0) place += count;
  return place < 0 || place >= count ? -1 : first + static_cast<int>(place);
}
__device__ __forceinline__ int left_of(const Pairs& given, const Shape& shape, int p) {
  return vector_at(given.left[p], shape.n_left, 0);
}
__device__ __forceinline__ int right_of(const Pairs& given, const Shape& shape, int p) {
  return shape.n_right == 0 ? vector_at(given.right[p], shape.n_left, 0)
                            : vector_at(given.right[p], shape.n_right, shape.n_left);
}

// The offsets of a pair's vectors within a sample in shared memory, 16 bits each; kAbsent if one is
// out of range.
__device__ __forceinline__ unsigned starts_of(const Pairs& given, const Shape& shape, int p) {
  const int i = left_of(given, shape, p), j = right_of(given, shape, p);
  if (i < 0 || j < 0) return kAbsent;
  return static_cast<unsigned>(i * shape.pitch) | static_cast<unsigned>(j * shape.pitch) << 16;
}

__device__ __forceinline__ float weight_of(const Pairs& given, Index sample, int p) {
  return given.weight == nullptr ? 1.0f
                                 : recast::widen(given.weight[sample * given.weight_stride + p]);
}

// How many items of `wide` elements the first thread starts before `at`, so that warps access whole
// lines of 128 bytes; 0 if an item is not exactly what a group of threads takes at once.
__device__ __forceinline__ int alignment_shift(const In* at, int wide, int at_once, int slots) {
  const int bytes = static_cast<int>(reinterpret_cast<UInt64>(at) % 128);
  const int of_item = wide * static_cast<int>(sizeof(In));
  if (wide != at_once || bytes % of_item != 0) return 0;
  return bytes / of_item % slots;
}

// Starts a copy of `count` contiguous elements, between 16-byte aligned addresses, by cp.async.
__device__ __forceinline__ void copy_contiguous(const In* from, In* to, int count) {
  const int packs = count / kPer16, thread = static_cast<int>(threadIdx.x);
  const int before = static_cast<int>(reinterpret_cast<UInt64>(from) % 128) / 16;
  for (int k = thread - before; k < packs; k += kThreads)
    if (k >= 0) recast::async_copy_16(to + k * kPer16, from + k * kPer16);
  const int rest = packs * kPer16 + thread;
  if (rest < count) to[rest] = from[rest];
}

// Copies `columns` columns of `count` items of each of `samples` samples, in vectors of `Vec`
// elements; those of 16 bytes by cp.async. `from(sample, item)` and `to(sample, item)` are the
// addresses of an item's first column.
template <int Vec, class From, class To>
__device__ __forceinline__ void copy(int samples, int count, int columns, int copy_lanes, From from,
                                     To to) {
  const int lane = static_cast<int>(threadIdx.x) % copy_lanes;
  const int slot = static_cast<int>(threadIdx.x) / copy_lanes;
  for (int c = lane * Vec; c < columns; c += copy_lanes * Vec) {
    const int slots = kThreads / copy_lanes;
    const int item = slot - alignment_shift(from(0, 0), columns, copy_lanes * Vec, slots);
    bool skips = item < 0;
    SampleItems at(skips ? item + slots : item, slots, count);
    if constexpr (Vec * sizeof(In) == 16) {
      while (at.sample < samples) {
        if (!skips) {
          recast::async_copy_16(to(at.sample, at.item) + c, from(at.sample, at.item) + c);
          at.next();
        }
        skips = false;
      }
    } else {
      while (at.sample < samples) {
        Pack<In, Vec> held[kInFlight];
        In* into[kInFlight];
#pragma unroll
        for (int a = 0; a < kInFlight; ++a, at.next()) {
          into[a] = nullptr;
          if (at.sample >= samples) continue;
          held[a] = recast::load<Vec>(from(at.sample, at.item) + c);
          into[a] = to(at.sample, at.item) + c;
        }
#pragma unroll
        for (int a = 0; a < kInFlight; ++a)
          if (into[a] != nullptr) recast::store<Vec>(into[a], held[a]);
      }
    }
  }
}

// Copies the vectors of `count` samples from `first` on, columns from `start` on, to `values`
// (samples, vectors, pitch).
__device__ __forceinline__ void read(const Row* rows, const Shape& shape, int first, int count,
                                     int start, In* values) {
  const int vectors = shape.vectors(), pitch = shape.pitch;
  copy<kVec>(
      count, vectors, min(shape.columns, shape.dim - start), shape.copy_lanes,
      [=](int sample, int item) {
        const Row row = rows[item];
        return row.at + (first + sample) * row.stride + start;
      },
      [=](int sample, int item) { return values + (sample * vectors + item) * pitch; });
}

__device__ __forceinline__ Pack<float, kVec> widened(const In* from) {
  const auto pack = recast::load<kVec>(from);
  Pack<float, kVec> wide;
#pragma unroll
  for (int e = 0; e < kVec; ++e) wide.at[e] = recast::widen(pack.at[e]);
  return wide;
}

__device__ __forceinline__ Pack<float, kVec> filled(float value) {
  Pack<float, kVec> wide;
#pragma unroll
  for (int e = 0; e < kVec; ++e) wide.at[e] = value;
  return wide;
}

// The dot product of two vectors, with several loads in flight.
__device__ __forceinline__ float product(const In* x, const In* y, int dim) {
  float sum = 0.0f;
  int c = 0;
  for (; c + kInFlight * kVec <= dim; c += kInFlight * kVec) {
    Pack<float, kVec> left[kInFlight], right[kInFlight];
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      left[a] = widened(x + c + a * kVec);
      right[a] = widened(y + c + a * kVec);
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a)
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum += left[a].at[e] * right[a].at[e];
  }
  for (; c < dim; c += kVec) {
    const auto left = widened(x + c), right = widened(y + c);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum += left.at[e] * right.at[e];
  }
  return sum;
}

}  // namespace
