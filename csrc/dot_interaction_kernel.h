// Dot products of all pairs of features of one sample, forward and backward. Included once per
// instruction set: see each_isa.h.
//
// Forward: the rows are transposed, so that a register holds several columns j of Z = T Tᵀ, and
// eight rows i are accumulated at once: no horizontal sum is ever needed.

namespace recast::dot::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));
constexpr int kBlock = 16;                   // rows and columns of a transposed block
constexpr int kRows = 8;                     // rows of Z accumulated at once
constexpr int kWide = kLanes == 16 ? 4 : 2;  // registers per row in backward
constexpr int kHigh = kLanes == 16 ? 4 : 6;  // rows at once in backward: 16 or 12 registers in all

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

#if defined(RECAST_AVX512)
// out[d * stride + r] = rows[r][d], sixteen by sixteen.
static inline void transpose16(const float* const* rows, float* out, int64_t stride) {
  __m512 a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_ps(rows[r]);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {
    const __m512d p = _mm512_castps_pd(b[r]), q = _mm512_castps_pd(b[r + 1]);
    const __m512d s = _mm512_castps_pd(b[r + 2]), t = _mm512_castps_pd(b[r + 3]);
    a[r] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, s));
    a[r + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, s));
    a[r + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(q, t));
    a[r + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(q, t));
  }
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88);
    b[c + 4] = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
    b[c + 8] = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88);
    b[c + 12] = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    _mm512_storeu_ps(out + c * stride, _mm512_shuffle_f32x4(b[c], b[c + 8], 0x88));
    _mm512_storeu_ps(out + (c + 8) * stride, _mm512_shuffle_f32x4(b[c], b[c + 8], 0xdd));
    _mm512_storeu_ps(out + (c + 4) * stride, _mm512_shuffle_f32x4(b[c + 4], b[c + 12], 0x88));
    _mm512_storeu_ps(out + (c + 12) * stride, _mm512_shuffle_f32x4(b[c + 4], b[c + 12], 0xdd));
  }
}
#endif
#include "transpose8.h"

#if !defined(RECAST_AVX512)
static inline void transpose16(const float* const* rows, float* out, int64_t stride) {
  for (int r = 0; r < 16; r += 8)
    for (int d = 0; d < 16; d += 8) transpose8(rows + r, d, out + d * stride + r, stride);
}
#endif

// columns[d * stride + j] = rows[j][from + d] for d in [0, dims); columns past `count` are zero.
static void transpose(const float* const* rows, int64_t count, int64_t from, int64_t dims,
                      const float* zeros, float* columns, int64_t stride) {
  for (int64_t j = 0; j < stride; j += kBlock) {
    const float* block[kBlock];
    for (int r = 0; r < kBlock; ++r) block[r] = j + r < count ? rows[j + r] + from : zeros;
    int64_t d = 0;
    for (; d + kBlock <= dims; d += kBlock) {
      transpose16(block, columns + d * stride + j, stride);
      for (int r = 0; r < kBlock; ++r) block[r] += j + r < count ? kBlock : 0;
    }
    for (int64_t e = d; e < dims; ++e)
      for (int r = 0; r < kBlock; ++r) columns[e * stride + j + r] = block[r][e - d];
  }
}

// z[i + r][j .. j + V kLanes) += Σ_d rows[i + r][from + d] columns[d][j ..), for R rows.
template <int R, int V>
static inline void product_block(const float* const* rows, int64_t from, int64_t dims,
                                 const float* columns, int64_t stride, float* z) {
  const float* row[R];
  Vector total[R][V];
  for (int r = 0; r < R; ++r) {
    row[r] = rows[r] + from;
    for (int v = 0; v < V; ++v) total[r][v] = at(z + r * stride + v * kLanes);
  }
  for (int64_t d = 0; d < dims; ++d)
    for (int v = 0; v < V; ++v) {
      const Vector column = at(columns + d * stride + v * kLanes);
      for (int r = 0; r < R; ++r) total[r][v] += row[r][d] * column;
    }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) at(z + r * stride + v * kLanes) = total[r][v];
}

// The same for columns [begin, end), in whole registers, of the last few rows: two registers at
// once, so that there are enough independent sums.
template <int R>
static inline void product_rows(const float* const* rows, int64_t from, int64_t dims,
                                const float* columns, int64_t stride, int64_t begin, int64_t end,
                                float* z) {
  int64_t j = begin;
  for (; j + kLanes < end; j += 2 * kLanes)
    product_block<R, 2>(rows, from, dims, columns + j, stride, z + j);
  if (j < end) product_block<R, 1>(rows, from, dims, columns + j, stride, z + j);
}

// Copies `count` numbers a register at a time; may read and write more of them, but writes nothing
// from `end` on.
static inline void copy(const float* from, int64_t count, float* into, const float* end) {
  int64_t j = 0;
  for (; j < count && into + j + kLanes <= end; j += kLanes) at(into + j) = at(from + j);
  for (; j < count; ++j) into[j] = from[j];
}

