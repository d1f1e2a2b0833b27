// A linear layer on few rows. Included once per instruction set: see each_isa.h.
//
// With so few rows, memory traffic is the weights: each is read once, for all rows, and a register
// holds neighbouring columns of a row of weights.

namespace recast::small_mlp::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }

static inline float sum(const Vector& v) {
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// out[r][o] = Σ_i x[r][i] w[o][i] + bias[o], for N outputs and R rows.
template <int R, int N>
static inline void outputs(const float* x, const float* w, const float* bias, int64_t in,
                           int64_t width, float* out) {
  Vector sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = Vector{};
  int64_t i = 0;
  for (; i + kLanes <= in; i += kLanes)
    for (int n = 0; n < N; ++n) {
      const Vector row = at(w + n * in + i);
      for (int r = 0; r < R; ++r) sums[r][n] += row * at(x + r * in + i);
    }
#if defined(RECAST_AVX512)
  if (i < in) {
    const auto mask = static_cast<__mmask16>((1u << (in - i)) - 1u);
    for (int n = 0; n < N; ++n) {
      const auto row = reinterpret_cast<Vector>(_mm512_maskz_loadu_ps(mask, w + n * in + i));
      for (int r = 0; r < R; ++r)
        sums[r][n] += row * reinterpret_cast<Vector>(_mm512_maskz_loadu_ps(mask, x + r * in + i));
    }
    i = in;
  }
#endif
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float total = sum(sums[r][n]);
      for (int64_t k = i; k < in; ++k) total += x[r * in + k] * w[n * in + k];
      out[r * width + n] = total + (bias == nullptr ? 0.0f : bias[n]);
    }
}

template <int R>
static inline void rows(const float* x, const float* w, const float* bias, int64_t in,
                        int64_t width, int64_t first, int64_t last, float* out) {
  int64_t o = first;
  for (; o + kOutputs <= last; o += kOutputs)
    outputs<R, kOutputs>(x, w + o * in, bias == nullptr ? nullptr : bias + o, in, width, out + o);
  for (; o < last; ++o)
    outputs<R, 1>(x, w + o * in, bias == nullptr ? nullptr : bias + o, in, width, out + o);
}

// Columns [first, last) of out (count, width) = x (count, in) wᵀ + bias; `count`: 1 to kMostRows.
static void linear(const float* x, int64_t count, const float* w, const float* bias, int64_t in,
                   int64_t width, int64_t first, int64_t last, float* out) {
  if (count == 1) return rows<1>(x, w, bias, in, width, first, last, out);
  if (count == 2) return rows<2>(x, w, bias, in, width, first, last, out);
  if (count == 3) return rows<3>(x, w, bias, in, width, first, last, out);
  rows<4>(x, w, bias, in, width, first, last, out);
}

}  // namespace recast::small_mlp::RECAST_ISA
