// Pooling of one run of bags of one lookup. Included once per instruction set: see each_isa.h.

#include "embedding_formats.h"

namespace recast::embedding::RECAST_ISA {

// How many bytes ahead rows are prefetched: far enough to hide the latency of memory, near enough
// that none is evicted before its turn. On a processor with AVX2 twice as many cost 2 to 8 %. With
// AVX-512 they go into the second-level cache only, which can wait for more lines at once than the
// first, and four times as far: on an Intel Xeon a lookup of random rows takes a fifth less time.
#if RECAST_LANES == 16
constexpr int64_t kAheadBytes = 16384;
constexpr int kCache = 2;  // of __builtin_prefetch: 3 is the first-level cache
#else
constexpr int64_t kAheadBytes = 4096;
constexpr int kCache = 3;
#endif
constexpr int kLine = 64;

// Prefetches the rows of later ids. Each block of columns prefetches its own cache lines, whose
// number is known at compile time: a loop of unknown length here halves the speed.
struct Ahead {
  const char* table;
  int64_t row_bytes, distance;
  const int64_t* end;

  Ahead(const Run& run, int64_t total)
      : table(run.table), row_bytes(run.row_bytes), end(run.ids + total) {
    distance = kAheadBytes / (run.used_bytes + 1);
    distance = distance < 4 ? 4 : distance > 64 ? 64 : distance;
  }

  // Always inlined: GCC drops calls of a function that only prefetches, as it has no effect.
  template <int Size>
  __attribute__((always_inline)) inline void fetch(int64_t id, int64_t byte) const {
    const char* row = table + id * row_bytes + byte;
    for (int b = 0; b < Size; b += kLine) __builtin_prefetch(row + b, 0, kCache);
  }

  // Bytes [byte, byte + Size) of the row that lies `distance` after `id`.
  template <int Size>
  __attribute__((always_inline)) inline void after(const int64_t* id, int64_t byte) const {
    if (id + distance < end) fetch<Size>(id[distance], byte);
  }

  void whole(int64_t id, int64_t bytes) const {
    for (int64_t b = 0; b < bytes; b += kLine) fetch<kLine>(id, b);
  }
};

constexpr int kRegister = kLanes * 4;  // bytes

template <int V>
static inline void copy_block(const Ahead& ahead, const int64_t* id, const char* row, char* out,
                              int64_t b) {
  ahead.after<V * kRegister>(id, b);
  for (int v = 0; v < V; ++v) store(out + b + v * kRegister, load<Vector>(row + b + v * kRegister));
}

// Copies a row of elements of `Size` bytes as it is.
template <int Size>
static inline void copy_row(const Run& run, const Ahead& ahead, const int64_t* id, char* out) {
  const char* row = run.row<char>(id[0]);
  const int64_t end = run.dim * Size;
  int64_t b = 0;
  for (; b + 4 * kRegister <= end; b += 4 * kRegister) copy_block<4>(ahead, id, row, out, b);
  for (; b + kRegister <= end; b += kRegister) copy_block<1>(ahead, id, row, out, b);
  if (b == end) return;
  ahead.after<kRegister>(id, b);
  for (; b < end; b += Size) __builtin_memcpy(out + b, row + b, Size);
}

static inline void fill_zero(char* out, int64_t bytes) {
  for (int64_t b = 0; b < bytes; ++b) out[b] = 0;
}

// Pooling of tables of format F into outputs of format O.
template <Format F, Format O>
struct Pool {
  static constexpr int kBytes = kLanes * Row<F>::kBits / 8;  // that fill one register

  // out[c .. c + V kLanes) = Σ_i w_i row_i, V registers. `divisor`: 1 for a sum. `Fetch`: how many
  // such blocks of later rows to prefetch: two neighbours at once request more of a DRAM row while
  // it is open.
  template <int V, bool Weighted, int Fetch = 1>
  static inline void sum_block(const Run& run, const Ahead& ahead, const int64_t* ids,
                               const float* weights, int64_t count, int64_t c, float divisor,
                               const Out<O>& out) {
    Vector total[V];
    for (int v = 0; v < V; ++v) total[v] = Vector{};
    for (int64_t i = 0; i < count; ++i) {
      if (Fetch > 0)
        ahead.after<Fetch * V * kBytes + Row<F>::kTail>(ids + i, c * Row<F>::kBits / 8);
      const Row<F> row(run, ids[i]);
      for (int v = 0; v < V; ++v)
        total[v] += Weighted ? weights[i] * row.lanes(c + v * kLanes) : row.lanes(c + v * kLanes);
    }
    if (divisor != 1.0f)
      for (int v = 0; v < V; ++v) total[v] /= divisor;
    for (int v = 0; v < V; ++v) out.put(c + v * kLanes, total[v]);
  }

