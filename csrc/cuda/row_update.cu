// Sums the gradient of every row that was looked up, and updates table and optimizer state in
// place. Reads the runs that row_sort.cu leaves; nothing is read back by the host.
//
// With g the sum of a row's gradients, times `scale`, divided by *grad_scale where it is given:
//   0 SGD               w -= lr g
//   1 Adagrad           s += g^2,          w -= lr g / (sqrt(s) + eps)
//   2 row-wise Adagrad  s += mean of g^2,  w -= lr g / (sqrt(s) + eps)     one s a row
//
// Macros:
//   RECAST_ACTION      0, 1 or 2, as above
//   RECAST_GRAD        dtype of gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_TABLE       dtype of tables and per-sample weights, likewise
//   RECAST_STATE       dtype of the state, likewise; all arithmetic is fp32
//   RECAST_STOCHASTIC  1: tables are rounded up or down at random, without bias
//   RECAST_VEC         columns that a lane reads at once: 1, 2, 4 or 8; divides dim and all
//   strides,
//                      and all rows start at multiples of VEC elements
//   RECAST_LANES       lanes that share a row, a power of two up to 32: about dim / VEC
//   RECAST_CHUNKS      VECs of columns that a lane sums at once: 1, 2 or 4; wider rows are summed
//   in
//                      several walks over their entries
//   RECAST_BLOCK       threads of a block, 256 at most
//   RECAST_WIDE_KEY    see pieces.cuh
//
// Launch, in this order, no dynamic shared memory:
//   row_update   grid: any, as many blocks as the device runs at once; block: RECAST_BLOCK
//   row_combine  grid: ceil(tiles / 8); block: RECAST_BLOCK
// with tiles = ceil(entries / longest), and `longest` that of run_starts. `partials` has room for
// 2 * tiles * partial_stride floats, partial_stride >= dim of each table, a multiple of VEC.
//
// A row's gradients are added in the order of its entries; those of a row with more than one run in
// stretches that `longest` and the macros alone decide. Results repeat bit by bit, for any grid.
#include "intrinsics.cuh"
#include "pieces.cuh"

