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
// A table of so many bytes stays in the first-level cache: nothing is prefetched.
constexpr int64_t kCachedBytes = 1 << 15;

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
    if (run.rows * run.row_bytes <= kCachedBytes) end = run.ids;
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

// Copies a row of elements of `Size` bytes as it is. A last register that is not full ends with the
// row instead: what it covers twice is the same.
template <int Size>
static inline void copy_row(const Run& run, const Ahead& ahead, const int64_t* id, char* out) {
  const char* row = run.row<char>(id[0]);
  const int64_t end = run.dim * Size;
  if (end < kRegister) {
    ahead.after<kRegister>(id, 0);
    for (int64_t b = 0; b < end; b += Size) __builtin_memcpy(out + b, row + b, Size);
    return;
  }
  int64_t b = 0;
  for (; b + 4 * kRegister <= end; b += 4 * kRegister) copy_block<4>(ahead, id, row, out, b);
  for (; b + kRegister <= end; b += kRegister) copy_block<1>(ahead, id, row, out, b);
  if (b < end) copy_block<1>(ahead, id, row, out, end - kRegister);
}

// Copies a row for each bag, of `Bytes` bytes.
template <int Bytes>
static inline void copy_rows(const Run& run, const Ahead& ahead) {
  for (int64_t bag = 0; bag < run.bags; ++bag) {
    ahead.after<Bytes>(run.ids + bag, 0);
    __builtin_memcpy(run.out + bag * run.out_stride, run.row<char>(run.ids[bag]), Bytes);
  }
}

static inline void fill_zero(char* out, int64_t bytes) {
  for (int64_t b = 0; b < bytes; ++b) out[b] = 0;
}

template <int N>
using Int = std::integral_constant<int, N>;

// Pooling of tables of format F into outputs of format O.
template <Format F, Format O>
struct Pool {
  static constexpr int kBytes = kLanes * Row<F>::kBits / 8;  // that fill one register

  // Whether a register can be read that ends with the row; a byte of int4 holds two columns.
  static inline bool ends_whole(const Run& run) {
    return run.dim >= kLanes && (F != Format::int4 || run.dim % 2 == 0);
  }

  // Σ_i w_i row_i of V registers of columns: from c on, but the last one at `last`, so that it ends
  // with the row; what two registers cover is the same in both. `divisor`: 1 for a sum. `Fetch`:
  // how many such blocks of later rows to prefetch: two neighbours at once request more of a DRAM
  // row while it is open.
  template <int V, bool Weighted, int Fetch = 1>
  static inline void sum_block(const Run& run, const Ahead& ahead, const int64_t* ids,
                               const float* weights, int64_t count, int64_t c, int64_t last,
                               float divisor, const Out<O>& out) {
    const auto column = [=](int v) { return v == V - 1 ? last : c + v * kLanes; };
    Vector total[V];
    for (int v = 0; v < V; ++v) total[v] = Vector{};
    for (int64_t i = 0; i < count; ++i) {
      if (Fetch > 0)
        ahead.after<Fetch * V * kBytes + Row<F>::kTail>(ids + i, c * Row<F>::kBits / 8);
      const Row<F> row(run, ids[i]);
      for (int v = 0; v < V; ++v)
        total[v] += Weighted ? weights[i] * row.lanes(column(v)) : row.lanes(column(v));
    }
    if (divisor != 1.0f)
      for (int v = 0; v < V; ++v) total[v] /= divisor;
    for (int v = 0; v < V; ++v) out.put(column(v), total[v]);
  }

  // The last `N` columns, or `rest` if N is 0: fewer than a register has.
  template <int N, bool Weighted>
  static inline void sum_few(const Run& run, const Ahead& ahead, const int64_t* ids,
                             const float* weights, int64_t count, int64_t rest, float divisor,
                             const Out<O>& out) {
    float total[kLanes] = {};
    const int64_t few = N > 0 ? N : rest, c = run.dim - few;
    for (int64_t i = 0; i < count; ++i) {
      ahead.after<kLine + Row<F>::kTail>(ids + i, c * Row<F>::kBits / 8);
      const Row<F> row(run, ids[i]);
      for (int64_t j = 0; j < few; ++j)
        total[j] += Weighted ? weights[i] * row.one(c + j) : row.one(c + j);
    }
    for (int64_t j = 0; j < few; ++j) out.put_one(c + j, total[j] / divisor);
  }

