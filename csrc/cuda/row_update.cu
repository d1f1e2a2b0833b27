// Sums the gradient of every row that was looked up, and updates table and optimizer state in
// place. Reads the runs that row_sort.cu leaves; nothing is read back by the host.
//
// With g the sum of a row's gradients, times `scale` and the table's factor, divided by *grad_scale
// where it is given:
//   0 SGD               w -= lr g
//   1 Adagrad           s += g^2,          w -= lr g / (sqrt(s) + eps)
//   2 row-wise Adagrad  s += mean of g^2,  w -= lr g / (sqrt(s) + eps)     one s a row
//   3 Adam              w -= decay w,  g += l2 w,  m += (g - m) rate,  v += (g^2 - v) second_rate,
//                       w -= lr m / (sqrt(v) + eps)     as torch.optim.SparseAdam orders it
//
// Macros:
//   RECAST_ACTION      0, 1, 2 or 3, as above
//   RECAST_GRAD        dtype of gradients: 0 fp32, 1 fp16, 2 bf16
//   RECAST_TABLE       dtype of tables and per-sample weights, likewise
//   RECAST_STATE       dtype of the states, likewise; all arithmetic is fp32
//   RECAST_STOCHASTIC  1: tables are rounded up or down at random, without bias
//   RECAST_VEC         columns that a lane reads at once: 1, 2, 4 or 8. It divides dim and all
//                      strides, and all rows start at multiples of VEC elements or of 16 bytes
//   RECAST_LANES       lanes that share a row, a power of two up to 32: about dim / VEC
//   RECAST_CHUNKS      VECs of columns that a lane sums at once: 1, 2 or 4; wider rows are summed
//                      in several walks over their entries
//   RECAST_BLOCK       threads of a block, 256 at most
//   RECAST_WIDE_KEY    see pieces.cuh
//
// Launch, in this order, no dynamic shared memory, for neighbouring tables [first, past) of one
// class, with `tables` and `numbers` from `first` on, `from` = table_runs + first and `past` =
// table_runs + past:
//   row_update   grid: any, as many blocks as the device runs at once; block: RECAST_BLOCK
//   row_combine  grid: ceil(tiles / 64); block: RECAST_BLOCK
// with tiles = ceil(entries / longest), and `longest` that of run_starts. `partials` has room for
// 2 * tiles * partial_stride floats, partial_stride >= dim of each table, a multiple of VEC.
#include "philox.cuh"
#include "row_sums.cuh"

