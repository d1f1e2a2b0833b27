// Updates embedding tables and their optimizer state in place, from the sorted entries of
// row_sort.cu: sums the gradients of each looked-up row (row_sums.cuh) and applies the optimizer to
// the row. Rows that were not looked up are not touched; the host reads nothing back.
//
// With g the sum of a row's gradients, times `scale` and the table's factor, divided by *grad_scale
// where it is given:
//   0 SGD               w -= lr g
//   1 Adagrad           s += g^2,          w -= lr g / (sqrt(s) + eps)
//   2 row-wise Adagrad  s += mean of g^2,  w -= lr g / (sqrt(s) + eps)     one s a row
//   3 Adam              w -= decay w,  g += l2 w,  m += (g - m) rate,  v += (g^2 - v) second_rate,
//                       w -= lr m / (sqrt(v) + eps)     in the order of torch.optim.SparseAdam
//
// Macros:
//   RECAST_ACTION      0, 1, 2 or 3, as above
//   RECAST_GRAD        dtype of gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_TABLE       dtype of tables and per-sample weights, likewise
//   RECAST_STATE       dtype of the states, likewise; all arithmetic is fp32
//   RECAST_STOCHASTIC  1: tables are rounded stochastically: the expected result is the exact one
//   RECAST_VEC         columns that a lane reads at once: 1, 2, 4 or 8. It divides dim and all
//                      strides, and all rows start at multiples of VEC elements or of 16 bytes
//   RECAST_LANES       lanes that share a row, a power of two up to 32: about dim / VEC
//   RECAST_CHUNKS      VECs of columns that a lane sums in one walk: 1, 2 or 4; wider rows take
//                      several walks over their entries
//   RECAST_TILE        entries of a warp's tile, a multiple of 32: 256 at most, 128 with
//                      wide keys or where dim > VEC * LANES * CHUNKS
//   RECAST_BLOCK       threads of a block, 256 at most
//   RECAST_WIDE_KEY    see pieces.cuh
//
// Launch, in this order, no dynamic shared memory, for neighbouring tables [first, past) of one
// class, with `tables` and `numbers` from `first` on, `from` = table_starts + first and `past` =
// table_starts + past:
//   row_update   grid: any, best a warp for each tile of the tables' entries; block: RECAST_BLOCK
//   row_combine  grid: 1 + ceil(entries of the tables / (32 TILE)), at most; block: RECAST_BLOCK
// `partials` holds 2 * ceil(entries / TILE) * partial_stride floats, partial_stride >= dim
// of each table, a multiple of VEC; `widest` is the largest dim.
#include "philox.cuh"
#include "row_parts.cuh"

namespace {

using recast::group_mask;
using recast::group_sum;
using recast::Index;
using recast::kChunks;
using recast::kColumns;
using recast::kLanes;
using recast::kVec;
using recast::kWidth;
using recast::PartsShared;
using recast::Piece;
using recast::Rows;
using recast::Sorted;
using recast::Sums;
using recast::Table;
using recast::UInt64;
using State = recast::Dtype<RECAST_STATE>::type;

constexpr bool kRowWise = RECAST_ACTION == 2;
constexpr int kStates = RECAST_ACTION == 3 ? 2 : RECAST_ACTION == 1 ? 1 : 0;  // of each weight
constexpr int kRowRegisters =
    kChunks * kVec * static_cast<int>(sizeof(Table) + kStates * sizeof(State)) / 4 +
    kRowWise;  // registers of weights and states that a lane holds of a row
// Whether they are loaded together with the gradients, where there are registers for both.
constexpr bool kPrefetch = kChunks * kVec <= 8;
// Resident blocks of a multiprocessor, as many as registers allow without spills: kernels with much
// to hold are faster with fewer threads of more rows in flight than with more threads of fewer.
constexpr bool kSmall =
    kPrefetch && kRowRegisters + recast::kGradientRegisters <= 16 && (kChunks == 1 || kVec >= 4);
constexpr int kResident = (kSmall ? 512 : 256) / RECAST_BLOCK;

// The hyperparameters of one table in this step. In device memory, so that a replayed CUDA graph
// sees new values.
struct Numbers {
  float lr, eps, scale, rate, second_rate, decay, l2, unused;  // rate: 1 - beta
  UInt64 seed;                                                 // of rounding at random
};

struct Step {
  Sorted sorted;
  const Numbers* numbers;  // of its tables
  const float* grad_scale;
};

#if RECAST_STOCHASTIC

// Word i of four, by selects: a dynamic index would put the array in local memory.
__device__ __forceinline__ unsigned word(const recast::RandomWords& words, int i) {
  return i < 2 ? (i == 0 ? words.at[0] : words.at[1]) : (i == 2 ? words.at[2] : words.at[3]);
}

// Rounds up or down at random, such that the expected result is x. NaN and infinity stay.
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

// The `Row` of row_sums.cuh that applies the optimizer.
struct UpdateRow {
  struct Held {
    recast::Pack<Table, kVec> weight[kChunks];
#if RECAST_ACTION == 1 || RECAST_ACTION == 3
    recast::Pack<State, kVec> state[kChunks];
#endif
#if RECAST_ACTION == 3
    recast::Pack<State, kVec> second[kChunks];
#endif
#if RECAST_ACTION == 2
    State state;
#endif
  };
  static constexpr int kHeld = kPrefetch ? kRowRegisters : 0;
  static constexpr int kPasses = kRowWise ? 2 : 1;  // row-wise: the first walk sums the squares