// One sample: the needed half of Z into scratch, then the pairs into `out`.
static void forward(const Shape& shape, const float* const* rows, float* z, float* columns,
                    float* out) {
  const int64_t n = shape.features, stride = shape.stride;
  for (int64_t e = 0; e < n * stride; ++e) z[e] = 0.0f;
  for (int64_t from = 0; from < shape.dim; from += kDims) {
    const int64_t dims = shape.dim - from < kDims ? shape.dim - from : kDims;
    transpose(rows, n, from, dims, shape.zeros, columns, stride);
    for (int64_t i = 0; i < n; i += kRows) {
      const int64_t last = i + kRows < n ? i + kRows : n;  // rows [i, last)
      const int64_t begin = shape.pairs == Pairs::upper ? i / kLanes * kLanes : 0;
      const int64_t end = shape.pairs == Pairs::upper ? n : last;
      if (last - i == kRows) {
        for (int64_t j = begin; j < end; j += kLanes)
          product_block<kRows, 1>(rows + i, from, dims, columns + j, stride, z + i * stride + j);
        continue;
      }
      int64_t r = i;
      for (; r + 3 <= last; r += 3)
        product_rows<3>(rows + r, from, dims, columns, stride, begin, end, z + r * stride);
      for (; r < last; ++r)
        product_rows<1>(rows + r, from, dims, columns, stride, begin, end, z + r * stride);
    }
  }
  if (shape.pairs == Pairs::any) {
    for (int64_t p = 0; p < shape.count; ++p) out[p] = z[shape.place[p]];
    return;
  }
  const float* const last = out + shape.count;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = shape.pairs == Pairs::upper ? i + 1 : 0;
    const int64_t end = shape.pairs == Pairs::upper ? n : shape.pairs == Pairs::lower ? i : i + 1;
    // The surplus is overwritten by the next row.
    copy(z + i * stride + begin, end - begin, out, last);
    out += end - begin;
  }
}

// ---------------------------------------------------------------- several samples at once

// The same results, to the bit, with kTogether samples side by side in a register: only products
// next to the diagonal are wasted, and nothing is read as a scalar. With registers of sixteen the
// other way is as fast.
typedef float Several __attribute__((vector_size(kTogether * 4), aligned(4), may_alias));
constexpr int kAcross = 4, kDown = 3;  // pairs at once

static int64_t together() { return kLanes == 16 ? 1 : kTogether; }

static inline const Several& several(const float* p) {
  return *reinterpret_cast<const Several*>(p);
}
static inline Several& several(float* p) { return *reinterpret_cast<Several*>(p); }