namespace {

using recast::group_mask;
using recast::group_sum;
using recast::Index;
using recast::kChunks;
using recast::kColumns;
using recast::kLanes;
using recast::kVec;
using recast::kWidth;
using recast::Piece;
using recast::Room;
using recast::Rows;
using recast::Sorted;
using recast::Sums;
using recast::Table;
using recast::Wide;
using State = recast::Dtype<RECAST_STATE>::type;

constexpr bool kRowWise = RECAST_ACTION == 2;
constexpr bool kEarly = kChunks * kVec <= 8;
// Blocks that run at once: Adam holds two states, and random bits take registers as well.
constexpr bool kWidest = kRowWise && RECAST_STOCHASTIC && kChunks * kVec > 16;
constexpr int kMost = (kWidest ? 256 : RECAST_ACTION == 3 ? 768 : 2048) / RECAST_BLOCK;
constexpr int kResident = recast::kResident < kMost ? recast::kResident : kMost;

// What a lane reads of a row to update it.
struct Held {
  recast::Pack<Table, kVec> weight;
#if RECAST_ACTION == 1 || RECAST_ACTION == 3
  recast::Pack<State, kVec> state;
#endif
#if RECAST_ACTION == 3
  recast::Pack<State, kVec> second;
#endif
};

// Where it does.
struct Place {
  Table* weight;
#if RECAST_ACTION != 0
  State* state;
#endif
#if RECAST_ACTION == 3
  State* second;
#endif
  Index row;
  int dim;
  float scale;  // of its gradient
};

// What a step does to one table, as the host writes it; in device memory, so that a recorded launch
// sees new ones.
struct Numbers {
  float lr, eps, scale, rate, second_rate, decay, l2, unused;  // rate: 1 - beta
  Wide seed;                                                   // of rounding at random
};

struct Step {
  Sorted sorted;
  const Numbers* numbers;  // of its tables
  const float* grad_scale;
};

#if RECAST_STOCHASTIC

// Of four random words, by selects: an index would put them in memory.
__device__ __forceinline__ unsigned word(const recast::RandomWords& words, int i) {
  return i < 2 ? (i == 0 ? words.at[0] : words.at[1]) : (i == 2 ? words.at[2] : words.at[3]);
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

// What gradients of a table are multiplied by.
__device__ __forceinline__ float scale_of(const Step& step, int number) {
  const Rows& table = step.sorted.tables[number];
  return step.numbers[number].scale * (table.factor != nullptr ? *table.factor : 1.0f) /
         (step.grad_scale != nullptr ? *step.grad_scale : 1.0f);
}

// Updates a row by one group of lanes; sum(column, dim, total, meanwhile) gives the gradient.
template <class Sum>
__device__ __forceinline__ void update(const Step& step, int number, const Place& place,
                                       const Sum& sum) {
  const int dim = place.dim, lane = threadIdx.x % kLanes;
  const float scale = place.scale;
  Held held[kChunks];
  const auto read = [&](int column, int k) {
    const int c = column + lane * kVec + k * kWidth;
    if (c >= dim) return;
    held[k].weight = recast::load<kVec>(place.weight + c);
#if RECAST_ACTION == 1 || RECAST_ACTION == 3
    held[k].state = recast::load<kVec>(place.state + c);
#endif
#if RECAST_ACTION == 3
    held[k].second = recast::load<kVec>(place.second + c);
#endif
  };
  // Beside the gradients, where there are registers for both.
  const auto sum_and_read = [&](int column, Sums& total) {
    sum(column, dim, total, [&] {
      if constexpr (kEarly) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) read(column, k);
      }
    });
  };
  Sums g = {};
#if RECAST_ACTION == 2
  const float before = recast::widen(*place.state);
  float squares = 0.0f;
  for (int column = 0; column < dim; column += kColumns) {
    sum_and_read(column, g);
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) squares += g[k][e] * scale * (g[k][e] * scale);
  }
  const float total = before + group_sum(squares) / static_cast<float>(dim);
  const float root = sqrtf(total) + step.numbers[number].eps;
  __syncwarp(group_mask());  // all have read the state
  if (lane == 0) recast::narrow(total, *place.state);
#endif
  for (int column = 0; column < dim; column += kColumns) {
    if (!kRowWise || dim > kColumns) sum_and_read(column, g);
    const Numbers& numbers = step.numbers[number];
    const float lr = numbers.lr;
    [[maybe_unused]] const float eps = numbers.eps;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = column + lane * kVec + k * kWidth;
      if (c >= dim) break;
      if (!kEarly) read(column, k);
      Held& h = held[k];
#if RECAST_STOCHASTIC
      recast::RandomWords words = {};
#endif
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        float old = recast::widen(h.weight.at[e]);
        float gradient = g[k][e] * scale;
#if RECAST_ACTION == 3
        if (numbers.l2 != 0.0f) gradient += numbers.l2 * old;
        if (numbers.decay != 0.0f) old -= numbers.decay * old;
        const float mean = recast::widen(h.state.at[e]), square = recast::widen(h.second.at[e]);
        const float fresh_mean = mean + (gradient - mean) * numbers.rate;
        const float fresh_square = square + (gradient * gradient - square) * numbers.second_rate;
        recast::narrow(fresh_mean, h.state.at[e]);
        recast::narrow(fresh_square, h.second.at[e]);
        const float by = fresh_mean / (sqrtf(fresh_square) + eps) * -lr;
#else
        float by = gradient * -lr;
#if RECAST_ACTION == 1
        const float total = recast::widen(h.state.at[e]) + gradient * gradient;
        recast::narrow(total, h.state.at[e]);
        by /= sqrtf(total) + eps;
#elif RECAST_ACTION == 2
        by /= root;
#endif
#endif
        const float fresh = old + by;
#if RECAST_STOCHASTIC
        // Four columns of a row share a counter.
        if (e % 4 == 0)
          words = recast::philox(numbers.seed, static_cast<unsigned>(place.row),
                                 static_cast<unsigned>(place.row >> 32), c / 4 + e / 4, 0);
        h.weight.at[e] = narrow_at_random(fresh, word(words, kVec >= 4 ? e % 4 : (c + e) % 4));
#else
        recast::narrow(fresh, h.weight.at[e]);
#endif
      }
      recast::store<kVec>(place.weight + c, h.weight);
