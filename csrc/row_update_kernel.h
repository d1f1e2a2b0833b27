// The inner loops of row updates. Included once per instruction set: see each_isa.h.
//
// No standard header may be included or instantiated here: the compiler would emit its functions
// for this instruction set, and the linker might keep that copy for all callers.

namespace recast::rows::RECAST_ISA {

// Entries to look ahead: enough to cover a cache miss, few enough to stay in L1.
constexpr int kAhead = 16;
constexpr int kLine = 64;    // bytes of a cache line
constexpr int kPlaces = 16;  // partial sums over a row

#include "row_lanes.h"

// Always inlined: GCC drops calls of a function that only prefetches, as it has no effect.
#define RECAST_INLINE inline __attribute__((always_inline))

#include "half_lanes.h"
#include "row_fades.h"
#include "row_steps.h"

// In place of a 16-bit format, for tables without one.
struct Fp32 {};

// Numbers in memory: of format Half if `narrow`, else fp32.
template <class Half>
struct Cells {
  static constexpr bool kHalves = !__is_same(Half, Fp32);

  char* data;
  bool narrow;

  RECAST_INLINE int64_t width() const { return kHalves && narrow ? 2 : 4; }
  RECAST_INLINE Cells at(int64_t i) const { return {data + i * width(), narrow}; }
  RECAST_INLINE uint16_t* halves() const { return reinterpret_cast<uint16_t*>(data); }

