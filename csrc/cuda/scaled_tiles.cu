// A product of rows and a weight, scaled, and the gradients of the rows and of the scale, on tensor
// cores (runtime/interactions/scaled_tiles.py):
//
//     out[r, e, i] = scale[r, i] Σ_j W[e, i, j] x[r, j]
//     dscale[r, i] = Σ_e g[r, e, i] Σ_j W[e, i, j] x[r, j]
//     dx[r, j]     = Σ_e Σ_i scale[r, i] g[r, e, i] W[e, i, j]
//
// A warp keeps its rows of x in registers, and takes 16 columns i of one e after the other; the
// blocks of the weight that all warps of a block need go by shared memory, some steps ahead. The
// product is never written: what it is scaled with, or weighed with in backward, meets it in
// registers.
//
// Macros:
//   RECAST_IN      dtype of all tensors: 0 fp32, multiplied in TF32; 1 fp16, 2 bf16; sums are fp32
//   RECAST_GROUPS  sixteens of j, all there are
//   RECAST_TILES   sixteens of rows of a warp of scaled_tiles_forward
//
// `inner` and `depth`, the lengths of i and j, are multiples of 4, and so are strides of rows; four
// elements are read at once, and tensors aligned to that.
#include "scaled_tiles.cuh"

namespace {

constexpr int kGroups = RECAST_GROUPS;
constexpr int kTiles = RECAST_TILES;
constexpr int kAhead = 3;                       // steps whose weight has room
constexpr int kPart = kGroups * kBlockWords;    // words of a step, of the weight either way
constexpr int kForward = 128, kBackward = 256;  // threads

struct Shape {
  Index rows;
  int between, inner, depth;

  __device__ __forceinline__ int steps() const { return (inner + 15) / 16 * between; }
};

// A lane's rows of sixteen, g and g + 8.
struct Rows {
  Index low;
  bool there[2];

  __device__ __forceinline__ Rows(Index first, Index count)
      : low(first + threadIdx.x % 32 / 4), there{low < count, low + 8 < count} {}
};

// Of (rows, width) with rows `stride` apart: where a lane's columns begin in row g, and row g + 8
// is so far behind it for all lanes.
template <class T>
struct Own {
  T* at;
  Index on;

  __device__ __forceinline__ Own(T* from, Index stride, const Rows& rows)
      : at(from + rows.low * stride + column()), on(8 * stride) {}
  __device__ static __forceinline__ int column() { return static_cast<int>(threadIdx.x) % 4 * 4; }
};

// Columns 4 t to 4 t + 3 of sixteen, which are `first` and on of `width` and stand at `from`.
__device__ __forceinline__ void take(const Own<const In>& own, const Rows& rows, Index from,
                                     int first, int width, Four (&to)[2]) {
  const bool inside = first < width - own.column();
#pragma unroll
  for (int r = 0; r < 2; ++r) to[r] = four_at(own.at + from + r * own.on, rows.there[r] && inside);
}

template <class Of>
__device__ __forceinline__ void give(const Own<In>& own, const Rows& rows, Index at, int first,
                                     int width, Of of) {
  if (first >= width - own.column()) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.there[r]) continue;
    Four made;
#pragma unroll
    for (int c = 0; c < 4; ++c) recast::narrow(of(r, c), made.at[c]);
    recast::store_whole<4>(own.at + at + r * own.on, made);
  }
}

__device__ __forceinline__ void keep(const Own<const In>& own, const Rows& rows, int depth,
                                     Left (&kept)[kGroups]) {
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    Four four[2];
    float low[4], high[4];
    take(own, rows, k * 16, k * 16, depth, four);
    widen(four[0], low);
    widen(four[1], high);
    kept[k] = left_of(low, high);
  }
}

// The weight from global to shared memory, `kAhead` - 1 steps ahead of the one that uses it. All
// threads of a block together. `more(slot)` begins what else a step needs, into a place of its own.
template <int Ways>
struct Ring {
  unsigned* shared;
  const unsigned* from;
  int steps, left;  // all, and those to be asked for; behind all of one way is the other
  int into = 0, slot = kAhead - 1;  // of the next to be asked for, of the one that is used

  template <class More>
  __device__ __forceinline__ void ask(More more) {
    if (left > 0) {
      --left;
#pragma unroll
      for (int w = 0; w < Ways; ++w) {
        for (int k = static_cast<int>(threadIdx.x) * 4; k < kPart; k += blockDim.x * 4)
          recast::async_copy_16(shared + (into * Ways + w) * kPart + k,
                                from + static_cast<Index>(w * steps) * kPart + k);
      }
      from += kPart;
      more(into);
    }
    into = into + 1 == kAhead ? 0 : into + 1;
    recast::async_commit();
  }

  template <class More>
  __device__ __forceinline__ void start(More more) {
    for (int n = 0; n < kAhead - 1; ++n) ask(more);
  }

  // What is there of the next step, one way after the other.
  template <class More>
  __device__ __forceinline__ const unsigned* next(More more) {
    recast::async_wait<kAhead - 2>();
    __syncthreads();  // the copies have arrived, and all threads are done with the step before
    ask(more);
    slot = slot + 1 == kAhead ? 0 : slot + 1;
    return shared + slot * Ways * kPart;
  }
};

}  // namespace

