// Pooling of one run of bags of one lookup. Included once per instruction set: see each_isa.h.

namespace recast::embedding::RECAST_ISA {

// One register of floats. Loads and stores need no alignment.
constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

// Rows are fetched so many bytes ahead: far enough to hide memory, near enough to stay in L1.
constexpr int64_t kAheadBytes = 8192;

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

// Fetches rows of ids that come later. Each block of columns fetches its own, a number of lines
// known when compiled: a loop of unknown length here costs half the speed.
struct Ahead {
  const float* table;
  int64_t row_stride, distance;
  const int64_t* end;

  Ahead(const Run& run, int64_t total)
      : table(run.table), row_stride(run.row_stride), end(run.ids + total) {
    distance = kAheadBytes / (run.dim * 4 + 1);
    distance = distance < 4 ? 4 : distance > 64 ? 64 : distance;
  }

  // Inlined by force: GCC takes a function that only prefetches for one without effect.
  template <int Floats>
  __attribute__((always_inline)) inline void fetch(int64_t id, int64_t c) const {
    const float* row = table + id * row_stride + c;
    for (int f = 0; f < Floats; f += 16) __builtin_prefetch(row + f);
  }

  // Columns [c, c + Floats) of the row that lies `distance` after `id`.
  template <int Floats>
  __attribute__((always_inline)) inline void after(const int64_t* id, int64_t c) const {
    if (id + distance < end) fetch<Floats>(id[distance], c);
  }
};

template <int V>
static inline void copy_block(const Ahead& ahead, const int64_t* id, const float* row, float* out,
                              int64_t c) {
  ahead.after<V * kLanes>(id, c);
  for (int v = 0; v < V; ++v) at(out + c + v * kLanes) = at(row + c + v * kLanes);
}

static inline void copy_row(const Run& run, const Ahead& ahead, const int64_t* id, float* out) {
  const float* row = run.table + id[0] * run.row_stride;
  int64_t c = 0;
  for (; c + 4 * kLanes <= run.dim; c += 4 * kLanes) copy_block<4>(ahead, id, row, out, c);
  for (; c + kLanes <= run.dim; c += kLanes) copy_block<1>(ahead, id, row, out, c);
  if (c == run.dim) return;
  ahead.after<kLanes>(id, c);
  for (; c < run.dim; ++c) out[c] = row[c];
}

static inline void fill_zero(float* out, int64_t dim) {
  for (int64_t c = 0; c < dim; ++c) out[c] = 0.0f;
}

// out[c .. c + V kLanes) = Σ_i w_i row_i, V registers. `divisor`: 1 for a sum.
template <int V, bool Weighted>
static inline void sum_block(const Run& run, const Ahead& ahead, const int64_t* ids,
                             const float* weights, int64_t count, int64_t c, float divisor,
                             float* out) {
  Vector total[V];
  for (int v = 0; v < V; ++v) total[v] = Vector{};
  for (int64_t i = 0; i < count; ++i) {
    ahead.after<V * kLanes>(ids + i, c);
    const float* row = run.table + ids[i] * run.row_stride + c;
    for (int v = 0; v < V; ++v)
      total[v] += Weighted ? weights[i] * at(row + v * kLanes) : at(row + v * kLanes);
  }
  if (divisor != 1.0f)
    for (int v = 0; v < V; ++v) total[v] /= divisor;
  for (int v = 0; v < V; ++v) at(out + c + v * kLanes) = total[v];
}

template <bool Weighted>
static inline void sum_bag(const Run& run, const Ahead& ahead, const int64_t* ids,
                           const float* weights, int64_t count, float divisor, float* out) {
  int64_t c = 0;
  for (; c + 8 * kLanes <= run.dim; c += 8 * kLanes)
    sum_block<8, Weighted>(run, ahead, ids, weights, count, c, divisor, out);
  for (; c + 4 * kLanes <= run.dim; c += 4 * kLanes)
    sum_block<4, Weighted>(run, ahead, ids, weights, count, c, divisor, out);
  for (; c + kLanes <= run.dim; c += kLanes)
    sum_block<1, Weighted>(run, ahead, ids, weights, count, c, divisor, out);
  if (c == run.dim) return;
  float total[kLanes] = {};
  const int64_t rest = run.dim - c;
  for (int64_t i = 0; i < count; ++i) {
    ahead.after<kLanes>(ids + i, c);
    const float* row = run.table + ids[i] * run.row_stride + c;
    for (int64_t j = 0; j < rest; ++j) total[j] += Weighted ? weights[i] * row[j] : row[j];
  }
  for (int64_t j = 0; j < rest; ++j) out[c + j] = total[j] / divisor;
}

// The first of equal rows wins, and a NaN only when it comes first: as torch has it.
static inline void max_bag(const Run& run, const Ahead& ahead, const int64_t* ids, int64_t count,
                           float* out, int64_t* winner) {
  copy_row(run, ahead, ids, out);
  if (winner != nullptr)
    for (int64_t c = 0; c < run.dim; ++c) winner[c] = ids[0];
  for (int64_t i = 1; i < count; ++i) {
    ahead.after<64>(ids + i, 0);
    const float* row = run.table + ids[i] * run.row_stride;
    if (winner == nullptr) {
      for (int64_t c = 0; c < run.dim; ++c) out[c] = row[c] > out[c] ? row[c] : out[c];
      continue;
    }
    for (int64_t c = 0; c < run.dim; ++c) {
      const bool better = row[c] > out[c];
      out[c] = better ? row[c] : out[c];
      winner[c] = better ? ids[i] : winner[c];
    }
  }
}

static void pool(const Run& run) {
  const int64_t total = run.starts != nullptr ? run.starts[run.bags] : run.bags * run.fixed;
  const Ahead ahead(run, total);
  for (int64_t i = 0; i < ahead.distance && i < total; ++i)
    for (int64_t c = 0; c < run.dim; c += 16) ahead.fetch<16>(run.ids[i], c);
  for (int64_t bag = 0; bag < run.bags; ++bag) {
    const int64_t start = run.starts != nullptr ? run.starts[bag] : bag * run.fixed;
    const int64_t end = run.starts != nullptr ? run.starts[bag + 1] : start + run.fixed;
    float* out = run.out + bag * run.dim;
    int64_t* winner = run.winner != nullptr ? run.winner + bag * run.dim : nullptr;
    const int64_t* ids = run.ids + start;
    const int64_t count = end - start;
    if (count == 0) {
      fill_zero(out, run.dim);
      if (winner != nullptr)
        for (int64_t c = 0; c < run.dim; ++c) winner[c] = -1;
    } else if (run.mode == Mode::max) {
      max_bag(run, ahead, ids, count, out, winner);
    } else if (run.weights != nullptr) {
      sum_bag<true>(run, ahead, ids, run.weights + start, count, 1.0f, out);
    } else if (count == 1) {
      copy_row(run, ahead, ids, out);
    } else {
      const float divisor = run.mode == Mode::mean ? static_cast<float>(count) : 1.0f;
      sum_bag<false>(run, ahead, ids, nullptr, count, divisor, out);
    }
  }
}

}  // namespace recast::embedding::RECAST_ISA
