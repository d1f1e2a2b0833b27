// What surrounds the matrix products of an mlp, one pass over memory each:
//   forward   y = dropout(relu(x)), and one bit an element: whether its gradient passes
//   forward of a layer with one output, of weight w: y = x w + b
//   backward  dx = scale * dy where the bit is set, else 0; or dx = dy where the relu gave no
//             y <= 0, else 0; and the column sums of dx, in two steps
//   backward of a layer with one output, of weight w and with the gradient g of its output: the
//             same with dy = g w, an outer product that is never written; and the sums g' x and of
//             g
//
// The bits lie as cublasLt's RELU_AUX and DRELU epilogues have them: row r's are the `row_bytes`
// bytes from r * row_bytes on, a multiple of 16; column c is bit c % 8, from the lowest, of byte
// c / 8. Bits behind the last column are 0.
//
// A product has just written what these kernels read, its last rows last: those are still in the
// second-level cache. So all go through the rows from the last to the first, all blocks side by
// side; and what they leave in the cache are the rows that the next product begins with.
//
// Macros:
//   RECAST_OF     dtype of x, y and the gradients: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_SUM    dtype of the finished sums, likewise
//   RECAST_VEC    elements read at once: 1, 2, 4 or 8; divides n, and rows start at multiples of it
//   RECAST_LANES  neighbouring threads that share a row, each with 8 columns; a power of two to 32
//   RECAST_BLOCK  threads of a block, a multiple of 32
//   RECAST_AHEAD  rows of a thread whose reads are under way at a time
#include "intrinsics.cuh"
#include "pack.cuh"
#include "philox.cuh"

namespace {

using recast::Index;
using recast::Wide;
using T = recast::Dtype<RECAST_OF>::type;
using Sum = recast::Dtype<RECAST_SUM>::type;

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kGroup = 8;  // the columns of one byte
constexpr int kRows = RECAST_BLOCK / kLanes;
constexpr int kColumns = kLanes * kGroup;
constexpr int kAhead = RECAST_AHEAD;
constexpr int kSlab = kRows * kAhead;  // rows that a block has under way
// Blocks of mlp_one_output that a multiprocessor has registers for, of as many rows as the host
// asks for at a time; of more, fewer.
constexpr int kResident = kAhead * sizeof(T) <= 8 ? 3 : 2;

// Elements that one instruction moves, and how many of these are a group.
constexpr int kPiece = kVec * static_cast<int>(sizeof(T)) > 16 ? 16 / sizeof(T) : kVec;
constexpr int kPieces = kGroup / kPiece;

// A word of memory: an element where it is alone, else as many as fit.
template <int Bytes>
struct WordOf {
  using type = unsigned;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};

// Elements are loaded and held as words: the compiler would unpack 16-bit elements into registers
// right after each load, and so wait for it before it issues the next.
struct Piece {
  using Elements = recast::Pack<T, kPiece>;
  using Word = WordOf<sizeof(Elements)>::type;
  using Words = recast::Pack<Word, sizeof(Elements) / sizeof(Word)>;

  Words words;

