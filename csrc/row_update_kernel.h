// The inner loops of row updates, included once for each instruction set.
//
// Compiled by each_isa.h. No standard header may be included or instantiated here: what the
// compiler emits for it would carry this instruction set, and the linker may keep that copy for
// everybody.

namespace recast::rows::RECAST_ISA {

// Entries to look ahead: enough to cover a miss to memory, few enough for the first-level cache.
constexpr int kAhead = 16;
constexpr int kLine = 16;  // floats in a cache line

typedef float Vec4 __attribute__((vector_size(16)));
#if RECAST_LANES >= 8
typedef float Vec8 __attribute__((vector_size(32)));
#endif
#if RECAST_LANES >= 16
typedef float Vec16 __attribute__((vector_size(64)));
#endif

// Rows start anywhere: copies say so, and compile to unaligned moves.
template <class V>
static inline V load(const float* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}
template <class V>
static inline void store(float* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

static inline float root(float x) { return __builtin_sqrtf(x); }
static inline Vec4 root(Vec4 x) {
#if RECAST_LANES >= 8
  return _mm_sqrt_ps(x);
#else
  return Vec4{root(x[0]), root(x[1]), root(x[2]), root(x[3])};
#endif
}
#if RECAST_LANES >= 8
static inline Vec8 root(Vec8 x) { return _mm256_sqrt_ps(x); }
#endif
#if RECAST_LANES >= 16
static inline Vec16 root(Vec16 x) { return _mm512_maskz_sqrt_ps(0xffff, x); }
#endif

// Inlined by force: GCC takes a function that only prefetches for one without effect.
#define RECAST_INLINE static inline __attribute__((always_inline))

template <int Floats>
RECAST_INLINE void prefetch(const float* from) {
  for (int f = 0; f < Floats; f += kLine) __builtin_prefetch(from + f, 0, 3);
}

// Fetches columns [c, c + Floats) of the gradient, the table and the state for an entry to come.
template <Action action, int Floats>
RECAST_INLINE void look_ahead(const Run& run, const Target& to, const Entry* entry, int64_t c) {
  if (run.end - entry <= kAhead) return;
  const Entry next = entry[kAhead];
  if (run.sources == nullptr) {
    prefetch<Floats>(run.gradient + next.source * run.stride + c);
  } else {
    prefetch<Floats>(run.sources[next.source].gradient + c);
    if (run.end - entry > 2 * kAhead) __builtin_prefetch(run.sources + entry[2 * kAhead].source);
  }
  if (action == Action::store) return;
  prefetch<Floats>(to.weight + next.row * to.weight_stride + c);
  if (action == Action::adagrad) prefetch<Floats>(to.state + next.row * to.state_stride + c);
}

// N vectors of type V, from column c on, of the row whose entries are [first, last).
template <Action action, class V, int N>
static inline void columns(const Run& run, const Target& to, const Entry* first, const Entry* last,
                           int64_t c, float* weight, float* state) {
  constexpr int lanes = sizeof(V) / sizeof(float);
  V sum[N];
  for (int i = 0; i < N; ++i) sum[i] = V{};
  for (const Entry* entry = first; entry != last; ++entry) {
    if (N * lanes >= kLine || c % kLine == 0) look_ahead<action, N * lanes>(run, to, entry, c);
    const float* from;
    float factor;
    if (run.sources == nullptr) {
      from = run.gradient + entry->source * run.stride + c;
      factor = run.factor;
    } else {
      from = run.sources[entry->source].gradient + c;
      factor = run.sources[entry->source].factor;
    }
    for (int i = 0; i < N; ++i) sum[i] += load<V>(from + i * lanes) * factor;
  }
  for (int i = 0; i < N; ++i) {
    float* const w = weight + c + i * lanes;
    if (action == Action::store) {
      store(w, sum[i]);
      continue;
    }
    const V g = sum[i] * to.scale;
    const V step = g * -to.lr;
    if (action == Action::sgd) {
      store<V>(w, load<V>(w) + step);
    } else {
      float* const s = state + c + i * lanes;
      const V total = load<V>(s) + g * g;
      store(s, total);
      store<V>(w, load<V>(w) + step / (root(total) + to.eps));
    }
  }
}

template <Action action>
static void rows(const Run& run, const Target& to) {
  float* out = to.weight;
  int64_t* ids = to.ids;
  for (const Entry* first = run.first; first != run.last;) {
    const Entry* last = first + 1;
    while (last != run.last && last->row == first->row) ++last;
    float* weight = out;
    float* state = nullptr;
    if (action == Action::store) {
      *ids++ = first->row;
      out += to.weight_stride;
    } else {
      weight = to.weight + first->row * to.weight_stride;
      if (action == Action::adagrad) state = to.state + first->row * to.state_stride;
    }
    int64_t c = 0;
#if RECAST_LANES >= 16
    for (; c + 64 <= run.dim; c += 64)
      columns<action, Vec16, 4>(run, to, first, last, c, weight, state);
    for (; c + 16 <= run.dim; c += 16)
      columns<action, Vec16, 1>(run, to, first, last, c, weight, state);
#elif RECAST_LANES >= 8
    for (; c + 64 <= run.dim; c += 64)
      columns<action, Vec8, 8>(run, to, first, last, c, weight, state);
#else
    for (; c + 32 <= run.dim; c += 32)
      columns<action, Vec4, 8>(run, to, first, last, c, weight, state);
#endif
#if RECAST_LANES >= 8
    for (; c + 8 <= run.dim; c += 8)
      columns<action, Vec8, 1>(run, to, first, last, c, weight, state);
#endif
    for (; c + 4 <= run.dim; c += 4)
      columns<action, Vec4, 1>(run, to, first, last, c, weight, state);
    for (; c < run.dim; ++c) columns<action, float, 1>(run, to, first, last, c, weight, state);
    first = last;
  }
}

static void kernel(Action action, const Run& run, const Target& to) {
  switch (action) {
    case Action::sgd:
      return rows<Action::sgd>(run, to);
    case Action::adagrad:
      return rows<Action::adagrad>(run, to);
    case Action::store:
      return rows<Action::store>(run, to);
  }
}

#undef RECAST_INLINE

}  // namespace recast::rows::RECAST_ISA