#if RECAST_ACTION == 1 || RECAST_ACTION == 3
      recast::store<kVec>(place.state + c, h.state);
#endif
#if RECAST_ACTION == 3
      recast::store<kVec>(place.second + c, h.second);
#endif
    }
  }
}

struct UpdateRow {
  using Target = Place;
  const Step& step;
  __device__ __forceinline__ Place target(int number, Key key) const {
    const Rows& table = step.sorted.tables[number];
    Place place;
    place.row = static_cast<Index>(key) - table.first_key;
    place.dim = static_cast<int>(table.dim);
    place.scale = scale_of(step, number);
    place.weight = static_cast<Table*>(table.weight) + place.row * table.weight_stride;
#if RECAST_ACTION != 0
    place.state = static_cast<State*>(table.state) + place.row * table.state_stride;
#endif
#if RECAST_ACTION == 3
    place.second = static_cast<State*>(table.second) + place.row * table.second_stride;
#endif
    return place;
  }
  template <class Sum>
  __device__ __forceinline__ void operator()(unsigned, int number, const Place& place,
                                             const Sum& sum) const {
    update(step, number, place, sum);
  }
};

struct Nothing {
  __device__ __forceinline__ void operator()(unsigned, unsigned, bool) const {}
};

}  // namespace

// Sums each run; updates its row, or leaves its part of the row's sum in `partials`.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, kResident)
    row_update(const Piece* __restrict__ pieces, int bag_bits, const Rows* __restrict__ tables,
               int n_tables, const Numbers* __restrict__ numbers, const Key* __restrict__ keys,
               const unsigned* __restrict__ values, const unsigned* __restrict__ starts,
               const unsigned* __restrict__ from, const unsigned* __restrict__ past, int entries,
               int longest, float* partials, int partial_stride, const float* grad_scale,
               const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Sorted sorted = {pieces, bag_bits, tables, n_tables, keys, values, entries, longest};
  const Step step = {sorted, numbers, grad_scale};
  RECAST_SHARED(recast::Found<Place>[RECAST_BLOCK], room);
  recast::each_run(sorted, starts, from, past, partials, partial_stride, room, UpdateRow{step},
                   Nothing{});
}
RECAST_KERNEL(row_update)

// Updates the rows that row_update left in parts.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK, 2)
    row_combine(const Rows* __restrict__ tables, int n_tables, const Numbers* __restrict__ numbers,
                const Key* __restrict__ keys, int entries, int longest, float* partials,
                int partial_stride, const float* grad_scale, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  RECAST_SHARED(Room, room);
  const Sorted sorted = {nullptr, 0, tables, n_tables, keys, nullptr, entries, longest};
  const Step step = {sorted, numbers, grad_scale};
  recast::each_row_of_parts(sorted, partials, partial_stride, room, UpdateRow{step});
}
RECAST_KERNEL(row_combine)
