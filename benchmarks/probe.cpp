// The least that the embeddings and the dot interaction of a training step take: plain loops with
// all sizes known, one thread, no checks. See probe.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int kLanes = 8, kAhead = 16, kMostFeatures = 64;
typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

template <int D>
void fetch(const float* row) {
  for (int c = 0; c < D; c += 16) __builtin_prefetch(row + c);
}

// out[b][t][:] = Σ of the rows of bag b of table t.
template <int D>
void pool(const float* w, const int64_t* ids, float* out, int64_t tables, int64_t bags,
          int64_t many, int64_t rows) {
  for (int64_t t = 0; t < tables; ++t, w += rows * D, ids += bags * many)
    for (int64_t b = 0, p = 0; b < bags; ++b) {
      Vector sum[D / kLanes] = {};
      for (int64_t l = 0; l < many; ++l, ++p) {
        if (p + kAhead < bags * many) fetch<D>(w + ids[p + kAhead] * D);
        for (int v = 0; v < D / kLanes; ++v) sum[v] += at(w + ids[p] * D + v * kLanes);
      }
      for (int v = 0; v < D / kLanes; ++v) at(out + (b * tables + t) * D + v * kLanes) = sum[v];
    }
}

struct Entry {
  uint32_t row, bag;
};

void sort(std::vector<Entry>& entries, std::vector<Entry>& spare, int64_t rows) {
  int bits = 1;
  while (rows >> bits) ++bits;
  const int passes = (bits + 10) / 11, width = (bits + passes - 1) / passes;
  const uint32_t mask = (1u << width) - 1;
  std::vector<uint32_t> place(size_t{1} << width);
  for (int shift = 0; shift < bits; shift += width) {
    std::fill(place.begin(), place.end(), 0u);
    for (const Entry& e : entries) ++place[(e.row >> shift) & mask];
    uint32_t before = 0;
    for (uint32_t& p : place) p = std::exchange(before, before + p);
    for (const Entry& e : entries) spare[place[(e.row >> shift) & mask]++] = e;
    entries.swap(spare);
  }
}

// Adagrad on the rows looked up; g (bags, tables, D) is the gradient of what `pool` gives.
template <int D>
void update(float* w, float* state, const int64_t* ids, const float* g, int64_t tables,
            int64_t bags, int64_t many, int64_t rows, float lr, float eps) {
  const auto n = static_cast<size_t>(bags * many);
  std::vector<Entry> entries(n), spare(n);
  for (int64_t t = 0; t < tables; ++t, w += rows * D, state += rows * D, ids += n) {
    for (size_t i = 0; i < n; ++i)
      entries[i] = {static_cast<uint32_t>(ids[i]), static_cast<uint32_t>(i / many)};
    sort(entries, spare, rows);
    const auto from = [&](size_t i) { return g + (entries[i].bag * tables + t) * D; };
    for (size_t i = 0; i < n;) {
      const int64_t row = entries[i].row;
      Vector sum[D / kLanes] = {};
      for (; i < n && entries[i].row == row; ++i) {
        if (i + kAhead < n) {
          fetch<D>(w + int64_t{entries[i + kAhead].row} * D);
          fetch<D>(state + int64_t{entries[i + kAhead].row} * D);
          fetch<D>(from(i + kAhead));
        }
        for (int v = 0; v < D / kLanes; ++v) sum[v] += at(from(i) + v * kLanes);
      }
      float x[D], *const to = w + row * D, *const squares = state + row * D;
      std::memcpy(x, sum, sizeof(x));
#pragma GCC ivdep
      for (int c = 0; c < D; ++c) {
        squares[c] += x[c] * x[c];
        to[c] -= lr * x[c] / (std::sqrt(squares[c]) + eps);
      }
    }
  }
}

// out[b] = dense, then the products of all pairs i > j of the n vectors of sample b.
template <int D>
void dots(const float* dense, const float* pooled, float* out, int64_t bags, int n) {
  float z[kMostFeatures * D];
  for (int64_t b = 0; b < bags; ++b) {
    std::memcpy(z, dense + b * D, D * 4);
    std::memcpy(z + D, pooled + b * (n - 1) * D, (n - 1) * D * size_t{4});
    std::memcpy(out, z, D * 4);
    out += D;
    for (int i = 1; i < n; ++i)
      for (int j = 0; j < i; ++j) {
        Vector sum = {};
        for (int c = 0; c < D; c += kLanes) sum += at(z + i * D + c) * at(z + j * D + c);
        float total = 0.0f;
        for (int k = 0; k < kLanes; ++k) total += sum[k];
        *out++ = total;
      }
  }
}

// The gradients of `dense` and `pooled`.
template <int D>
void undots(const float* dense, const float* pooled, const float* g, float* of_dense,
            float* of_pooled, int64_t bags, int n) {
  float z[kMostFeatures * D], pairs[kMostFeatures * kMostFeatures];
  for (int64_t b = 0; b < bags; ++b) {
    std::memcpy(z, dense + b * D, D * 4);
    std::memcpy(z + D, pooled + b * (n - 1) * D, (n - 1) * D * size_t{4});
    const float* const direct = g;
    g += D;
    for (int i = 0; i < n; ++i) {
      pairs[i * n + i] = 0.0f;
      for (int j = 0; j < i; ++j) pairs[i * n + j] = pairs[j * n + i] = *g++;
    }
    for (int i = 0; i < n; ++i) {
      Vector sum[D / kLanes] = {};
      if (i == 0)
        for (int v = 0; v < D / kLanes; ++v) sum[v] = at(direct + v * kLanes);
      for (int j = 0; j < n; ++j)
        for (int v = 0; v < D / kLanes; ++v)
          sum[v] += pairs[i * n + j] * at(z + j * D + v * kLanes);
      float* to = i == 0 ? of_dense + b * D : of_pooled + (b * (n - 1) + i - 1) * D;
      for (int v = 0; v < D / kLanes; ++v) at(to + v * kLanes) = sum[v];
    }
  }
}

}  // namespace

#define EACH(D)                                                                                  \
  extern "C" void pool_##D(const float* w, const int64_t* ids, float* out, int64_t tables,       \
                           int64_t bags, int64_t many, int64_t rows) {                           \
    pool<D>(w, ids, out, tables, bags, many, rows);                                              \
  }                                                                                              \
  extern "C" void update_##D(float* w, float* state, const int64_t* ids, const float* g,         \
                             int64_t tables, int64_t bags, int64_t many, int64_t rows, float lr, \
                             float eps) {                                                        \
    update<D>(w, state, ids, g, tables, bags, many, rows, lr, eps);                              \
  }                                                                                              \
  extern "C" void dots_##D(const float* dense, const float* pooled, float* out, int64_t bags,    \
                           int64_t n) {                                                          \
    dots<D>(dense, pooled, out, bags, static_cast<int>(n));                                      \
  }                                                                                              \
  extern "C" void undots_##D(const float* dense, const float* pooled, const float* g, float* od, \
                             float* op, int64_t bags, int64_t n) {                               \
    undots<D>(dense, pooled, g, od, op, bags, static_cast<int>(n));                              \
  }
EACH(16)
EACH(64)
EACH(128)
