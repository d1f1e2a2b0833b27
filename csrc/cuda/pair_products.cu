// Products of pairs of feature vectors, as they are or summed
// (runtime/interactions/pair_products.py has the formulas). A block takes a few samples at a time:
// their vectors are read once, into shared memory, while it works on those before; so are the
// pairs, once for all its samples. Results are written by consecutive threads as they lie. Backward
// every vector sums over the pairs that it is in, which pair_lists has gathered: nothing is added
// up in memory, and always in the order of the pairs.
//
// Macros:
//   RECAST_IN       dtype of all tensors: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM      what is summed: 0 nothing, (batch, pairs, D); 1 columns, (batch, pairs);
//                   2 pairs, (batch, D); 3 both, (batch, 1)
//   RECAST_VEC      columns that a thread reads at once; divides D and all strides, and vectors
//                   start at multiples of VEC elements: 1, 2, 4, and 8 for 16-bit vectors
//
// Launch: grid = as many blocks as run at once, pair_backward's second dimension ceil(D / columns);
// block = 128; dynamic shared memory: the kernels say what. pair_lists: grid = vectors of both
// sides, block = 256, none. pair_rows says its own.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::Pack;
using recast::Wide;
using In = recast::Dtype<RECAST_IN>::type;

constexpr int kThreads = 128, kListThreads = 256;
constexpr int kVec = RECAST_VEC;
constexpr int kBlocks = kVec > 4          ? 4
                        : RECAST_SUM == 1 ? 8
                                          : 7;  // of a multiprocessor, by registers
constexpr int kAhead = 4;                       // reads of a thread that are under way at once
constexpr int kPer16 = 16 / sizeof(In);
constexpr int kRounds = 16;  // vectors that a thread of pair_rows writes a part of
enum Sum { none, columns, pairs, both };
constexpr Sum kSum = static_cast<Sum>(RECAST_SUM);
constexpr bool kEach = kSum == none || kSum == columns;  // pairs have results of their own
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

// How the work is cut. No vectors on the right: those of the left.
struct Shape {
  int n_left, n_right;
  int dim, batch;
  int samples;  // that a block takes at a time
  int pitch;    // elements from one vector to the next in shared memory
  int readers;  // threads that share a vector where it is read: a power of two up to 32
  int lanes;    // the same where it is worked on, in pair_backward as many
  int columns;  // of D that a block takes at a time: all of them in pair_forward
  int listed;   // whether what is known of pairs is in shared memory

  __device__ __forceinline__ int vectors() const { return n_left + n_right; }
};