  const Step& step;
  // Of the table: the address that a row of key 0 would have, at the lane's first column, and the
  // stride in bytes.
  int dim = 0, table_number = 0;
  Key past = 0;
  UInt64 weight = 0;
  unsigned weight_stride = 0;
#if RECAST_ACTION != 0
  UInt64 state = 0;
  unsigned state_stride = 0;
#endif
#if RECAST_ACTION == 3
  UInt64 second = 0;
  unsigned second_stride = 0;
#endif
  float scale = 0.0f;  // of its gradient

  __device__ __forceinline__ explicit UpdateRow(const Step& of) : step(of) {}

  __device__ __forceinline__ static int lane_column(int column, int k) {
    return column + static_cast<int>(threadIdx.x) % kLanes * kVec + k * kWidth;
  }

  template <class T>
  __device__ __forceinline__ static void first_row(const void* base, Index columns, Index first_key,
                                                   Index column, UInt64& at, unsigned& stride) {
    stride = static_cast<unsigned>(columns) * static_cast<unsigned>(sizeof(T));
    at = reinterpret_cast<UInt64>(base) + static_cast<UInt64>(column) * sizeof(T) -
         static_cast<UInt64>(first_key) * stride;
  }

  __device__ __forceinline__ void enter(int entered, int column) {
    const Rows& table = step.sorted.tables[entered];
    const Numbers& numbers = step.numbers[entered];
    [[maybe_unused]] const int c = lane_column(column, 0);
    table_number = entered;
    dim = static_cast<int>(table.dim);
    past = static_cast<Key>(table.first_key + table.rows);
    first_row<Table>(table.weight, table.weight_stride, table.first_key, c, weight, weight_stride);
#if RECAST_ACTION != 0
    first_row<State>(table.state, table.state_stride, table.first_key, kRowWise ? 0 : c, state,
                     state_stride);
#endif
#if RECAST_ACTION == 3
    first_row<State>(table.second, table.second_stride, table.first_key, c, second, second_stride);
#endif
    scale = numbers.scale * (table.factor != nullptr ? *table.factor : 1.0f) /
            (step.grad_scale != nullptr ? *step.grad_scale : 1.0f);
  }

  template <class T>
  __device__ __forceinline__ static T* in_row(UInt64 base, unsigned stride, Key key) {
    return recast::in_global(reinterpret_cast<T*>(base + static_cast<UInt64>(key) * stride));
  }
  __device__ __forceinline__ Table* weights(Key key) const {
    return in_row<Table>(weight, weight_stride, key);
  }
#if RECAST_ACTION != 0
  __device__ __forceinline__ State* states(Key key) const {
    return in_row<State>(state, state_stride, key);
  }
#endif
#if RECAST_ACTION == 3
  __device__ __forceinline__ State* seconds(Key key) const {
    return in_row<State>(second, second_stride, key);
  }
#endif

  __device__ __forceinline__ void read_columns(Key key, int column, int k, Held& held) const {
    if (lane_column(column, k) >= dim) return;
    held.weight[k] = recast::load<kVec>(weights(key) + k * kWidth);
#if RECAST_ACTION == 1 || RECAST_ACTION == 3
    held.state[k] = recast::load<kVec>(states(key) + k * kWidth);
#endif
#if RECAST_ACTION == 3
    held.second[k] = recast::load<kVec>(seconds(key) + k * kWidth);
#endif
  }

  __device__ __forceinline__ void read(Key key, int column, Held& held) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) read_columns(key, column, k, held);
#if RECAST_ACTION == 2
    held.state = *states(key);
#endif
  }

#if RECAST_ACTION == 2
  // Computes `root`, the divisor sqrt(s) + eps of the row's gradient, and returns true once it is
  // known. A row of one walk knows it at once. In several walks, pass 0 accumulates the squares in
  // *number and finally stores the root there, for pass 1.
  __device__ __forceinline__ bool compute_root(Key key, int column, int pass, float* number,
                                               const Held& held, const Sums& sum,
                                               float& root) const {
    const bool single_walk = dim <= kColumns;
    if (pass == 1) {
      if (!single_walk) root = *number;
      return !single_walk;
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (lane_column(column, k) >= dim) break;
#pragma unroll
      for (int e = 0; e < kVec; ++e) squares += sum[k][e] * scale * (sum[k][e] * scale);
    }
    squares = group_sum<kLanes>(squares);
    if (column > 0) squares += *number;
    float next = squares;
    const bool last = column + kColumns >= dim;
    if (last) {
      State* const at = states(key);
      const float before = recast::widen(kHeld > 0 ? held.state : *at);
      const float total = before + squares / static_cast<float>(dim);
      next = root = sqrtf(total) + step.numbers[table_number].eps;
      __syncwarp(group_mask<kLanes>());  // all have read the state
      if (threadIdx.x % kLanes == 0) recast::narrow(total, *at);
    }
    if (!single_walk) {
      __syncwarp(group_mask<kLanes>());  // all have read the number
      if (threadIdx.x % kLanes == 0) *number = next;
      __syncwarp(group_mask<kLanes>());
    }
    return last && single_walk;
  }
