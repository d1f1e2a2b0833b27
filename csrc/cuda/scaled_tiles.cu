// A product of rows and a weight, scaled, and the gradients of the rows and of the scale, on tensor
// cores (runtime/interactions/scaled_tiles.py):
//
//     out[r, e, i] = scale[r, i] Σ_j W[e, i, j] x[r, j]
//     dscale[r, i] = Σ_e g[r, e, i] Σ_j W[e, i, j] x[r, j]
//     dx[r, j]     = Σ_e Σ_i scale[r, i] g[r, e, i] W[e, i, j]
//
// A warp keeps its rows of x in registers, and takes 16 columns i of one e after the other. All
// warps of a block use the same block of the weight, which reaches them through a cp.async ring in
// shared memory. The product is never written: it is scaled, or in backward multiplied by g, in
// registers.
//
// Macros:
//   RECAST_IN      dtype of all tensors: 0 fp32, multiplied in TF32; 1 fp16, 2 bf16; sums are fp32
//   RECAST_GROUPS  groups of 16 j: ceil(depth / 16)
//   RECAST_TILES   groups of 16 rows that a warp of scaled_tiles_forward takes
//
// `inner` and `depth`, the lengths of i and j, are multiples of 4, and so are strides of rows; four
// elements are read at once, and tensors aligned to that.
#include "scaled_tiles.cuh"

namespace {

constexpr int kGroups = RECAST_GROUPS;
constexpr int kTiles = RECAST_TILES;
constexpr int kStages = 3;                      // stages of the ring
constexpr int kPart = kGroups * kBlockWords;    // words of the weight of a step, in one direction
constexpr int kForward = 128, kBackward = 256;  // threads

struct Shape {
  Index rows;
  int between, inner, depth;

  __device__ __forceinline__ int steps() const { return (inner + 15) / 16 * between; }
};

// A lane's rows, g and g + 8 of 16, and whether they exist.
struct Rows {
  Index low;
  bool exists[2];

  __device__ __forceinline__ Rows(Index first, Index count)
      : low(first + threadIdx.x % 32 / 4), exists{low < count, low + 8 < count} {}
};

// A lane's view of a matrix with row stride `stride`: the address of its columns in row g, and the
// distance from there to row g + 8.
template <class T>
struct Own {
  T* at;
  Index on;

  __device__ __forceinline__ Own(T* from, Index stride, const Rows& rows)
      : at(from + rows.low * stride + column()), on(8 * stride) {}
  __device__ static __forceinline__ int column() { return static_cast<int>(threadIdx.x) % 4 * 4; }
};

// Loads columns 4 t to 4 t + 3 of the 16 at offset `from`, which are columns `first` and on of
// `width`.
__device__ __forceinline__ void load_columns(const Own<const In>& own, const Rows& rows, Index from,
                                             int first, int width, Four (&to)[2]) {
  const bool inside = first < width - own.column();
#pragma unroll
  for (int r = 0; r < 2; ++r) to[r] = four_at(own.at + from + r * own.on, rows.exists[r] && inside);
}

template <class Of>
__device__ __forceinline__ void store_columns(const Own<In>& own, const Rows& rows, Index at,
                                              int first, int width, Of of) {
  if (first >= width - own.column()) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.exists[r]) continue;
    Four made;
#pragma unroll
    for (int c = 0; c < 4; ++c) recast::narrow(of(r, c), made.at[c]);
    recast::store_whole<4>(own.at + at + r * own.on, made);
  }
}

__device__ __forceinline__ void load_left(const Own<const In>& own, const Rows& rows, int depth,
                                          Left (&kept)[kGroups]) {
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    Four four[2];
    float low[4], high[4];
    load_columns(own, rows, k * 16, k * 16, depth, four);
    widen(four[0], low);
    widen(four[1], high);
    kept[k] = left_of(low, high);
  }
}

// A cp.async ring that brings the weight to shared memory, kStages - 1 steps ahead of its use; used
// by all threads of a block together. `more(slot)` starts what other copies a step needs, for that
// stage.
template <int Directions>
struct Ring {
  unsigned* shared;
  const unsigned* from;
  int steps, left;  // in all, and still to be copied; the second direction is behind the first
  int write_stage = 0, slot = kStages - 1;  // stages of the next copy, and of the step in use

  template <class More>
  __device__ __forceinline__ void ask(More more) {
    if (left > 0) {
      --left;
#pragma unroll
      for (int w = 0; w < Directions; ++w) {
        for (int k = static_cast<int>(threadIdx.x) * 4; k < kPart; k += blockDim.x * 4)
          recast::async_copy_16(shared + (write_stage * Directions + w) * kPart + k,
                                from + static_cast<Index>(w * steps) * kPart + k);
      }
      from += kPart;
      more(write_stage);
    }
    write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
    recast::async_commit();
  }

  template <class More>
  __device__ __forceinline__ void start(More more) {
    for (int n = 0; n < kStages - 1; ++n) ask(more);
  }