// Sums over groups of lanes, all of a warp together.
__device__ __forceinline__ float group_sum(float value, int lanes) {
  for (int d = lanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(kFull, value, d, lanes);
  return value;
}

__device__ __forceinline__ int rounded(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Steps through `count` items of each sample in turn, `step` items at a time: without a division.
struct Walk {
  int sample, item;
  int samples_on, items_on, count;

  __device__ __forceinline__ Walk(int first, int step, int count)
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

// The vector at a place of a side; -1 for one that is not there, whose pairs are left out.
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

// Where both vectors of a pair start in a sample's shared memory, 16 bits each.
__device__ __forceinline__ unsigned starts_of(const Pairs& given, const Shape& shape, int p) {
  const int i = left_of(given, shape, p), j = right_of(given, shape, p);
  if (i < 0 || j < 0) return kAbsent;
  return static_cast<unsigned>(i * shape.pitch) | static_cast<unsigned>(j * shape.pitch) << 16;
}

__device__ __forceinline__ float weight_of(const Pairs& given, Index sample, int p) {
  return given.weight == nullptr ? 1.0f
                                 : recast::widen(given.weight[sample * given.weight_stride + p]);
}

// By how many items of `wide` elements the first thread starts before `at`, so that those of a warp
// read or write whole lines of 128 bytes; 0 where an item is not what `lanes` take at once.
__device__ __forceinline__ int shift(const In* at, int wide, int at_once, int slots) {
  const int bytes = static_cast<int>(reinterpret_cast<Wide>(at) % 128);
  const int of_item = wide * static_cast<int>(sizeof(In));
  if (wide != at_once || bytes % of_item != 0) return 0;
  return bytes / of_item % slots;
}

// Copies `count` elements that lie side by side, from and to multiples of 16 bytes; they arrive
// later.
__device__ __forceinline__ void copy_whole(const In* from, In* to, int count) {
  const int packs = count / kPer16, thread = static_cast<int>(threadIdx.x);
  const int before = static_cast<int>(reinterpret_cast<Wide>(from) % 128) / 16;
  for (int k = thread - before; k < packs; k += kThreads)
    if (k >= 0) recast::async_copy_16(to + k * kPer16, from + k * kPer16);
  const int rest = packs * kPer16 + thread;
  if (rest < count) to[rest] = from[rest];
}

// Copies pieces of so many columns of `count` items of each of `samples` samples; those of 16 bytes
// arrive later. `from(sample, item)` and `to(sample, item)` say where an item's columns start.
template <int Piece, class From, class To>
__device__ __forceinline__ void copy(int samples, int count, int columns, int readers, From from,
                                     To to) {
  const int lane = static_cast<int>(threadIdx.x) % readers;
  const int slot = static_cast<int>(threadIdx.x) / readers;
  for (int c = lane * Piece; c < columns; c += readers * Piece) {
    const int slots = kThreads / readers;
    const int item = slot - shift(from(0, 0), columns, readers * Piece, slots);
    bool waits = item < 0;
    Walk at(waits ? item + slots : item, slots, count);
    if constexpr (Piece * sizeof(In) == 16) {
      while (at.sample < samples) {
        if (!waits) {
          recast::async_copy_16(to(at.sample, at.item) + c, from(at.sample, at.item) + c);
          at.next();
        }
        waits = false;
      }
    } else {
      while (at.sample < samples) {
        Pack<In, Piece> held[kAhead];
        In* into[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a, at.next()) {
          into[a] = nullptr;
          if (at.sample >= samples) continue;
          held[a] = recast::load<Piece>(from(at.sample, at.item) + c);
          into[a] = to(at.sample, at.item) + c;
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
          if (into[a] != nullptr) recast::store<Piece>(into[a], held[a]);
      }
    }
  }
}

// Columns from `start` on of the vectors of `count` samples from `first` on, to (samples, vectors,
// pitch).
__device__ __forceinline__ void read(const Row* rows, const Shape& shape, int first, int count,
                                     int start, In* values) {
  const int vectors = shape.vectors(), pitch = shape.pitch;
  copy<kVec>(
      count, vectors, min(shape.columns, shape.dim - start), shape.readers,
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

// The product of two vectors, with several reads under way.
__device__ __forceinline__ float product(const In* x, const In* y, int dim) {
  float sum = 0.0f;
  int c = 0;
  for (; c + kAhead * kVec <= dim; c += kAhead * kVec) {
    Pack<float, kVec> left[kAhead], right[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      left[a] = widened(x + c + a * kVec);
      right[a] = widened(y + c + a * kVec);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
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

// Products of the pairs of a tile. Results are written as they lie, each by `lanes` threads.
__device__ __forceinline__ void of_each(const In* values, const unsigned* starts,
                                        const Pairs& given, const Shape& shape, int first,
                                        int count, In* out) {
  const int lanes = shape.lanes, slots = kThreads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int wide = kSum == none ? shape.dim : 1, each = shape.vectors() * shape.pitch;
  In* const own = out + static_cast<Index>(first) * given.count * wide;
  const int before = shift(own, wide, lanes * (kSum == none ? kVec : 1), slots);
  int item = static_cast<int>(threadIdx.x) / lanes - before;
  bool waits = item < 0;
  Walk at(waits ? item + slots : item, slots, given.count);
  if constexpr (kSum == none) {
    // What most calls are: a thread has the same columns of all its pairs.
    if (shape.listed && given.weight == nullptr && wide == lanes * kVec) {
      const In* const columns_at = values + lane * kVec;
      In* to = own + static_cast<Index>(item) * wide + lane * kVec;
      for (; waits || at.sample < count; to += slots * wide, waits = false) {
        if (waits) continue;
        const unsigned start = starts[at.item];
        const In* const of_sample = columns_at + at.sample * each;
        at.next();
        Pack<float, kVec> a = filled(0.0f), b = a;
        if (start != kAbsent) {
          a = widened(of_sample + (start & 0xffffu));
          b = widened(of_sample + (start >> 16));
        }
        Pack<In, kVec> result;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(a.at[e] * b.at[e], result.at[e]);
        recast::store<kVec>(to, result);
      }
      return;
    }
  }
  // Warps stay together: there are sums over lanes.
  for (int left = count * given.count + before; left > 0; left -= slots, item += slots) {
    const bool mine = !waits && at.sample < count;
    const unsigned start = !mine          ? kAbsent
                           : shape.listed ? starts[at.item]
                                          : starts_of(given, shape, at.item);
    const bool there = start != kAbsent;
    const In* const of_sample = values + (mine ? at.sample * each : 0);
    const In* const x = of_sample + (there ? start & 0xffffu : 0u);
    const In* const y = of_sample + (there ? start >> 16 : 0u);
    const float weight = mine ? weight_of(given, first + at.sample, at.item) : 0.0f;
    if (!waits) at.next();
    waits = false;
    if constexpr (kSum == none) {
      if (!mine) continue;
      In* const to = own + static_cast<Index>(item) * wide;
#pragma unroll 1
      for (int c = lane * kVec; c < wide; c += lanes * kVec) {
        const auto a = widened(x + c), b = widened(y + c);
        Pack<In, kVec> result;
#pragma unroll
        for (int e = 0; e < kVec; ++e)
          recast::narrow(there ? weight * a.at[e] * b.at[e] : 0.0f, result.at[e]);
        recast::store<kVec>(to + c, result);
      }
    } else {
      float sum = 0.0f;
      if (lanes == 1) {
        sum = product(x, y, shape.dim);
      } else {
#pragma unroll 1
        for (int c = lane * kVec; c < shape.dim; c += lanes * kVec) {
          const auto a = widened(x + c), b = widened(y + c);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum += a.at[e] * b.at[e];
        }
        sum = group_sum(sum, lanes);
      }
      if (mine && lane == 0) recast::narrow(there ? weight * sum : 0.0f, own[item]);
    }
  }
}

// Sums over the pairs of a tile: a warp takes a sample.
__device__ __forceinline__ void of_all(const In* values, const unsigned* starts, const Pairs& given,
                                       const Shape& shape, int first, int count, In* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32, lanes = shape.lanes;
  const int column = lane % lanes * kVec, slices = 32 / lanes, dim = shape.dim;
  for (int s = static_cast<int>(threadIdx.x) / 32; s < count; s += kThreads / 32) {
    const In* const own = values + s * shape.vectors() * shape.pitch;
    const Index sample = first + s;
    float all = 0.0f;
    for (int from = 0; from < dim; from += lanes * kVec) {
      const int c = from + column;
      float sum[kVec] = {};
      if (c < dim)
#pragma unroll 4
        for (int p = lane / lanes; p < given.count; p += slices) {
          const unsigned start = shape.listed ? starts[p] : starts_of(given, shape, p);
          if (start == kAbsent) continue;
          const auto a = widened(own + (start & 0xffffu) + c), b = widened(own + (start >> 16) + c);
          const float weight = weight_of(given, sample, p);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[e] += weight * a.at[e] * b.at[e];
        }
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        for (int d = lanes; d < 32; d *= 2) sum[e] += __shfl_xor_sync(kFull, sum[e], d);
        all += sum[e];
      }
      if constexpr (kSum == Sum::pairs) {
        Pack<In, kVec> result;
#pragma unroll
        for (int e = 0; e < kVec; ++e) recast::narrow(sum[e], result.at[e]);
        if (lane < lanes && c < dim) recast::store<kVec>(out + sample * dim + c, result);
      }
    }
    if constexpr (kSum == both) {
      all = group_sum(all, lanes);
      if (lane == 0) recast::narrow(all, out[sample]);
    }
  }
}

}  // namespace

// Shared memory: two buffers of values (samples, vectors, pitch), each rounded up to 16 bytes, and
// the starts of all pairs where they are `listed`.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    pair_forward(const Row* __restrict__ rows, int n_left, int n_right,
                 const Index* __restrict__ li, const Index* __restrict__ lj,
                 const In* __restrict__ weights, Index weight_stride, int n_pairs, int dim,
                 int batch, int samples, int pitch, int readers, int lanes, int n_columns,
                 int listed, In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const Pairs given{li, lj, weights, weight_stride, n_pairs};
  const Shape shape{n_left, n_right, dim, batch, samples, pitch, readers, lanes, n_columns, listed};
  const int room = rounded(samples * shape.vectors() * pitch, kPer16);
  unsigned* const starts = reinterpret_cast<unsigned*>(shared + 2 * room);
  if (listed)
    for (int p = static_cast<int>(threadIdx.x); p < n_pairs; p += kThreads)
      starts[p] = starts_of(given, shape, p);
  const int tiles = (batch + samples - 1) / samples, step = static_cast<int>(gridDim.x);
  int tile = static_cast<int>(blockIdx.x), buffer = 0;
  if (tile < tiles)
    read(rows, shape, tile * samples, min(samples, batch - tile * samples), 0, shared);
  recast::async_commit();
  for (; tile < tiles; tile += step, buffer ^= 1) {
    const int first = tile * samples, next = first + step * samples;
    if (tile + step < tiles)
      read(rows, shape, next, min(samples, batch - next), 0, shared + (buffer ^ 1) * room);
    recast::async_commit();
    recast::async_wait<1>();
    __syncthreads();
    const In* const values = shared + buffer * room;
    const int count = min(samples, batch - first);
    if constexpr (kEach)
      of_each(values, starts, given, shape, first, count, out);
    else
      of_all(values, starts, given, shape, first, count, out);
    __syncthreads();
  }
  recast::async_wait<0>();
}
RECAST_KERNEL(pair_forward)

#if RECAST_SUM == 0
namespace {

// Where both vectors of a pair start; null if one of them does not exist.
struct alignas(16) Factors {
  const In* left;
  const In* right;
};

constexpr int kHeld = kVec > 4 ? 2 : 4;  // reads of a thread that are under way, of either side

// kHeld products, of factors `slots` apart, to places `apart` elements apart; of those before
// `count` unless they are `all` there.
template <bool all>
__device__ __forceinline__ void write_rows(const Factors* factors, int slots, int column, int count,
                                           In* to, int apart) {
  Pack<In, kVec> left[kHeld], right[kHeld];
#pragma unroll
  for (int a = 0; a < kHeld; ++a) {
    left[a] = right[a] = recast::zeros<kVec, In>();
    if (!all && a * slots >= count) continue;
    const Factors of = factors[a * slots];
    if (of.left == nullptr) continue;
    left[a] = recast::load<kVec>(recast::in_global(of.left) + column);
    right[a] = recast::load<kVec>(recast::in_global(of.right) + column);
  }
#pragma unroll
  for (int a = 0; a < kHeld; ++a) {
    if (!all && a * slots >= count) continue;
    Pack<In, kVec> result;
#pragma unroll
    for (int e = 0; e < kVec; ++e)
      recast::narrow(recast::widen(left[a].at[e]) * recast::widen(right[a].at[e]), result.at[e]);
    recast::store_whole<kVec>(to + a * apart, result);
  }
}

}  // namespace

// Products of pairs that are neither summed nor weighted, and of whose D every one of `lanes`
// threads, a power of two, has VEC: nearly all there is to do is to write them. Blocks write few
// lines each, in the order of the blocks, so that all that run write side by side; the vectors of a
// sample are in the first-level cache.
// Launch: grid = ceil(batch * n_pairs / items) with items = 128 / lanes * 16, block = 128, dynamic
// shared memory: 16 bytes an item.
extern "C" __global__ void __launch_bounds__(kThreads, kVec > 4 ? 6 : 8)
    pair_rows(const Row* __restrict__ rows, int n_left, int n_right, const Index* __restrict__ li,
              const Index* __restrict__ lj, int n_pairs, int dim, int batch, int lanes,
              In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(Factors, factors);
  Shape shape{};
  shape.n_left = n_left;
  shape.n_right = n_right;
  const Pairs given{li, lj, nullptr, 0, n_pairs};
  const int thread = static_cast<int>(threadIdx.x), slots = kThreads / lanes;
  const Index first = static_cast<Index>(blockIdx.x) * (slots * kRounds), start = first / n_pairs;
  const int before = static_cast<int>(first - start * n_pairs);
  const Index left_over = static_cast<Index>(batch) * n_pairs - first;
  const int count = static_cast<int>(min(left_over, static_cast<Index>(slots * kRounds)));
#pragma unroll 1
  for (int k = thread; k < count; k += kThreads) {
    const int past = (before + k) / n_pairs, p = before + k - past * n_pairs;
    const int i = left_of(given, shape, p), j = right_of(given, shape, p);
    Factors found{nullptr, nullptr};
    if (i >= 0 && j >= 0)
      found = {rows[i].at + (start + past) * rows[i].stride,
               rows[j].at + (start + past) * rows[j].stride};
    factors[k] = found;
  }
  __syncthreads();
  const int slot = thread / lanes, column = thread % lanes * kVec, apart = slots * dim;
  In* const to = out + (first + slot) * dim + column;
  if (count == slots * kRounds) {  // written out, so that nothing is asked of each
#pragma unroll 1
    for (int r = 0; r < kRounds; r += kHeld)
      write_rows<true>(factors + slot + r * slots, slots, column, 0, to + r * apart, apart);
  } else {
#pragma unroll 1
    for (int k = slot; k < count; k += kHeld * slots)
      write_rows<false>(factors + k, slots, column, count - k, to + (k - slot) / slots * apart,
                        apart);
  }
}
RECAST_KERNEL(pair_rows)
#endif

namespace {

// One pair of a vector: which other vector is in it.
struct alignas(8) Entry {
  int pair, other;
};

}  // namespace

// The entries of all vectors, left ones first, each vector's in the order of the pairs: those of
// vector v are starts[v] to starts[v + 1] of `entries`, which has room for two a pair.
extern "C" __global__ void __launch_bounds__(kListThreads)
    pair_lists(const Index* __restrict__ li, const Index* __restrict__ lj, int n_pairs, int n_left,
               int n_right, Entry* __restrict__ entries, int* __restrict__ starts) {
  RECAST_SHARED(int[kListThreads / 32], tally);
  Shape shape{};
  shape.n_left = n_left;
  shape.n_right = n_right;
  const Pairs given{li, lj, nullptr, 0, n_pairs};
  const int vector = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  int before = 0;
  for (int p = thread; p < n_pairs; p += kListThreads) {
    const int i = left_of(given, shape, p), j = right_of(given, shape, p);
    if (i >= 0 && j >= 0) before += (i < vector) + (j < vector);
  }
  for (int d = 16; d > 0; d /= 2) before += __shfl_xor_sync(kFull, before, d);
  if (lane == 0) tally[warp] = before;
  __syncthreads();
  int at = 0;
  for (int w = 0; w < kListThreads / 32; ++w) at += tally[w];
  if (thread == 0) starts[vector] = at;
  for (int from = 0; from < n_pairs; from += kListThreads) {
    const int p = from + thread;
    int i = -1, j = -1;
    if (p < n_pairs) {
      i = left_of(given, shape, p);
      j = right_of(given, shape, p);
      if (i < 0 || j < 0) i = j = -1;
    }
    const unsigned first = __ballot_sync(kFull, i == vector);
    const unsigned second = __ballot_sync(kFull, j == vector);
    __syncthreads();  // all threads have read the old values
    if (lane == 0) tally[warp] = __popc(first) + __popc(second);
    __syncthreads();
    int all = 0, ahead = 0;
    for (int w = 0; w < kListThreads / 32; ++w) {
      ahead += w < warp ? tally[w] : 0;
      all += tally[w];
    }
    const unsigned lower = (1u << lane) - 1;
    int to = at + ahead + __popc(first & lower) + __popc(second & lower);
    if (i == vector) entries[to++] = {p, j};
    if (j == vector) entries[to] = {p, i};
    at += all;
  }
  if (thread == 0 && vector == n_left + n_right - 1) starts[vector + 1] = at;
}
RECAST_KERNEL(pair_lists)

namespace {

// An upstream gradient: elements from one sample's to the next and from one pair's, and as many of
// vectors; where it is in shared memory the lists count in these steps already.
template <class Step>
struct Gradients {
  const In* at;
  Step stride, pair_step, vector_step;
};

// What a block works on.
struct Tile {
  const In* values;  // (samples, vectors, pitch)
  int first, count;  // samples
  int start, columns;
};

// The gradients of all vectors of a tile. `each`: those of the pairs, where they have any; `up`: of
// all samples.
template <class Step>
__device__ __forceinline__ void of_vectors(const Tile& tile, const Shape& shape, const Pairs& given,
                                           const Gradients<Step>& each, const In* up,
                                           Index up_stride, const Entry* entries,
                                           const Entry* plain, const int* starts, In* into_left,
                                           In* into_right) {
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const int slot = static_cast<int>(threadIdx.x) / shape.lanes, vectors = shape.vectors();
  for (Walk at(slot, kThreads / shape.lanes, vectors); at.sample < tile.count; at.next()) {
    const Index sample = tile.first + at.sample;
    const int f = at.item, from = starts[f], last = starts[f + 1];
    for (int c = lane * kVec; c < tile.columns; c += shape.lanes * kVec) {
      const In* const values = tile.values + at.sample * vectors * shape.pitch + c;
      const In* const gradients = each.at + at.sample * each.stride + (kSum == none ? c : 0);
      float sum[kVec] = {};
      if (given.weight == nullptr) {
#pragma unroll 4
        for (int k = from; k < last; ++k) {
          const Entry entry = entries[k];
          const auto y = widened(values + entry.other * each.vector_step);
          if constexpr (kSum == none) {
            const auto g = widened(gradients + entry.pair * each.pair_step);
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += g.at[e] * y.at[e];
          } else if constexpr (kSum == columns) {
            const float g = recast::widen(gradients[entry.pair * each.pair_step]);
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += g * y.at[e];
          } else {
#pragma unroll
            for (int e = 0; e < kVec; ++e) sum[e] += y.at[e];
          }
        }
      } else {
#pragma unroll 1
        for (int k = from; k < last; ++k) {
          const Entry entry = entries[k];
          const float weight = weight_of(given, sample, plain[k].pair);
          const auto y = widened(values + entry.other * each.vector_step);
          const auto g = kSum == none ? widened(gradients + entry.pair * each.pair_step)
                         : kSum == columns
                             ? filled(recast::widen(gradients[entry.pair * each.pair_step]))
                             : filled(1.0f);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[e] += weight * g.at[e] * y.at[e];
        }
      }
      if constexpr (!kEach) {
        const In* const of_sample = up + sample * up_stride;
        const auto g =
            kSum == both ? filled(recast::widen(*of_sample)) : widened(of_sample + tile.start + c);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[e] *= g.at[e];
      }
      Pack<In, kVec> result;
#pragma unroll
      for (int e = 0; e < kVec; ++e) recast::narrow(sum[e], result.at[e]);
      In* const to = f < shape.n_left
                         ? into_left + (sample * shape.n_left + f) * shape.dim
                         : into_right + (sample * shape.n_right + f - shape.n_left) * shape.dim;
      recast::store<kVec>(to + tile.start + c, result);
    }
  }
}

// The gradients of the weights of a tile, of all columns.
template <class Step>
__device__ __forceinline__ void of_weights(const Tile& tile, const Shape& shape, const Pairs& given,
                                           const In* each, Step stride, Step pair_stride,
                                           const In* up, Index up_stride, In* into) {
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const int slot = static_cast<int>(threadIdx.x) / shape.lanes, vectors = shape.vectors();
  Walk at(slot, kThreads / shape.lanes, given.count);
  // Warps stay together: there are sums over lanes.
  for (int left = tile.count * given.count; left > 0; left -= kThreads / shape.lanes, at.next()) {
    const bool mine = at.sample < tile.count;
    const unsigned start = starts_of(given, shape, at.item);
    const In* const values = tile.values + at.sample * vectors * shape.pitch;
    const In *const x = values + (start & 0xffffu), *const y = values + (start >> 16);
    const In* const gradients = each + at.sample * stride + at.item * pair_stride;
    const In* const of_sample = up + (tile.first + at.sample) * up_stride;
    float sum = 0.0f;
    if (mine && start != kAbsent)
#pragma unroll 1
      for (int c = lane * kVec; c < tile.columns; c += shape.lanes * kVec) {
        const auto a = widened(x + c), b = widened(y + c);
        const auto g = kSum == none         ? widened(gradients + c)
                       : kSum == columns    ? filled(recast::widen(*gradients))
                       : kSum == Sum::pairs ? widened(of_sample + c)
                                            : filled(recast::widen(*of_sample));
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum += g.at[e] * a.at[e] * b.at[e];
      }
    sum = group_sum(sum, shape.lanes);
    if (mine && lane == 0)
      recast::narrow(sum, into[static_cast<Index>(tile.first + at.sample) * given.count + at.item]);
  }
}

}  // namespace

// Shared memory: two buffers of values (samples, vectors, pitch) and, where `listed`, of gradients
// of pairs that have their own (samples, pairs, columns), each rounded up to 16 bytes; where
// `listed`, entries and starts of pair_lists.
// grad: as the result of pair_forward, with strides of samples and of pairs; into_left: (batch,
// n_left, dim), into_right: (batch, n_right, dim), into_weight: (batch, n_pairs) or null.
extern "C" __global__ void __launch_bounds__(kThreads, kSum == none ? 4 : kBlocks)
    pair_backward(const Row* __restrict__ rows, int n_left, int n_right,
                  const Index* __restrict__ li, const Index* __restrict__ lj,
                  const In* __restrict__ weights, Index weight_stride, int n_pairs, int dim,
                  int batch, int samples, int pitch, int readers, int lanes, int n_columns,
                  int listed, const In* __restrict__ grad, Index grad_stride, Index pair_stride,
                  const Entry* __restrict__ entries, const int* __restrict__ starts,
                  In* __restrict__ into_left, In* __restrict__ into_right,
                  In* __restrict__ into_weight) {
  RECAST_DYNAMIC_SHARED(In, shared);
  const Pairs given{li, lj, weights, weight_stride, n_pairs};
  const Shape shape{n_left, n_right, dim, batch, samples, pitch, readers, lanes, n_columns, listed};
  const int thread = static_cast<int>(threadIdx.x), vectors = shape.vectors();
  const int wide = kSum == none ? n_columns : 1;
  const int of_values = rounded(samples * vectors * pitch, kPer16);
  const int room = of_values + (kEach && listed ? rounded(samples * n_pairs * wide, kPer16) : 0);
  Entry* const own_entries = reinterpret_cast<Entry*>(shared + 2 * room);
  int* const own_starts = reinterpret_cast<int*>(own_entries + 2 * n_pairs);
  if (listed) {
    for (int v = thread; v <= vectors; v += kThreads) own_starts[v] = starts[v];
    const int last = starts[vectors];
    for (int k = thread; k < last; k += kThreads)
      own_entries[k] = {entries[k].pair * wide, entries[k].other * pitch};
  }
  const int start = static_cast<int>(blockIdx.y) * n_columns;
  const int there = min(n_columns, dim - start);
  const int tiles = (batch + samples - 1) / samples, step = static_cast<int>(gridDim.x);
  const auto fetch = [&](int first, In* to) {
    const int count = min(samples, batch - first);
    if (kEach && listed) {
      const In* const from = grad + first * grad_stride + (kSum == none ? start : 0);
      const bool whole = (n_pairs == 1 || pair_stride == wide) && there == n_columns &&
                         (count == 1 || grad_stride == n_pairs * wide) &&
                         reinterpret_cast<Wide>(from) % 16 == 0;
      if (whole)
        copy_whole(from, to + of_values, count * n_pairs * wide);
      else
        copy<kSum == none ? kVec : 1>(
            count, n_pairs, kSum == none ? there : 1, kSum == none ? readers : 1,
            [=](int sample, int item) { return from + sample * grad_stride + item * pair_stride; },
            [=](int sample, int item) {
              return to + of_values + (sample * n_pairs + item) * wide;
            });
    }
    read(rows, shape, first, count, start, to);
  };
  int tile = static_cast<int>(blockIdx.x), buffer = 0;
  if (tile < tiles) fetch(tile * samples, shared);
  recast::async_commit();
  for (; tile < tiles; tile += step, buffer ^= 1) {
    const int first = tile * samples;
    if (tile + step < tiles) fetch(first + step * samples, shared + (buffer ^ 1) * room);
    recast::async_commit();
    recast::async_wait<1>();
    __syncthreads();
    const In* const values = shared + buffer * room;
    const Tile now{values, first, min(samples, batch - first), start, there};
    // Written out, so that the compiler sees what is in shared memory.
    if (listed) {
      const Gradients<int> each{values + of_values, n_pairs * wide, 1, 1};
      of_vectors(now, shape, given, each, grad, grad_stride, own_entries, entries, own_starts,
                 into_left, into_right);
      if (into_weight != nullptr)
        of_weights(now, shape, given, each.at, each.stride, wide, grad, grad_stride, into_weight);
    } else {
      const Gradients<Index> each{grad + first * grad_stride + (kSum == none ? start : 0),
                                  grad_stride, pair_stride, pitch};
      of_vectors(now, shape, given, each, grad, grad_stride, entries, entries, starts, into_left,
                 into_right);
      if (into_weight != nullptr)
        of_weights(now, shape, given, each.at, grad_stride, pair_stride, grad, grad_stride,
                   into_weight);
    }
    __syncthreads();
  }
  recast::async_wait<0>();
}
RECAST_KERNEL(pair_backward)