  template <bool Weighted>
  static inline void sum_bag(const Run& run, const Ahead& ahead, const int64_t* ids,
                             const float* weights, int64_t count, float divisor,
                             const Out<O>& out) {
    const auto block = [&](auto registers, auto fetch, int64_t c, int64_t last) {
      sum_block<registers.value, Weighted, fetch.value>(run, ahead, ids, weights, count, c, last,
                                                        divisor, out);
    };
    int64_t c = 0;
    for (; c + 16 * kLanes <= run.dim; c += 16 * kLanes) {
      block(Int<8>{}, Int<2>{}, c, c + 7 * kLanes);
      block(Int<8>{}, Int<0>{}, c + 8 * kLanes, c + 15 * kLanes);
    }
    for (; c + 8 * kLanes <= run.dim; c += 8 * kLanes) block(Int<8>{}, Int<1>{}, c, c + 7 * kLanes);
    for (; c + 4 * kLanes <= run.dim; c += 4 * kLanes) block(Int<4>{}, Int<1>{}, c, c + 3 * kLanes);
    if (ends_whole(run)) {
      const int64_t last = run.dim - kLanes;
      switch ((run.dim - c + kLanes - 1) / kLanes) {
        case 1:
          return block(Int<1>{}, Int<1>{}, c, last);
        case 2:
          return block(Int<2>{}, Int<1>{}, c, last);
        case 3:
          return block(Int<3>{}, Int<1>{}, c, last);
        case 4:
          return block(Int<4>{}, Int<1>{}, c, last);
        default:
          return;
      }
    }
    for (; c + kLanes <= run.dim; c += kLanes) block(Int<1>{}, Int<1>{}, c, c);
    const int64_t rest = run.dim - c;
    if (rest == 1)
      sum_few<1, Weighted>(run, ahead, ids, weights, count, rest, divisor, out);
    else if (rest > 0)
      sum_few<0, Weighted>(run, ahead, ids, weights, count, rest, divisor, out);
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
    if (c < run.dim && ends_whole(run))
      return max_block<1>(run, ahead, ids, count, run.dim - kLanes, out, winner);
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

  static void copy(const Run& run, const Ahead& ahead) {
    constexpr int kSize = Row<F>::kBits / 8;
    const int64_t bytes = run.dim * kSize;
    if (bytes == kSize) return copy_rows<kSize>(run, ahead);
    if (bytes == kRegister) return copy_rows<kRegister>(run, ahead);
    if (bytes == 2 * kRegister) return copy_rows<2 * kRegister>(run, ahead);
    if (bytes == 4 * kRegister) return copy_rows<4 * kRegister>(run, ahead);
    for (int64_t bag = 0; bag < run.bags; ++bag)
      copy_row<kSize>(run, ahead, run.ids + bag, run.out + bag * run.out_stride);
  }

  // Sums of G bags, whose rows have up to V registers: side by side, as each sum alone would wait
  // for one addition after the other.
  template <int G, int V, bool Weighted>
  static inline void sum_together(const Run& run, const Ahead& ahead, int64_t bag) {
    const int64_t last = run.dim - kLanes;
    const auto column = [=](int v) { return v == V - 1 ? last : v * kLanes; };
    Vector total[G][V];
    int64_t start[G], count[G], common = INT64_MAX;
    for (int g = 0; g < G; ++g) {
      start[g] = run.start(bag + g);
      count[g] = run.start(bag + g + 1) - start[g];
      common = count[g] < common ? count[g] : common;
      for (int v = 0; v < V; ++v) total[g][v] = Vector{};
    }
    const auto add = [&](int g, int64_t i) {
      const int64_t* id = run.ids + start[g] + i;
      ahead.after<V * kBytes + Row<F>::kTail>(id, 0);
      const Row<F> row(run, *id);
      const float weight = Weighted ? run.weights[start[g] + i] : 1.0f;
      for (int v = 0; v < V; ++v)
        total[g][v] += Weighted ? weight * row.lanes(column(v)) : row.lanes(column(v));
    };
    for (int64_t i = 0; i < common; ++i)
      for (int g = 0; g < G; ++g) add(g, i);
    for (int g = 0; g < G; ++g) {
      for (int64_t i = common; i < count[g]; ++i) add(g, i);
      const Out<O> out(run.out + (bag + g) * run.out_stride);
      if (run.mode == Mode::mean && count[g] > 1)
        for (int v = 0; v < V; ++v) total[g][v] /= static_cast<float>(count[g]);
      for (int v = 0; v < V; ++v) out.put(column(v), total[g][v]);
    }
  }

  // As many bags as can be summed side by side; returns their number.
  template <bool Weighted>
  static int64_t sum_bags(const Run& run, const Ahead& ahead) {
    int64_t bag = 0;
    const auto each = [&](auto together, auto registers) {
      constexpr int G = together.value;
      for (; bag + G <= run.bags; bag += G)
        sum_together<G, registers.value, Weighted>(run, ahead, bag);
    };
    if (!ends_whole(run)) return bag;
    switch ((run.dim + kLanes - 1) / kLanes) {
      case 1:
        each(Int<4>{}, Int<1>{});
        break;
      case 2:
        each(Int<2>{}, Int<2>{});
        break;
      case 3:
        each(Int<2>{}, Int<3>{});
        break;
      case 4:
        each(Int<2>{}, Int<4>{});
        break;
      default:
        break;
    }
    return bag;
  }

  static void pool(const Run& run) {
    const Ahead ahead(run, run.start(run.bags));
    for (const int64_t* id = run.ids; id < ahead.end && id < run.ids + ahead.distance; ++id)
      ahead.whole(*id, run.used_bytes);
    if (F == O && run.copies()) return copy(run, ahead);
    int64_t bag = 0;
    if (run.mode != Mode::max)
      bag = run.weights == nullptr ? sum_bags<false>(run, ahead) : sum_bags<true>(run, ahead);
    for (; bag < run.bags; ++bag) {
      const int64_t start = run.start(bag), count = run.start(bag + 1) - start;
      char* place = run.out + bag * run.out_stride;
      const Out<O> out(place);
      int64_t* winner = run.winner != nullptr ? run.winner + bag * run.dim : nullptr;
      const int64_t* ids = run.ids + start;
      if (count == 0) {
        fill_zero(place, run.out_bytes);
        if (winner != nullptr)
          for (int64_t c = 0; c < run.dim; ++c) winner[c] = -1;
      } else if (run.mode == Mode::max) {
        max_bag(run, ahead, ids, count, out, winner);
      } else if (run.weights != nullptr) {
        sum_bag<true>(run, ahead, ids, run.weights + start, count, 1.0f, out);
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