  __device__ __forceinline__ void load(const T* from) {
    words = recast::load<sizeof(Words) / sizeof(Word)>(reinterpret_cast<const Word*>(from));
  }
  __device__ __forceinline__ void store(T* to) const {
    recast::store(reinterpret_cast<Word*>(to), words);
  }
  __device__ __forceinline__ void get(float (&to)[kPiece]) const {
    Elements found;
    memcpy(&found, &words, sizeof(found));
#pragma unroll
    for (int e = 0; e < kPiece; ++e) to[e] = recast::widen(found.at[e]);
  }
  __device__ __forceinline__ void put(const float (&from)[kPiece]) {
    Elements made;
#pragma unroll
    for (int e = 0; e < kPiece; ++e) recast::narrow(from[e], made.at[e]);
    memcpy(&words, &made, sizeof(made));
  }
};

// Where a thread that needs no whole byte has its columns: in pieces that lie side by side with
// those of its neighbours, so that each instruction of a warp moves whole sectors. The column of
// piece p, of element e of it within the tile, and of the tile's column the same backwards.
__device__ __forceinline__ int place(int lane, int piece) {
  return (piece * kLanes + lane) * kPiece;
}

// The bits of the `kPiece` columns from `column` on, at the place of piece p.
__device__ __forceinline__ unsigned piece_of(const unsigned char* bits, int column, int p) {
  const unsigned from_here = static_cast<unsigned>(bits[column / kGroup]) >> column % kGroup;
  return (from_here & ((1u << kPiece) - 1)) << p * kPiece;
}

// Elements <= this become 0: with relu it is 0, also in the gradient, where NaN passes as in torch;
// without relu it is NaN, and no element is <= NaN.
__device__ __forceinline__ float cut_by(bool relu) {
  return relu ? 0.0f : __uint_as_float(0x7fc00000u);  // NaN
}

// What decides which elements dropout keeps: those whose 32-bit random number is above `last`.
struct Dropout {
  Wide seed;
  int layer;
  unsigned last;
};

// Seven rounds are the fewest that pass every test its authors know.
__device__ __forceinline__ recast::RandomWords random(const Dropout& by, int row, int group,
                                                      unsigned half) {
  return recast::philox<7>(by.seed, 2 * group + half, row, by.layer, 0);
}

// Half e of four words, in the upper half of the result; the lower half is meaningless.
__device__ __forceinline__ unsigned half_of(const recast::RandomWords& words, int e) {
  return e % 2 ? words.at[e / 2] : words.at[e / 2] << 16;
}

// The halves of the result that are above those of `last` (see below_kept) are kept. The upper 16
// bits of an element's number, half e of the four words of one call, decide for all but 1 in 65536
// elements; only where they are equal to those of `last` the lower ones, of a second call, are
// computed, and the half becomes the least or the greatest. That halves the integer work, which for
// every 4 elements is as much as the reads and writes take.
__device__ __forceinline__ recast::RandomWords drawn(const Dropout& by, int row, int group) {
  const unsigned limit = by.last >> 16;
  recast::RandomWords upper = random(by, row, group, 0);
  unsigned open = 0;
#pragma unroll
  for (int w = 0; w < kGroup / 2; ++w) {
    const unsigned differ = upper.at[w] ^ limit * 0x10001u;  // a half that is 0 borrows
    open |= (differ - 0x10001u) & ~differ;
  }
  if ((open & 0x80008000u) != 0) {
    const recast::RandomWords lower = random(by, row, group, 1);
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      const unsigned mask = 0xffffu << 16 * (e % 2);
      if (half_of(upper, e) >> 16 != limit) continue;
      const bool is_kept = half_of(lower, e) >> 16 > (by.last & 0xffffu);
      upper.at[e / 2] = (upper.at[e / 2] & ~mask) | (is_kept ? mask : 0);
    }
  }
  return upper;
}

// The limit that `half` of a kept element exceeds; one less than the greatest half at most, since
// nothing exceeds that.
__device__ __forceinline__ unsigned below_kept(const Dropout& by) {
  return by.last >> 16 == 0xffffu ? 0xfffeffffu : by.last | 0xffffu;
}

// The sum of column blockIdx.x * 32 + threadIdx.x of the `count` rows of parts (count, n), in a
// fixed order, for the first 32 threads; the whole block calls it.
__device__ __forceinline__ float summed(const float* parts, int count, int n) {
  constexpr int slices = RECAST_BLOCK / 32;
  RECAST_SHARED(float[slices][32], sums);
  const int slice = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < n) {
#pragma unroll 8
    for (int p = slice; p < count; p += slices) sum += parts[static_cast<Index>(p) * n + column];
  }
  sums[slice][lane] = sum;
  __syncthreads();
  float total = 0.0f;
  if (slice == 0) {
#pragma unroll
    for (int s = 0; s < slices; ++s) total += sums[s][lane];
  }
  return total;
}

}  // namespace