  template <bool Weighted>
  static inline void sum_bag(const Run& run, const Ahead& ahead, const int64_t* ids,
                             const float* weights, int64_t count, float divisor,
                             const Out<O>& out) {
    int64_t c = 0;
    for (; c + 16 * kLanes <= run.dim; c += 16 * kLanes) {
      sum_block<8, Weighted, 2>(run, ahead, ids, weights, count, c, divisor, out);
      sum_block<8, Weighted, 0>(run, ahead, ids, weights, count, c + 8 * kLanes, divisor, out);
    }
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
      ahead.after<kLine + Row<F>::kTail>(ids + i, c * Row<F>::kBits / 8);
      const Row<F> row(run, ids[i]);
      for (int64_t j = 0; j < rest; ++j)
        total[j] += Weighted ? weights[i] * row.one(c + j) : row.one(c + j);
    }
    for (int64_t j = 0; j < rest; ++j) out.put_one(c + j, total[j] / divisor);
  }

  // Columns [c, c + V kLanes) of a maximum. As in torch, the first of equal rows wins, and a NaN
  // only when it comes first.
  template <int V>
  static inline void max_block(const Run& run, const Ahead& ahead, const int64_t* ids,
                               int64_t count, int64_t c, const Out<O>& out, int64_t* winner) {
    const Row<F> first(run, ids[0]);
    Vector best[V];
    Ints which[V];
    for (int v = 0; v < V; ++v) best[v] = first.lanes(c + v * kLanes), which[v] = Ints{};
    for (int64_t i = 1; i < count; ++i) {
      ahead.after<V * kBytes + Row<F>::kTail>(ids + i, c * Row<F>::kBits / 8);
      const Row<F> row(run, ids[i]);
      for (int v = 0; v < V; ++v) {
        const Vector x = row.lanes(c + v * kLanes);
        const Ints better = (Ints)(x > best[v]);
        best[v] = (Vector)(((Ints)x & better) | ((Ints)best[v] & ~better));
        which[v] = (better & static_cast<int32_t>(i)) | (which[v] & ~better);
      }
    }
    for (int v = 0; v < V; ++v) {
      out.put(c + v * kLanes, best[v]);
      if (winner == nullptr) continue;
      for (int j = 0; j < kLanes; ++j) winner[c + v * kLanes + j] = ids[which[v][j]];
    }
  }

  static inline void max_bag(const Run& run, const Ahead& ahead, const int64_t* ids, int64_t count,
                             const Out<O>& out, int64_t* winner) {
    int64_t c = 0;
    for (; c + 4 * kLanes <= run.dim; c += 4 * kLanes)
      max_block<4>(run, ahead, ids, count, c, out, winner);
    for (; c + kLanes <= run.dim; c += kLanes) max_block<1>(run, ahead, ids, count, c, out, winner);
    for (; c < run.dim; ++c) {
      float best = Row<F>(run, ids[0]).one(c);
      int64_t which = ids[0];
      for (int64_t i = 1; i < count; ++i) {
        const float x = Row<F>(run, ids[i]).one(c);
        if (!(x > best)) continue;
        best = x;
        which = ids[i];
      }
      out.put_one(c, best);
      if (winner != nullptr) winner[c] = which;
    }
  }

  static void pool(const Run& run) {
    const int64_t total = run.starts != nullptr ? run.starts[run.bags] : run.bags * run.fixed;
    const Ahead ahead(run, total);
    for (int64_t i = 0; i < ahead.distance && i < total; ++i)
      ahead.whole(run.ids[i], run.used_bytes);
    for (int64_t bag = 0; bag < run.bags; ++bag) {
      const int64_t start = run.starts != nullptr ? run.starts[bag] : bag * run.fixed;
      const int64_t end = run.starts != nullptr ? run.starts[bag + 1] : start + run.fixed;
      char* place = run.out + bag * run.out_bytes;
      const Out<O> out(place);
      int64_t* winner = run.winner != nullptr ? run.winner + bag * run.dim : nullptr;
      const int64_t* ids = run.ids + start;
      const int64_t count = end - start;
      if (count == 0) {
        fill_zero(place, run.out_bytes);
        if (winner != nullptr)
          for (int64_t c = 0; c < run.dim; ++c) winner[c] = -1;
      } else if (run.mode == Mode::max) {
        max_bag(run, ahead, ids, count, out, winner);
      } else if (run.weights != nullptr) {
        sum_bag<true>(run, ahead, ids, run.weights + start, count, 1.0f, out);
      } else if (F == O && count == 1) {
        copy_row<Row<F>::kBits / 8>(run, ahead, ids, place);
      } else {
        const float divisor = run.mode == Mode::mean ? static_cast<float>(count) : 1.0f;
        sum_bag<false>(run, ahead, ids, nullptr, count, divisor, out);
      }
    }
  }
};

static void pool(const Run& run) {
  constexpr Format f32 = Format::float32, f16 = Format::float16, bf16 = Format::bfloat16;
  switch (run.format) {
    case Format::float32:
      return Pool<f32, f32>::pool(run);
    case Format::float16:
      return run.widens ? Pool<f16, f32>::pool(run) : Pool<f16, f16>::pool(run);
    case Format::bfloat16:
      return run.widens ? Pool<bf16, f32>::pool(run) : Pool<bf16, bf16>::pool(run);
    case Format::int8:
      return Pool<Format::int8, f32>::pool(run);
    case Format::int4:
      return Pool<Format::int4, f32>::pool(run);
  }
}

}  // namespace recast::embedding::RECAST_ISA