  template <class V>
  RECAST_INLINE V get() const {
    if constexpr (kHalves)
      if (narrow) return Half::template load<V>(halves());
    return load<V>(reinterpret_cast<const float*>(data));
  }
  template <class V>
  RECAST_INLINE void set(const V& v) const {
    if constexpr (kHalves)
      if (narrow) return Half::template store<V>(halves(), v);
    store<V>(reinterpret_cast<float*>(data), v);
  }
  template <int N>
  RECAST_INLINE void prefetch() const {
    for (int64_t byte = 0; byte < N * width(); byte += kLine) __builtin_prefetch(data + byte, 0, 3);
  }
};

// Steps without a gradient that a row's moments are to fade by first.
template <Action action>
static inline int64_t steps_to_fade(const Ages& ages, int64_t row) {
  const int32_t step = ages.last[row];
  return step == 0 ? 0 : age(ages, step) - (action == Action::adam ? 1 : 0);
}

// The sum of kPlaces numbers, in the same order on all instruction sets.
static RECAST_INLINE float sum_of(const float* places) {
#if RECAST_LANES >= 8
  const Vec8 eight = load<Vec8>(places) + load<Vec8>(places + 8);
  const Vec4 four = Vec4(_mm256_castps256_ps128(eight)) + Vec4(_mm256_extractf128_ps(eight, 1));
#else
  const Vec4 four = (load<Vec4>(places) + load<Vec4>(places + 8)) +
                    (load<Vec4>(places + 4) + load<Vec4>(places + 12));
#endif
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// A row of the table, and the entries that are its gradient.
template <Action action, class Half>
struct Row {
  using Place = Cells<Half>;
  static constexpr bool kRowWise = action == Action::row_wise_adagrad;
  static constexpr bool kAdam = action == Action::adam;
  static constexpr bool kMomentum = action == Action::momentum;
  static constexpr bool kRmsprop = action == Action::rmsprop;
  static constexpr bool kAges = kAdam || kMomentum || kRmsprop;
  static constexpr bool kStateLikeWeight = action == Action::adagrad || kAges;

  const Run& run;
  const Target& to;
  const Entry* first;
  const Entry* last;
  Place weight, state, second;
  float* squares;  // kPlaces sums of a row-wise update: by c % kPlaces of column c
  float by;        // what a row-wise update multiplies the gradient by
  float fades[2];  // what the moments are multiplied by

  RECAST_INLINE Place gradient(const Entry& entry) const {
    char* from = run.sources == nullptr ? run.gradient + entry.source * run.stride
                                        : run.sources[entry.source].gradient;
    return {from, run.narrow};
  }

  // Prefetches N columns, from c on, of the gradient, table and state of a later entry.
  template <int N>
  RECAST_INLINE void look_ahead(const Entry* entry, int64_t c) const {
    if (run.end - entry <= kAhead) return;
    const Entry next = entry[kAhead];
    gradient(next).at(c).template prefetch<N>();
    if (run.sources != nullptr && run.end - entry > 2 * kAhead)
      __builtin_prefetch(run.sources + entry[2 * kAhead].source);
    // The entries of a row are neighbours: the first of them has prefetched it.
    if (action == Action::store || next.row == entry[kAhead - 1].row) return;
    Place{to.weight, to.narrow}.at(next.row * to.stride + c).template prefetch<N>();
    const Place one{to.state.data, to.narrow_state}, two{to.second.data, to.narrow_state};
    if (kRowWise && c == 0) one.at(next.row * to.state.stride).template prefetch<1>();
    if (kStateLikeWeight) one.at(next.row * to.state.stride + c).template prefetch<N>();
    if (paired()) two.at(next.row * to.second.stride + c).template prefetch<N>();
    if (kAges && c == 0 && to.ages.last != nullptr) __builtin_prefetch(to.ages.last + next.row);
  }

  template <class V>
  RECAST_INLINE void set_weight(const V& v, int64_t c) const {
    if constexpr (Place::kHalves)
      if (to.at_random)
        return store_at_random<Half>(weight.at(c).halves(), v, to.seed, first->row, c);
    weight.at(c).set(v);
  }

  // Updates column c and those after it, given the sum of their gradients.
  template <class V>
  RECAST_INLINE void step(const V& sum, int64_t c) const {
    if (action == Action::store) return weight.at(c).set(sum);
    V g = sum * to.scale;
    V old = weight.at(c).template get<V>();
    if (action == Action::sgd) return set_weight<V>(old + g * -to.lr, c);
    const Place one = state.at(c), two = second.at(c);
    if (action == Action::adagrad) {
      const V total = one.template get<V>() + g * g;
      one.set(total);
      return set_weight<V>(old + g * -to.lr / (root(total) + to.eps), c);
    }
    V m = one.template get<V>() * fades[0], v{};
    if (paired()) v = two.template get<V>() * fades[1];
    take_step<action, false>(to, g, old, m, v);
    one.set(m);
    if (paired()) two.set(v);
    set_weight<V>(old, c);
  }

  // Whether there are two moments.
  RECAST_INLINE bool paired() const { return kAdam || (kRmsprop && to.second.data != nullptr); }

  // Notes that the row has a gradient in this step, for which its moments are to fade first.
  RECAST_INLINE void meet() {
    const int64_t k = steps_to_fade<action>(to.ages, first->row);
    for (int i = 0; i < (paired() ? 2 : 1); ++i) fades[i] = fade(to.ages, i, k);
    to.ages.last[first->row] = to.ages.now;
    // Other threads may note the same of the same block.
    __atomic_store_n(to.ages.awake + first->row / kRowsOfBlock, 1, __ATOMIC_RELAXED);
  }

  // The first pass of a row-wise update: keeps the gradient, and sums its squares.
  template <class V, int N>
  RECAST_INLINE void keep(const V (&sum)[N], int64_t c) const {
    constexpr int lanes = sizeof(V) / sizeof(float);
    constexpr int places = N * lanes < kPlaces ? N : kPlaces / lanes;
    float* const from = squares + c % kPlaces;
    V total[places];
    for (int i = 0; i < places; ++i) total[i] = load<V>(from + i * lanes);
    for (int i = 0; i < N; ++i) {
      const V g = sum[i] * to.scale;
      store<V>(run.buffer + c + i * lanes, g);
      total[i % places] += g * g;
    }
    for (int i = 0; i < places; ++i) store<V>(from + i * lanes, total[i]);
  }

  // The second pass.
  template <class V>
  RECAST_INLINE void finish(int64_t c) const {
    set_weight<V>(weight.at(c).template get<V>() + load<V>(run.buffer + c) * by, c);
  }
};

// Sums the row's gradients in N vectors of type V, from column c on, and uses the sum.
template <class V, int N, class R>
static RECAST_INLINE void columns(const R& row, int64_t c) {
  constexpr int lanes = sizeof(V) / sizeof(float);
  const Run& run = row.run;
  V sum[N];
  for (int i = 0; i < N; ++i) sum[i] = V{};
  for (const Entry* entry = row.first; entry != row.last; ++entry) {
    if (N * lanes >= 16 || c % 16 == 0) row.template look_ahead<N * lanes>(entry, c);
    const auto from = row.gradient(*entry).at(c);
    const float factor = run.sources == nullptr ? run.factor : run.sources[entry->source].factor;
    for (int i = 0; i < N; ++i) sum[i] += from.at(i * lanes).template get<V>() * factor;
  }
  if constexpr (R::kRowWise)
    row.template keep<V, N>(sum, c);
  else
    for (int i = 0; i < N; ++i) row.template step<V>(sum[i], c + i * lanes);
}

template <class V, int N, class R>
static RECAST_INLINE void finish(const R& row, int64_t c) {
  constexpr int lanes = sizeof(V) / sizeof(float);
  for (int i = 0; i < N; ++i) row.template finish<V>(c + i * lanes);
}

// Calls `walk<V, N>(row, c)` for all columns, in the widest vectors that fit.
#if RECAST_LANES >= 16
#define RECAST_WIDEST(walk)                                      \
  for (; c + 64 <= row.run.dim; c += 64) walk<Vec16, 4>(row, c); \
  for (; c + 16 <= row.run.dim; c += 16) walk<Vec16, 1>(row, c); \
  for (; c + 8 <= row.run.dim; c += 8) walk<Vec8, 1>(row, c)
#elif RECAST_LANES >= 8
#define RECAST_WIDEST(walk)                                     \
  for (; c + 64 <= row.run.dim; c += 64) walk<Vec8, 8>(row, c); \
  for (; c + 8 <= row.run.dim; c += 8) walk<Vec8, 1>(row, c)
#else
#define RECAST_WIDEST(walk) \
  for (; c + 32 <= row.run.dim; c += 32) walk<Vec4, 8>(row, c)
#endif
#define RECAST_EACH_COLUMN(walk)                                \
  do {                                                          \
    int64_t c = 0;                                              \
    RECAST_WIDEST(walk);                                        \
    for (; c + 4 <= row.run.dim; c += 4) walk<Vec4, 1>(row, c); \
    for (; c < row.run.dim; ++c) walk<float, 1>(row, c);        \
  } while (false)

template <Action action, class Half>
static void rows(const Run& given_run, const Target& given_target) {
  using R = Row<action, Half>;
  // Local copies: no store can alias them, so they are not read again after each store.
  const Run run = given_run;
  const Target to = given_target;
  float squares[kPlaces];
  typename R::Place out{to.weight, to.narrow}, one{to.state.data, to.narrow_state},
      two{to.second.data, to.narrow_state};
  int64_t* ids = to.ids;
  for (const Entry* first = run.first; first != run.last;) {
    const Entry* last = first + 1;
    while (last != run.last && last->row == first->row) ++last;
    R row{run, to, first, last, out, one, two, squares, 0.0f, {1.0f, 1.0f}};
    if (action == Action::store) {
      *ids++ = first->row;
      out = out.at(to.stride);
    } else {
      row.weight = out.at(first->row * to.stride);
      if (action != Action::sgd) row.state = one.at(first->row * to.state.stride);
      if (row.paired()) row.second = two.at(first->row * to.second.stride);
      if (R::kAges && to.ages.last != nullptr) row.meet();
    }
    if (R::kRowWise)
      for (float& place : squares) place = 0.0f;
    RECAST_EACH_COLUMN(columns);
    if constexpr (R::kRowWise) {
      const float total = row.state.template get<float>() + sum_of(squares) / run.dim;
      row.state.set(total);
      row.by = -to.lr / (root(total) + to.eps);
      RECAST_EACH_COLUMN(finish);
    }
    first = last;
  }
}

template <Action action>
static void rows_of(const Run& run, const Target& to) {
  switch (run.half) {
    case Half::none:
      return rows<action, Fp32>(run, to);
    case Half::fp16:
      return rows<action, Fp16>(run, to);
    case Half::bf16:
      return rows<action, Bf16>(run, to);
  }
}

static void kernel(const Run& run, const Target& to) {
  switch (to.action) {
    case Action::sgd:
      return rows_of<Action::sgd>(run, to);
    case Action::adagrad:
      return rows_of<Action::adagrad>(run, to);
    case Action::row_wise_adagrad:
      return rows_of<Action::row_wise_adagrad>(run, to);
    case Action::adam:
      return rows_of<Action::adam>(run, to);
    case Action::momentum:
      return rows_of<Action::momentum>(run, to);
    case Action::rmsprop:
      return rows_of<Action::rmsprop>(run, to);
    case Action::store:
      return rows_of<Action::store>(run, to);
  }
}

#undef RECAST_INLINE
#undef RECAST_WIDEST
#undef RECAST_EACH_COLUMN

}  // namespace recast::rows::RECAST_ISA