// x, y (rows, n), which may be one. y null: only the bits; bits null: only y.
// With `seed`, one number on the device, an element is kept where its random number is above
// `last_dropped`, and then multiplied by `scale`; null: no dropout. Equal (seed, layer) draw equal
// numbers. The gradient passes relu where its output is not <= 0, torch's own rule.
// Launch: grid = (ceil(groups / LANES), to ceil(rows / (AHEAD BLOCK / LANES))), block =
// RECAST_BLOCK, with groups = row_bytes, or ceil(n / 8) without bits.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_activate(const T* x, T* y, unsigned char* __restrict__ bits, int row_bytes,
                 const Wide* __restrict__ seed, int layer, unsigned last_dropped, float scale,
                 int relu, int rows, int n) {
  const int group = blockIdx.x * kLanes + threadIdx.x % kLanes;
  const int column = group * kGroup;
  const bool is_there = column < n;
  const unsigned all = n - column < kGroup ? (1u << (is_there ? n - column : 0)) - 1 : 0xffu;
  const Dropout dropout = {seed != nullptr ? *seed : 0, layer, last_dropped};
  const unsigned above = below_kept(dropout);
  const float lowest = cut_by(relu);
  const int slabs = (rows + kSlab - 1) / kSlab;
  for (int slab = slabs - 1 - static_cast<int>(blockIdx.y); slab >= 0;
       slab -= static_cast<int>(gridDim.y)) {
    const int first = slab * kSlab + threadIdx.x / kLanes;
    Piece value[kAhead][kPieces];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = first + a * kRows;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int at = column + p * kPiece;
        if (at < n && row < rows) value[a][p].load(x + static_cast<Index>(row) * n + at);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = first + a * kRows;
      if (row >= rows) break;
      unsigned passes = 0;
      if (is_there) {
        recast::RandomWords words = {{~0u, ~0u, ~0u, ~0u}};
        if (seed != nullptr) words = drawn(dropout, row, group);
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          float made[kPiece];
          value[a][p].get(made);
#pragma unroll
          for (int e = 0; e < kPiece; ++e) {
            const int number = p * kPiece + e;
            const float now = made[e];
            const bool is_cut = now <= lowest;
            const bool is_open = !is_cut && half_of(words, number) > above;
            passes |= is_open ? 1u << number : 0u;
            made[e] = (is_cut ? 0.0f : now) * (is_open ? scale : 0.0f);
          }
          value[a][p].put(made);
          const int at = column + p * kPiece;
          if (y != nullptr && at < n) value[a][p].store(y + static_cast<Index>(row) * n + at);
        }
        passes &= all;
      }
      if (bits != nullptr && group < row_bytes)
        bits[static_cast<Index>(row) * row_bytes + group] = static_cast<unsigned char>(passes);
    }
  }
}
RECAST_KERNEL(mlp_activate)

namespace {

// The gradient of relu, and of dropout where it is ByBits; else by the output y of the relu.
template <bool ByBits>
__device__ __forceinline__ void gradient(const T* dy, const unsigned char* __restrict__ bits,
                                         int row_bytes, const T* __restrict__ y, float scale, T* dx,
                                         float* __restrict__ parts, int rows, int n) {
  RECAST_SHARED(float[kRows][kColumns], sums);
  const int lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const int left = blockIdx.x * kColumns;
  const int slabs = (rows + kSlab - 1) / kSlab;
  float sum[kPieces][kPiece] = {};
  for (int slab = slabs - 1 - static_cast<int>(blockIdx.y); slab >= 0;
       slab -= static_cast<int>(gridDim.y)) {
    const int first = slab * kSlab + down;
    Piece given[kAhead][kPieces], out[kAhead][kPieces];
    unsigned passes[kAhead] = {};
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = first + a * kRows;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int column = left + place(lane, p);
        if (row < rows && column < n) {
          const Index at = static_cast<Index>(row) * n + column;
          given[a][p].load(dy + at);
          if constexpr (ByBits) {
            passes[a] |= piece_of(bits + static_cast<Index>(row) * row_bytes, column, p);
          } else {
            out[a][p].load(y + at);
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = first + a * kRows;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int column = left + place(lane, p);
        if (row < rows && column < n) {
          float made[kPiece], by[kPiece];
          given[a][p].get(made);
          if constexpr (!ByBits) out[a][p].get(by);
#pragma unroll
          for (int e = 0; e < kPiece; ++e) {
            if constexpr (ByBits) {
              made[e] = passes[a] >> (p * kPiece + e) & 1u ? made[e] * scale : 0.0f;
            } else {
              made[e] = by[e] <= 0.0f ? 0.0f : made[e];
            }
            sum[p][e] += made[e];
          }
          given[a][p].put(made);
          given[a][p].store(dx + static_cast<Index>(row) * n + column);
        }
      }
    }
  }
  if (parts == nullptr) return;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int e = 0; e < kPiece; ++e) sums[down][place(lane, p) + e] = sum[p][e];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < kColumns; c += RECAST_BLOCK) {
    float total = 0.0f;
#pragma unroll 4
    for (int r = 0; r < kRows; ++r) total += sums[r][c];
    if (left + c < n) parts[static_cast<Index>(blockIdx.y) * n + left + c] = total;
  }
}

}  // namespace