  // The weight of the next step, one direction after the other.
  template <class More>
  __device__ __forceinline__ const unsigned* next(More more) {
    recast::async_wait<kStages - 2>();
    __syncthreads();  // the copies have arrived, and all threads are done with the step before
    ask(more);
    slot = slot + 1 == kStages ? 0 : slot + 1;
    return shared + slot * Directions * kPart;
  }
};

}  // namespace

// Packs the weight as right operands in the order of the lanes: packed[step][group][lane] holds 16
// columns x 16 terms, zeros behind the last of either. A step is (group of 16 i, e), e fastest. In
// the first direction columns are i of `from[e][i][j]` and terms j; in the second, stored behind
// the first, columns are j and terms i. Launch: grid = (ceil(steps * groups / 8), 1 or 2
// directions), block = 256.
extern "C" __global__ void __launch_bounds__(256)
    scaled_pack(const In* __restrict__ from, Index of_e, Index of_i, Index of_j, int between,
                int inner, int depth, unsigned* __restrict__ packed) {
  const int at = static_cast<int>(blockIdx.x) * 8 + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int step = at / kGroups, e = step % between;
  const int first_i = step / between * 16, first_j = at % kGroups * 16;
  if (first_i >= inner) return;
  const bool transposed = blockIdx.y == 1;
  const int before = transposed ? Shape{0, between, inner, depth}.steps() * kGroups : 0;
  const auto number = [&](int column, int term) {
    const int i = first_i + (transposed ? term : column),
              j = first_j + (transposed ? column : term);
    return i < inner && j < depth ? recast::widen(from[e * of_e + i * of_i + j * of_j]) : 0.0f;
  };
#pragma unroll
  for (int w = 0; w < kWords; w += 4) {
    recast::Pack<unsigned, 4> words;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int tile = (w + q) / (2 * kSteps), k = (w + q) % (2 * kSteps) * kEach;
      const int column = g / 2 * 4 + g % 2 + 2 * tile;
      words.at[q] = pack_operand(number(column, 4 * t + k), number(column, 4 * t + k + kEach - 1));
    }
    recast::store<4>(packed + static_cast<Index>(before + at) * kBlockWords + w * 32 + lane * 4,
                     words);
  }
}
RECAST_KERNEL(scaled_pack)

// packed: of scaled_pack, the first direction. x: (rows, depth), rows x_stride apart; scale: (rows,
// inner) and out: (rows, between, inner), contiguous. Launch: grid = ceil(rows / (64 * TILES)),
// block = 128, dynamic shared memory: 3 * GROUPS KiB, half of it for 16 bits.
extern "C" __global__ void __launch_bounds__(kForward, 2)
    scaled_tiles_forward(const In* __restrict__ x, Index x_stride, const In* __restrict__ scale,
                         Index rows, int between, int inner, int depth,
                         const unsigned* __restrict__ packed, In* __restrict__ out) {
  RECAST_DYNAMIC_SHARED(unsigned, shared);
  const Shape shape{rows, between, inner, depth};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Index first =
      (static_cast<Index>(blockIdx.x) * (kForward / 32) + threadIdx.x / 32) * (16 * kTiles);
  Ring<1> ring{shared, packed, shape.steps(), shape.steps()};
  const auto nothing = [](int) {};
  ring.start(nothing);
  Left kept[kTiles][kGroups];
#pragma unroll
  for (int a = 0; a < kTiles; ++a) {
    const Rows own(first + 16 * a, rows);
    load_left(Own(x, x_stride, own), own, depth, kept[a]);
  }
  const Index apart = static_cast<Index>(between) * inner;
#pragma unroll 1
  for (int column = 0; column < inner; column += 16) {
    Four by[kTiles][2];
#pragma unroll
    for (int a = 0; a < kTiles; ++a) {
      const Rows own(first + 16 * a, rows);
      load_columns(Own(scale, inner, own), own, column, column, inner, by[a]);
    }
#pragma unroll 1
    for (int e = 0; e < between; ++e) {
      const unsigned* const weight = ring.next(nothing);
      Sums sums[kTiles];
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        const Right right = right_at(weight + k * kBlockWords, lane);
#pragma unroll
        for (int a = 0; a < kTiles; ++a) multiply(sums[a], kept[a][k], right);
      }
#pragma unroll
      for (int a = 0; a < kTiles; ++a) {
        const Rows own(first + 16 * a, rows);
        store_columns(
            Own(out, apart, own), own, static_cast<Index>(e) * inner + column, column, inner,
            [&](int r, int c) { return sums[a].of(r, c) * recast::widen(by[a][r].at[c]); });
      }
    }
  }
  recast::async_wait<0>();  // unused copies, but a thread must not exit before its cp.async are
                            // complete
}
RECAST_KERNEL(scaled_tiles_forward)