// The right factors of a product, in the order of the lanes: packed[step][group][lane] is that of
// 16 columns and 16 terms, zeros behind the last of either. Of step (ic, e), e faster, the columns
// are i of `from[e][i][j]` and the terms j; behind all of those the other way, columns j and terms
// i. Launch: grid = (ceil(steps * groups / 8), 1 or both ways), block = 256.
extern "C" __global__ void __launch_bounds__(256)
    scaled_pack(const In* __restrict__ from, Index of_e, Index of_i, Index of_j, int between,
                int inner, int depth, unsigned* __restrict__ packed) {
  const int at = static_cast<int>(blockIdx.x) * 8 + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int step = at / kGroups, e = step % between;
  const int first_i = step / between * 16, first_j = at % kGroups * 16;
  if (first_i >= inner) return;
  const bool turned = blockIdx.y == 1;
  const int before = turned ? Shape{0, between, inner, depth}.steps() * kGroups : 0;
  const auto number = [&](int column, int term) {
    const int i = first_i + (turned ? term : column), j = first_j + (turned ? column : term);
    return i < inner && j < depth ? recast::widen(from[e * of_e + i * of_i + j * of_j]) : 0.0f;
  };
#pragma unroll
  for (int w = 0; w < kWords; w += 4) {
    recast::Pack<unsigned, 4> words;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int tile = (w + q) / (2 * kSteps), k = (w + q) % (2 * kSteps) * kEach;
      const int column = g / 2 * 4 + g % 2 + 2 * tile;
      words.at[q] = word(number(column, 4 * t + k), number(column, 4 * t + k + kEach - 1));
    }
    recast::store<4>(packed + static_cast<Index>(before + at) * kBlockWords + w * 32 + lane * 4,
                     words);
  }
}
RECAST_KERNEL(scaled_pack)

// packed: of scaled_pack. x: (rows, depth), rows x_stride apart; scale: (rows, inner) and out:
// (rows, between, inner), contiguous.
// Launch: grid = ceil(rows / (64 * TILES)), block = 128, dynamic shared memory: 3 * GROUPS KiB,
// half of it for 16 bits.
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
    keep(Own(x, x_stride, own), own, depth, kept[a]);
  }
  const Index apart = static_cast<Index>(between) * inner;
#pragma unroll 1
  for (int column = 0; column < inner; column += 16) {
    Four by[kTiles][2];
#pragma unroll
    for (int a = 0; a < kTiles; ++a) {
      const Rows own(first + 16 * a, rows);
      take(Own(scale, inner, own), own, column, column, inner, by[a]);
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
        give(Own(out, apart, own), own, static_cast<Index>(e) * inner + column, column, inner,
             [&](int r, int c) { return sums[a].of(r, c) * recast::widen(by[a][r].at[c]); });
      }
    }
  }
  recast::async_wait<0>();  // these copies are not used, but must end before the block does
}
RECAST_KERNEL(scaled_tiles_forward)

// packed: of scaled_pack, both ways. grad: as the result. dscale: (rows, inner),
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
  // Of the gradient, what a lane needs in the steps to come: where copies of that size can wait in
  // shared memory, there; else in registers.
  constexpr bool kWaits = sizeof(Four) == 16;
  In* const room = reinterpret_cast<In*>(shared + kAhead * 2 * kPart) + threadIdx.x * 4;
  const auto place = [&](int slot, int r) { return room + (slot * 2 + r) * kBackward * 4; };
  Ring<2> ring{shared, packed, shape.steps(), shape.steps()};
  int asked_column = 0, asked = 0;  // and where it stands in a row
  Four ahead[2];
  const auto ask = [&](int slot) {
    if constexpr (kWaits) {
      const bool inside = asked_column < inner - gradients.column();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool there = inside && own.there[r];
        recast::async_copy_16(place(slot, r),
                              there ? gradients.at + asked + r * gradients.on : grad, there);
      }
    } else {
      take(gradients, own, asked, asked_column, inner, ahead);
    }
    asked += inner;
    if (asked >= between * inner) asked = asked_column += 16;
  };
  const auto gradient = [&](const Four(&now)[2], float (&to)[2][4]) {
    if constexpr (kWaits) __syncwarp();  // read from shared memory again, which saves registers
#pragma unroll
    for (int r = 0; r < 2; ++r)
      widen(kWaits ? recast::load<4>(place(ring.slot, r)) : now[r], to[r]);
  };
  const auto waiting = [&](int slot) {
    if constexpr (kWaits) ask(slot);
  };
  ring.start(waiting);
  Left kept[kGroups];
  keep(Own(x, x_stride, own), own, depth, kept);
  Sums of_x[kGroups];
  if constexpr (!kWaits) ask(0);
#pragma unroll 1
  for (int column = 0; column < inner; column += 16) {
    Four by[2];
    take(scales, own, column, column, inner, by);
    float of_scale[2][4] = {};
#pragma unroll 1
    for (int e = 0; e < between; ++e) {
      const unsigned* const weight = ring.next(waiting);
      Four now[2];
      if constexpr (!kWaits) {
#pragma unroll
        for (int r = 0; r < 2; ++r) now[r] = ahead[r];
        ask(0);
      }
      if (dscale != nullptr) {
        float g[2][4];
        Sums sums[2];  // used in turn, so that no sum waits for its own last addition
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
      give(Own(dscale, inner, own), own, column, column, inner,
           [&](int r, int c) { return of_scale[r][c]; });
  }
  recast::async_wait<0>();  // these copies are not used, but must end before the block does
  if (dx == nullptr) return;
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    Four more[2];  // what this very lane has stored there
    if (add) take(Own<const In>(dscale, inner, own), own, k * 16, k * 16, inner, more);
    give(Own(dx, depth, own), own, k * 16, k * 16, depth, [&](int r, int c) {
      return of_x[k].of(r, c) + (add ? recast::widen(more[r].at[c]) : 0.0f);
    });
  }
}
RECAST_KERNEL(scaled_tiles_inputs)