namespace {

using recast::Index;
using recast::Piece;
using recast::Wide;
using Grad = recast::Dtype<RECAST_GRAD>::type;
using Table = recast::Dtype<RECAST_TABLE>::type;
using State = recast::Dtype<RECAST_STATE>::type;

// What to do with one table: eight fields of 8 bytes, as the host writes them.
struct Rows {
  Table* weight;
  Index weight_stride;  // elements
  State* state;         // null for SGD
  Index state_stride;   // elements from one row's state to the next
  Index first_key, rows, dim;
  const float*
      numbers;  // lr, eps, scale; in device memory, so that a recorded launch sees new ones
};

struct Step {
  const Piece* pieces;
  int bag_bits;
  const Rows* tables;
  int n_tables;
  const Key* keys;         // sorted
  const unsigned* values;  // of the keys
  const float* grad_scale;
  const Wide* seed;
};

constexpr int kVec = RECAST_VEC;
constexpr int kLanes = RECAST_LANES;
constexpr int kChunks = RECAST_CHUNKS;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;
constexpr int kWidth = kLanes * kVec;
constexpr int kColumns = kWidth * kChunks;
constexpr int kAtOnce = kChunks >= 4 ? 2 : 4;  // gradients under way
constexpr int kTilesOfBlock = 8;
constexpr bool kRowWise = RECAST_ACTION == 2;

using Sums = float[kChunks][kVec];
using Partials = float[kGroups][kColumns];

// Where a gradient row starts, and its factor.
struct Source {
  const Grad* row;
  float factor;
};

__device__ __forceinline__ Source source_of(const Step& step, unsigned value) {
  const Piece& piece = step.pieces[value >> step.bag_bits];
  Index at = value & ((1u << step.bag_bits) - 1);
  const Grad* const gradient = static_cast<const Grad*>(piece.gradient);
  if (piece.flags & recast::kPlain) return {gradient + at * piece.stride, 1.0f};
  float factor = piece.factor != nullptr ? *piece.factor : 1.0f;
  if (piece.weights != nullptr) {
    factor *= recast::widen(static_cast<const Table*>(piece.weights)[at]);
    at = piece.bag_of[at];
  }
  if (piece.flags & recast::kMean) factor *= piece.bag_factors[at];
  return {gradient + at * piece.stride, factor};
}

// total = Σ over entries [first, last), of the lane's columns from `column` on.
__device__ __forceinline__ void sum_entries(const Step& step, unsigned first, unsigned last,
                                            int column, int dim, Sums& total) {
  column += threadIdx.x % kLanes * kVec;
#pragma unroll
  for (int k = 0; k < kChunks; ++k)
#pragma unroll
    for (int e = 0; e < kVec; ++e) total[k][e] = 0.0f;
  for (unsigned i = first; i < last; i += kAtOnce) {
    recast::Pack<Grad, kVec> read[kAtOnce][kChunks];
    float factor[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const bool inside = i + r < last;
      const Source source = source_of(step, step.values[inside ? i + r : i]);
      factor[r] = inside ? source.factor : 0.0f;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + k * kWidth;
        read[r][k] =
            inside && c < dim ? recast::load<kVec>(source.row + c) : recast::zeros<kVec, Grad>();
      }
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[k][e] += recast::widen(read[r][k].at[e]) * factor[r];
  }
}

#if RECAST_STOCHASTIC

// Philox 4x32-10 (Salmon et al., 2011): four random words for four columns of one row.
struct Words {
  unsigned a, b, c, d;
  __device__ __forceinline__ unsigned at(int i) const {
    return i < 2 ? (i == 0 ? a : b) : (i == 2 ? c : d);
  }
};

__device__ Words random_words(Wide seed, Wide row, unsigned columns) {
  unsigned a = static_cast<unsigned>(row), b = static_cast<unsigned>(row >> 32), c = columns, d = 0;
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const Wide p = static_cast<Wide>(0xD2511F53u) * a, q = static_cast<Wide>(0xCD9E8D57u) * c;
    a = static_cast<unsigned>(q >> 32) ^ b ^ k0;
    c = static_cast<unsigned>(p >> 32) ^ d ^ k1;
    b = static_cast<unsigned>(q);
    d = static_cast<unsigned>(p);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {a, b, c, d};
}

// Up with the probability that makes the expected result x.
__device__ __forceinline__ Table narrow_at_random(float x, unsigned word) {
#if RECAST_TABLE == 0
  return x;
#elif RECAST_TABLE == 1
  const __half toward_zero = __float2half_rz(x);
  const float least = __half2float(toward_zero);
  if (!(fabsf(x) < 65504.0f)) return __float2half_rn(x);
  // The bits of halves count up, away from zero.
  const unsigned sign = x < 0.0f ? 0x8000u : 0u;
  const __half away =
      __ushort_as_half(static_cast<unsigned short>((__half_as_ushort(toward_zero) | sign) + 1));
  const float share = (x - least) / (__half2float(away) - least);
  return static_cast<float>(word >> 8) * 0x1p-24f < share ? away : toward_zero;
#else
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return __float2bfloat16_rn(x);
  return __ushort_as_bfloat16(static_cast<unsigned short>((bits + (word & 0xffffu)) >> 16));
#endif
}

#endif

__device__ __forceinline__ int table_of(const Step& step, Key key) {
  int number = 0;
  for (int past = step.n_tables; past - number > 1;) {
    const int middle = (number + past) / 2;
    const bool before = static_cast<Key>(step.tables[middle].first_key) <= key;
    number = before ? middle : number;
    past = before ? past : middle;
  }
  return number;
}

#if RECAST_ACTION == 2

// The lanes of this thread's group.
__device__ __forceinline__ unsigned group_mask() {
  if (kLanes == 32) return 0xffffffffu;
  return ((1u << (kLanes % 32)) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
}

__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(group_mask(), value, d, kLanes);
  return value;
}

#endif

// Updates the row of `key` by one group of lanes; sum(column, total) gives the gradient.
template <class Sum>
__device__ __forceinline__ void update(const Step& step, Key key, const Sum& sum) {
  const Rows& table = step.tables[table_of(step, key)];
  const Index row = static_cast<Index>(key) - table.first_key;
  const int dim = static_cast<int>(table.dim), lane = threadIdx.x % kLanes;
  const float lr = table.numbers[0];
  [[maybe_unused]] const float eps = table.numbers[1];
  const float scale = table.numbers[2] / (step.grad_scale != nullptr ? *step.grad_scale : 1.0f);
  Table* const weight = table.weight + row * table.weight_stride;
  Sums g;
#if RECAST_ACTION == 2
  float squares = 0.0f;
  for (int column = 0; column < dim; column += kColumns) {
    sum(column, dim, g);
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) squares += g[k][e] * scale * (g[k][e] * scale);
  }
  State* const state = table.state + row * table.state_stride;
  const float before = recast::widen(*state);
  const float total = before + group_sum(squares) / static_cast<float>(dim);
  const float root = sqrtf(total) + eps;
  __syncwarp(group_mask());  // all have read the state
  if (lane == 0) recast::narrow(total, *state);
#endif
  for (int column = 0; column < dim; column += kColumns) {
    if (!kRowWise || dim > kColumns) sum(column, dim, g);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = column + lane * kVec + k * kWidth;
      if (c >= dim) break;
      recast::Pack<Table, kVec> w = recast::load<kVec>(weight + c);
#if RECAST_ACTION == 1
      State* const state = table.state + row * table.state_stride + c;
      recast::Pack<State, kVec> s = recast::load<kVec>(state);
#endif
#if RECAST_STOCHASTIC
      Words words = {};
#endif
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float gradient = g[k][e] * scale;
        float by = gradient * -lr;
#if RECAST_ACTION == 1
        const float total = recast::widen(s.at[e]) + gradient * gradient;
        recast::narrow(total, s.at[e]);
        by /= sqrtf(total) + eps;
#elif RECAST_ACTION == 2
        by /= root;
#endif
        const float fresh = recast::widen(w.at[e]) + by;
#if RECAST_STOCHASTIC
        if (e % 4 == 0) words = random_words(*step.seed, key, c / 4 + e / 4);
        w.at[e] = narrow_at_random(fresh, words.at(kVec >= 4 ? e % 4 : (c + e) % 4));
#else
        recast::narrow(fresh, w.at[e]);
#endif
      }
      recast::store<kVec>(weight + c, w);
#if RECAST_ACTION == 1
      recast::store<kVec>(state, s);
#endif
    }
  }
}