#endif

  __device__ __forceinline__ void done(Key key, unsigned, int column, [[maybe_unused]] int pass,
                                       [[maybe_unused]] float* number, Held& held,
                                       const Sums& sum) const {
    if (column >= dim) return;
#if RECAST_ACTION == 2
    float root;
    if (!compute_root(key, column, pass, number, held, sum, root)) return;
#endif
    const Numbers& numbers = step.numbers[table_number];
    const float lr = numbers.lr;
    [[maybe_unused]] const float eps = numbers.eps;
#if RECAST_STOCHASTIC
    const UInt64 row = key - static_cast<Key>(step.sorted.tables[table_number].first_key);
#endif
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = lane_column(column, k);
      if (c >= dim) break;
      if constexpr (kHeld == 0) read_columns(key, column, k, held);
#if RECAST_STOCHASTIC
      recast::RandomWords words = {};
#endif
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        float old = recast::widen(held.weight[k].at[e]);
        float gradient = sum[k][e] * scale;
#if RECAST_ACTION == 3
        if (numbers.l2 != 0.0f) gradient += numbers.l2 * old;
        if (numbers.decay != 0.0f) old -= numbers.decay * old;
        const float mean = recast::widen(held.state[k].at[e]);
        const float square = recast::widen(held.second[k].at[e]);
        const float fresh_mean = mean + (gradient - mean) * numbers.rate;
        const float fresh_square = square + (gradient * gradient - square) * numbers.second_rate;
        recast::narrow(fresh_mean, held.state[k].at[e]);
        recast::narrow(fresh_square, held.second[k].at[e]);
        const float by = fresh_mean / (sqrtf(fresh_square) + eps) * -lr;
#else
        float by = gradient * -lr;
#if RECAST_ACTION == 1
        const float total = recast::widen(held.state[k].at[e]) + gradient * gradient;
        recast::narrow(total, held.state[k].at[e]);
        by /= sqrtf(total) + eps;
#elif RECAST_ACTION == 2
        by /= root;
#endif
#endif
        const float fresh = old + by;
#if RECAST_STOCHASTIC
        // One Philox call, with its counter, serves four columns.
        if (e % 4 == 0)
          words = recast::philox(numbers.seed, static_cast<unsigned>(row),
                                 static_cast<unsigned>(row >> 32), c / 4 + e / 4, 0);
        held.weight[k].at[e] =
            narrow_at_random(fresh, word(words, kVec >= 4 ? e % 4 : (c + e) % 4));
#else
        recast::narrow(fresh, held.weight[k].at[e]);
#endif
      }
      recast::store<kVec>(weights(key) + k * kWidth, held.weight[k]);
#if RECAST_ACTION == 1 || RECAST_ACTION == 3
      recast::store<kVec>(states(key) + k * kWidth, held.state[k]);
#endif
#if RECAST_ACTION == 3
      recast::store<kVec>(seconds(key) + k * kWidth, held.second[k]);
#endif
    }
  }
};

}  // namespace

// Updates the rows whose entries are all in one tile; writes partial sums of the others.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    row_update(const Piece* __restrict__ pieces, int bag_bits, const Rows* __restrict__ tables,
               int n_tables, const Numbers* __restrict__ numbers, const Key* __restrict__ keys,
               const unsigned* __restrict__ values, const unsigned* __restrict__ from,
               const unsigned* __restrict__ past, int entries, int widest, float* partials,
               int partial_stride, const float* grad_scale, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  RECAST_SHARED(recast::Shared<UpdateRow>, shared);
  const Sorted sorted = {
      pieces, bag_bits, tables, n_tables, keys, values, static_cast<unsigned>(entries),
      *from,  *past};
  const Step step = {sorted, numbers, grad_scale};
  UpdateRow row(step);
  recast::each_tile(sorted, row, widest, shared, partials, partial_stride);
}
RECAST_KERNEL(row_update)

// Updates the rows of which row_update wrote partial sums.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, recast::kCombineBlocks)
    row_combine(const Rows* __restrict__ tables, int n_tables, const Numbers* __restrict__ numbers,
                const Key* __restrict__ keys, const unsigned* __restrict__ from,
                const unsigned* __restrict__ past, int entries, float* partials, int partial_stride,
                const float* grad_scale, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  RECAST_SHARED(PartsShared, shared);
  const Sorted sorted = {
      nullptr, 0, tables, n_tables, keys, nullptr, static_cast<unsigned>(entries), *from, *past};
  const Step step = {sorted, numbers, grad_scale};
  UpdateRow row(step);
  recast::each_row_of_parts(sorted, row, partials, partial_stride, shared);
}
RECAST_KERNEL(row_combine)