// z[r * stride + c] (+)= Σ_d a[r * apart + d] b[c * apart + d], for kTogether samples each.
template <int R, int C>
static inline void pair_block(const float* a, const float* b, int64_t dims, bool add, float* z,
                              int64_t stride) {
  constexpr int64_t apart = kTurned * kTogether;
  Several total[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      total[r][c] = add ? several(z + (r * stride + c) * kTogether) : Several{};
  for (int64_t d = 0; d < dims * kTogether; d += kTogether) {
    Several left[R];
    for (int r = 0; r < R; ++r) left[r] = several(a + r * apart + d);
    for (int c = 0; c < C; ++c) {
      const Several right = several(b + c * apart + d);
      for (int r = 0; r < R; ++r) total[r][c] += left[r] * right;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) several(z + (r * stride + c) * kTogether) = total[r][c];
}

// Prefetches one cache line of each coming row, a few at a time between products: all at once, the
// products would wait for memory, and then memory for the products.
struct Ahead {
  const float* const* next;
  const float* const* end;
  int64_t column, many;

  // Always inlined: GCC drops calls of a function that only prefetches, as it has no effect.
  __attribute__((always_inline)) inline void some() {
    for (int64_t k = 0; k < many && next < end; ++k) __builtin_prefetch(*next++ + column, 0, 2);
  }
};

// Columns [0, end) of R rows of Z.
template <int R>
static inline void pair_rows(const float* a, const float* turned, int64_t end, int64_t dims,
                             bool add, float* z, int64_t stride, Ahead& ahead) {
  constexpr int64_t apart = kTurned * kTogether;
  int64_t j = 0;
  for (; j + kAcross <= end; j += kAcross) {
    ahead.some();
    pair_block<R, kAcross>(a, turned + j * apart, dims, add, z + j * kTogether, stride);
  }
  ahead.some();
  const float* b = turned + j * apart;
  if (end - j == 1) pair_block<R, 1>(a, b, dims, add, z + j * kTogether, stride);
  if (end - j == 2) pair_block<R, 2>(a, b, dims, add, z + j * kTogether, stride);
  if (end - j == 3) pair_block<R, 3>(a, b, dims, add, z + j * kTogether, stride);
}

// rows[s * features + f]: feature f of sample s; `coming`: those of the next samples. `turned`:
// features * kTurned * kTogether floats, `z`: features * stride * kTogether. The pairs of sample s
// go to out + s * out_stride; not for Pairs::any.
static void forward_together(const Shape& shape, const float* const* rows, const Coming& coming,
                             float* turned, float* z, float* out, int64_t out_stride) {
  constexpr int64_t apart = kTurned * kTogether;
  const int64_t n = shape.features, stride = shape.stride;
  const int64_t blocks = n * (n + 1) / (2 * kAcross * kDown) + 1;
  for (int64_t from = 0; from < shape.dim; from += kTurned) {
    const int64_t dims = shape.dim - from < kTurned ? shape.dim - from : kTurned;
    for (int64_t f = 0; f < n; ++f) {
      const float* eight[kTogether];
      for (int s = 0; s < kTogether; ++s) eight[s] = rows[s * n + f] + from;
      float* into = turned + f * apart;
      int64_t d = 0;
      for (; d + 8 <= dims; d += 8) transpose8(eight, d, into + d * kTogether, kTogether);
      for (; d < dims; ++d)
        for (int s = 0; s < kTogether; ++s) into[d * kTogether + s] = eight[s][d];
    }
    const bool add = from > 0;
    Ahead ahead{coming.rows, coming.rows + coming.count, from, coming.count / blocks + 1};
    int64_t i = 0;
    for (; i + kDown <= n; i += kDown)
      pair_rows<kDown>(turned + i * apart, turned, i + kDown, dims, add, z + i * stride * kTogether,
                       stride, ahead);
    for (; i < n; ++i)
      pair_rows<1>(turned + i * apart, turned, i + 1, dims, add, z + i * stride * kTogether, stride,
                   ahead);
    while (ahead.next < ahead.end) ahead.some();
  }
  const float* pairs[8];
  int held = 0;
  int64_t p = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = shape.pairs == Pairs::upper ? i + 1 : 0;
    const int64_t end = shape.pairs == Pairs::upper ? n : shape.pairs == Pairs::lower ? i : i + 1;
    for (int64_t j = begin; j < end; ++j) {
      const int64_t place = i > j ? i * stride + j : j * stride + i;
      pairs[held++] = z + place * kTogether;
      if (held < 8) continue;
      transpose8(pairs, 0, out + p, out_stride);
      p += 8;
      held = 0;
    }
  }
  for (int k = 0; k < held; ++k)
    for (int s = 0; s < kTogether; ++s) out[s * out_stride + p + k] = pairs[k][s];
}

// into[r][c .. c + V kLanes) = Σ_j s[r][j] rows[j][c ..), for R rows of the symmetric s.
template <int R, int V>
static inline void gradient_block(const Shape& shape, const float* const* rows, const float* s,
                                  int64_t c, float* const* into) {
  Vector total[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) total[r][v] = Vector{};
  for (int64_t j = 0; j < shape.features; ++j) {
    Vector row[V];
    for (int v = 0; v < V; ++v) row[v] = at(rows[j] + c + v * kLanes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) total[r][v] += s[r * shape.stride + j] * row[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) at(into[r] + c + v * kLanes) = total[r][v];
}

template <int R>
static inline void gradient_rows(const Shape& shape, const float* const* rows, const float* s,
                                 float* const* into) {
  int64_t c = 0;
  for (; c + kWide * kLanes <= shape.dim; c += kWide * kLanes)
    gradient_block<R, kWide>(shape, rows, s, c, into);
  for (; c + kLanes <= shape.dim; c += kLanes) gradient_block<R, 1>(shape, rows, s, c, into);
  for (; c < shape.dim; ++c)
    for (int r = 0; r < R; ++r) {
      float total = 0.0f;
      for (int64_t j = 0; j < shape.features; ++j) total += s[r * shape.stride + j] * rows[j][c];
      into[r][c] = total;
    }
}

// One sample: G + Gᵀ into scratch, then its product with the rows.
static void backward(const Shape& shape, const float* grad, const float* const* rows, float* s,
                     float* const* into) {
  const int64_t n = shape.features, stride = shape.stride;
  // The destination is not in the caches: prefetched now, it is there when the sums are.
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < shape.dim; c += 16) __builtin_prefetch(into[i] + c);
  if (shape.pairs == Pairs::any) {
    for (int64_t e = 0; e < n * stride; ++e) s[e] = 0.0f;
    for (int64_t p = 0; p < shape.count; ++p) {
      s[shape.place[p]] += grad[p];
      s[shape.mirror[p]] += grad[p];
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t begin = shape.pairs == Pairs::upper ? i + 1 : 0;
      const int64_t end = shape.pairs == Pairs::upper ? n : i;
      s[i * stride + i] = 0.0f;
      for (int64_t j = begin; j < end; ++j) s[i * stride + j] = s[j * stride + i] = *grad++;
      if (shape.pairs == Pairs::lower_self) s[i * stride + i] = 2 * *grad++;
    }
  }
  int64_t i = 0;
  for (; i + kHigh <= n; i += kHigh) gradient_rows<kHigh>(shape, rows, s + i * stride, into + i);
  for (; i + 3 <= n; i += 3) gradient_rows<3>(shape, rows, s + i * stride, into + i);
  for (; i < n; ++i) gradient_rows<1>(shape, rows, s + i * stride, into + i);
}

}  // namespace recast::dot::RECAST_ISA