// The run that starts at `first` begins in the middle of a row.
__device__ __forceinline__ bool continues(const Key* keys, unsigned first) {
  return first > 0 && keys[first - 1] == keys[first];
}

}  // namespace

// Sums each run; updates its row, or, where the row has more than one run, leaves the sum in
// `partials`: at 2 * tile for a run that continues a row, at 2 * tile + 1 for one that starts it.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    row_update(const Piece* __restrict__ pieces, int bag_bits, const Rows* __restrict__ tables,
               int n_tables, const Key* __restrict__ keys, const unsigned* __restrict__ values,
               const unsigned* __restrict__ starts, const unsigned* runs, int entries, int longest,
               Key no_key, float* partials, int partial_stride, const float* grad_scale,
               const float* found_inf, const Wide* seed) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Step step = {pieces, bag_bits, tables, n_tables, keys, values, grad_scale, seed};
  const unsigned stride = gridDim.x * kGroups, all = *runs;
  for (unsigned run = blockIdx.x * kGroups + threadIdx.x / kLanes; run < all; run += stride) {
    const unsigned first = starts[run], last = starts[run + 1];
    const Key key = keys[first];
    if (key == no_key) continue;
    const bool continued = last < static_cast<unsigned>(entries) && keys[last] == key;
    if (!continued && !continues(keys, first)) {
      update(step, key, [&](int column, int dim, Sums& total) {
        sum_entries(step, first, last, column, dim, total);
      });
      continue;
    }
    const int slot = 2 * (first / longest) + (continues(keys, first) ? 0 : 1);
    float* const partial = partials + static_cast<Index>(slot) * partial_stride;
    const int dim = static_cast<int>(tables[table_of(step, key)].dim);
    for (int column = 0; column < dim; column += kColumns) {
      Sums total;
      sum_entries(step, first, last, column, dim, total);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = column + threadIdx.x % kLanes * kVec + k * kWidth;
        if (c >= dim) break;
        recast::Pack<float, kVec> pack;
#pragma unroll
        for (int e = 0; e < kVec; ++e) pack.at[e] = total[k][e];
        recast::store<kVec>(partial + c, pack);
      }
    }
  }
}
RECAST_KERNEL(row_update)