// packed: of scaled_pack, both directions. grad: as the result. dscale: (rows, inner),
// dx: (rows, depth), contiguous, either null where nobody asks for it; `add`: they are one, and it
// gets the sum of both, of equal widths.
// Launch: grid = ceil(rows / 128), block = 256, dynamic shared memory: 6 * GROUPS + 24 KiB,
// 3 * GROUPS for 16 bits.
extern "C" __global__ void __launch_bounds__(kBackward, 1)
    scaled_tiles_inputs(const In* __restrict__ x, Index x_stride, const In* __restrict__ scale,
                        Index rows, int between, int inner, int depth,
                        const unsigned* __restrict__ packed, const In* __restrict__ grad,
                        In* dscale, In* dx, int add) {
  RECAST_DYNAMIC_SHARED(unsigned, shared);
  const Shape shape{rows, between, inner, depth};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Rows own((static_cast<Index>(blockIdx.x) * (kBackward / 32) + threadIdx.x / 32) * 16, rows);
  const Own gradients(grad, static_cast<Index>(between) * inner, own), scales(scale, inner, own);
  // The gradients of the steps to come: in the ring, where a lane's four elements are the 16 bytes
  // of a cp.async, else prefetched to registers.
  constexpr bool kInRing = sizeof(Four) == 16;
  In* const ring_gradients = reinterpret_cast<In*>(shared + kStages * 2 * kPart) + threadIdx.x * 4;
  const auto place = [&](int slot, int r) {
    return ring_gradients + (slot * 2 + r) * kBackward * 4;
  };
  Ring<2> ring{shared, packed, shape.steps(), shape.steps()};
  int next_column = 0,
      next_offset = 0;  // next gradient to prefetch: its column, and its offset in a row
  Four ahead[2];
  const auto ask = [&](int slot) {
    if constexpr (kInRing) {
      const bool inside = next_column < inner - gradients.column();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool exists = inside && own.exists[r];
        recast::async_copy_16(
            place(slot, r), exists ? gradients.at + next_offset + r * gradients.on : grad, exists);
      }
    } else {
      load_columns(gradients, own, next_offset, next_column, inner, ahead);
    }
    next_offset += inner;
    if (next_offset >= between * inner) next_offset = next_column += 16;
  };
  const auto gradient = [&](const Four(&now)[2], float (&to)[2][4]) {
    if constexpr (kInRing) __syncwarp();  // load again from shared memory, which saves registers
#pragma unroll
    for (int r = 0; r < 2; ++r)
      widen(kInRing ? recast::load<4>(place(ring.slot, r)) : now[r], to[r]);
  };
  const auto also_copy = [&](int slot) {
    if constexpr (kInRing) ask(slot);
  };
  ring.start(also_copy);
  Left kept[kGroups];
  load_left(Own(x, x_stride, own), own, depth, kept);
  Sums of_x[kGroups];
  if constexpr (!kInRing) ask(0);
#pragma unroll 1
  for (int column = 0; column < inner; column += 16) {
    Four by[2];
    load_columns(scales, own, column, column, inner, by);
    float of_scale[2][4] = {};
#pragma unroll 1
    for (int e = 0; e < between; ++e) {
      const unsigned* const weight = ring.next(also_copy);
      Four now[2];
      if constexpr (!kInRing) {
#pragma unroll
        for (int r = 0; r < 2; ++r) now[r] = ahead[r];
        ask(0);
      }
      if (dscale != nullptr) {
        float g[2][4];
        Sums sums[2];  // two accumulators, so that consecutive mma are independent
#pragma unroll
        for (int k = 0; k < kGroups; ++k)
          multiply(sums[k % 2], kept[k], right_at(weight + k * kBlockWords, lane));
        gradient(now, g);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            of_scale[r][c] += (sums[0].of(r, c) + sums[1].of(r, c)) * g[r][c];
      }
      if (dx == nullptr) continue;
      float g[2][4];
      gradient(now, g);
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) g[r][c] *= recast::widen(by[r].at[c]);
      const Left left = left_of(g[0], g[1]);
#pragma unroll
      for (int k = 0; k < kGroups; ++k)
        multiply(of_x[k], left, right_at(weight + kPart + k * kBlockWords, lane));
    }
    if (dscale != nullptr)
      store_columns(Own(dscale, inner, own), own, column, column, inner,
                    [&](int r, int c) { return of_scale[r][c]; });
  }
  recast::async_wait<0>();  // unused copies, but a thread must not exit before its cp.async are
                            // complete
  if (dx == nullptr) return;
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    Four more[2];  // of dscale, which this same lane has stored
    if (add) load_columns(Own<const In>(dscale, inner, own), own, k * 16, k * 16, inner, more);
    store_columns(Own(dx, depth, own), own, k * 16, k * 16, depth, [&](int r, int c) {
      return of_x[k].of(r, c) + (add ? recast::widen(more[r].at[c]) : 0.0f);
    });
  }
}
RECAST_KERNEL(scaled_tiles_inputs)