// dy, dx (rows, n), which may be one. parts (gridDim.y, n): column sums of dx over each block's
// rows, before dx is rounded; or null. The order of the sums is fixed by the grid.
// Launch: grid = (ceil(n / (8 LANES)), to ceil(rows / (AHEAD BLOCK / LANES))), block =
// RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_mask_gradient(const T* dy, const unsigned char* __restrict__ bits, int row_bytes,
                      float scale, T* dx, float* __restrict__ parts, int rows, int n) {
  gradient<true>(dy, bits, row_bytes, nullptr, scale, dx, parts, rows, n);
}
RECAST_KERNEL(mlp_mask_gradient)

// The same of a relu alone, by what it gave: y (rows, n), which is not written to.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_output_gradient(const T* dy, const T* __restrict__ y, T* dx, float* __restrict__ parts,
                        int rows, int n) {
  gradient<false>(dy, nullptr, 0, y, 1.0f, dx, parts, rows, n);
}
RECAST_KERNEL(mlp_output_gradient)

// out (n,) = the sum of the `count` rows of parts (count, n), in a fixed order.
// Launch: grid = ceil(n / 32), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_sum_parts(const float* __restrict__ parts, int count, int n, Sum* out) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float total = summed(parts, count, n);
  if (threadIdx.x < 32 && column < n) recast::narrow(total, out[column]);
}
RECAST_KERNEL(mlp_sum_parts)

// Forward of a layer with one output: y (rows) = x w + b, summed in fp32 in a fixed order. x (rows,
// n) with rows `x_stride` apart; w (n,); b one element, or null.
// Launch: grid = (1, to ceil(rows / (AHEAD BLOCK / LANES))), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_one_output_forward(const T* __restrict__ x, Index x_stride, const T* __restrict__ w,
                           const T* __restrict__ b, T* __restrict__ y, int rows, int n) {
  const int lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const float added = b != nullptr ? recast::widen(*b) : 0.0f;
  const int slabs = (rows + kSlab - 1) / kSlab;
  for (int slab = slabs - 1 - static_cast<int>(blockIdx.y); slab >= 0;
       slab -= static_cast<int>(gridDim.y)) {
    const int first = slab * kSlab + down;
    float sum[kAhead] = {};
    for (int left = 0; left < n; left += kColumns) {
      Piece given[kAhead][kPieces], factor[kPieces];
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int column = left + place(lane, p);
        if (column < n) factor[p].load(w + column);
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int row = first + a * kRows;
          if (row < rows && column < n) given[a][p].load(x + row * x_stride + column);
        }
      }
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int column = left + place(lane, p);
        float by[kPiece];
        factor[p].get(by);
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          float of_x[kPiece];
          given[a][p].get(of_x);
          if (first + a * kRows < rows && column < n) {
#pragma unroll
            for (int e = 0; e < kPiece; ++e) sum[a] += of_x[e] * by[e];
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int apart = kLanes / 2; apart > 0; apart /= 2)
        sum[a] += __shfl_xor_sync(0xffffffffu, sum[a], apart);
      const int row = first + a * kRows;
      if (lane == 0 && row < rows) recast::narrow(sum[a] + added, y[row]);
    }
  }
}
RECAST_KERNEL(mlp_one_output_forward)