// Updates the rows that row_update left in pieces, each by the block of the tile it starts in.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    row_combine(const Piece* __restrict__ pieces, int bag_bits, const Rows* __restrict__ tables,
                int n_tables, const Key* __restrict__ keys, int entries, int longest, Key no_key,
                float* partials, int partial_stride, const float* grad_scale,
                const float* found_inf, const Wide* seed) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  RECAST_SHARED(Partials, stretches);
  const Step step = {pieces, bag_bits, tables, n_tables, keys, nullptr, grad_scale, seed};
  const int tiles = (entries + longest - 1) / longest, group = threadIdx.x / kLanes;
  const int first_tile = static_cast<int>(blockIdx.x) * kTilesOfBlock;
  for (int tile = first_tile; tile < first_tile + kTilesOfBlock && tile < tiles - 1; ++tile) {
    const Index next = static_cast<Index>(tile + 1) * longest;
    const Key key = keys[next];
    if (key == no_key || keys[next - 1] != key) continue;
    const unsigned start = static_cast<unsigned>(tile) * longest;
    if (keys[start] == key && continues(keys, start)) continue;
    int parts = 2;  // of the row, one a tile
    for (int past = tiles - tile + 1; past - parts > 1;) {
      const int middle = (parts + past) / 2;
      const bool within = keys[static_cast<Index>(tile + middle - 1) * longest] == key;
      parts = within ? middle : parts;
      past = within ? past : middle;
    }
    // The first part's place takes the sum of all.
    float* const sums = partials + (2 * static_cast<Index>(tile) + 1) * partial_stride;
    const int dim = static_cast<int>(tables[table_of(step, key)].dim);
    const int share = (parts + kGroups - 1) / kGroups;
    const int first = group * share < parts ? group * share : parts;
    const int last = parts - first < share ? parts : first + share;
    for (int column = 0; column < dim; column += kColumns) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int at = threadIdx.x % kLanes * kVec + k * kWidth;
        float total[kVec] = {};
        for (int part = first; part < last && column + at < dim; ++part) {
          const Index slot = 2 * static_cast<Index>(tile + part) + (part == 0 ? 1 : 0);
          const auto read = recast::load<kVec>(partials + slot * partial_stride + column + at);
#pragma unroll
          for (int e = 0; e < kVec; ++e) total[e] += read.at[e];
        }
#pragma unroll
        for (int e = 0; e < kVec; ++e) stretches[group][at + e] = total[e];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < kColumns && column + c < dim; c += RECAST_BLOCK) {
        float total = 0.0f;
        for (int g = 0; g < kGroups; ++g) total += stretches[g][c];
        sums[column + c] = total;
      }
      __syncthreads();
    }
    if (group != 0) continue;
    update(step, key, [&](int column, int, Sums& total) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const int c = column + threadIdx.x % kLanes * kVec + k * kWidth + e;
          total[k][e] = c < dim ? sums[c] : 0.0f;
        }
    });
  }
}
RECAST_KERNEL(row_combine)