// Backward of a layer with one output. g (rows), `g_stride` elements from one to the next; w (n,);
// x (rows, n) with rows `x_stride` apart; dx (rows, n) contiguous. `by`: 0 all of dx passes, 1 by
// `bits`, 2 by x, which is the output of a relu. parts (gridDim.y, 2 n + 1): over each block's
// rows, the column sums of dx before it is rounded, those of g x, and the sum of g. The order of
// all sums is fixed by the grid. Launch: as of mlp_mask_gradient.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    mlp_one_output(const T* __restrict__ g, Index g_stride, const T* __restrict__ w,
                   const T* __restrict__ x, Index x_stride, int by,
                   const unsigned char* __restrict__ bits, int row_bytes, float scale,
                   T* __restrict__ dx, float* __restrict__ parts, int rows, int n) {
  RECAST_SHARED(float[2][kRows][kColumns], sums);
  RECAST_SHARED(float[kRows], of_g);
  const int lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
  const int left = blockIdx.x * kColumns;
  const int slabs = (rows + kSlab - 1) / kSlab;
  float dx_sum[kPieces][kPiece] = {}, gx_sum[kPieces][kPiece] = {}, g_sum = 0.0f;
  float factor[kPieces][kPiece] = {};
  const float lowest = cut_by(by == 2);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int column = left + place(lane, p);
    if (column < n) {
      Piece of_w;
      of_w.load(w + column);
      of_w.get(factor[p]);
    }
  }
  for (int slab = slabs - 1 - static_cast<int>(blockIdx.y); slab >= 0;
       slab -= static_cast<int>(gridDim.y)) {
    const int first = slab * kSlab + down;
    Piece given[kAhead][kPieces];
    T gradient[kAhead];
    unsigned passes[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = first + a * kRows;
      if (row < rows) gradient[a] = g[row * g_stride];
      passes[a] = by == 1 ? 0 : ~0u;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int column = left + place(lane, p);
        if (row < rows && column < n) {
          given[a][p].load(x + row * x_stride + column);
          if (by == 1) passes[a] |= piece_of(bits + static_cast<Index>(row) * row_bytes, column, p);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = first + a * kRows;
      if (row >= rows) break;
      const float of_row = recast::widen(gradient[a]);
      g_sum += of_row;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int column = left + place(lane, p);
        if (column < n) {
          float made[kPiece];
          given[a][p].get(made);
#pragma unroll
          for (int e = 0; e < kPiece; ++e) {
            const float input = made[e];
            gx_sum[p][e] += of_row * input;
            const bool is_cut = input <= lowest || !(passes[a] >> (p * kPiece + e) & 1u);
            made[e] = is_cut ? 0.0f : of_row * factor[p][e] * scale;
            dx_sum[p][e] += made[e];
          }
          given[a][p].put(made);
          given[a][p].store(dx + static_cast<Index>(row) * n + column);
        }
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int e = 0; e < kPiece; ++e) {
      sums[0][down][place(lane, p) + e] = dx_sum[p][e];
      sums[1][down][place(lane, p) + e] = gx_sum[p][e];
    }
  }
  if (lane == 0) of_g[down] = g_sum;
  __syncthreads();
  float* const to = parts + static_cast<Index>(blockIdx.y) * (2 * n + 1);
  for (int c = threadIdx.x; c < 2 * kColumns; c += RECAST_BLOCK) {
    const int which = c / kColumns, at = left + c % kColumns;
    float total = 0.0f;
#pragma unroll 4
    for (int r = 0; r < kRows; ++r) total += sums[which][r][c % kColumns];
    if (at < n) to[which * n + at] = total;
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  float total = 0.0f;
  for (int r = 0; r < kRows; ++r) total += of_g[r];
  to[2 * n] = total;
}
RECAST_KERNEL(mlp_one_output)

// The sums of the `count` parts of mlp_one_output: of_dx, of_gx (n,), of_g (1,). The first and the
// last may be null.
// Launch: grid = ceil((2 n + 1) / 32), block = RECAST_BLOCK.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    mlp_one_output_sums(const float* __restrict__ parts, int count, int n, Sum* of_dx, Sum* of_gx,
                        Sum* of_g) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const float total = summed(parts, count, 2 * n + 1);
  if (threadIdx.x >= 32 || column > 2 * n) return;
  Sum* const to = column < n ? of_dx : column < 2 * n ? of_gx : of_g;
  if (to != nullptr) recast::narrow(total, to[column < n ? column : (column - n) % n]);
}
RECAST_KERNEL(mlp_one_output_sums)
