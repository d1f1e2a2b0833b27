// Factorisation machine of one sample, forward and backward. Included once per instruction set: see
// each_isa.h.
//
// A register holds neighbouring columns and the vectors stream by, each read once: no horizontal
// sum is needed.

namespace recast::fm::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));
constexpr int kWide = 2;  // registers of columns at once

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

// out[c ..] = factor * Σ_f rows[f] * (Σ_{g<f} rows[g]), for V registers of columns. Pairs are
// summed directly: (Σ)^2 - Σ()^2, a difference of two large numbers, would lose digits.
template <int V>
static inline void forward_block(const float* const* rows, int64_t count, int64_t c, float factor,
                                 float* out) {
  Vector before[V], pairs[V];
  for (int v = 0; v < V; ++v) before[v] = pairs[v] = Vector{};
  for (int64_t f = 0; f < count; ++f)
    for (int v = 0; v < V; ++v) {
      const Vector x = at(rows[f] + c + v * kLanes);
      pairs[v] += x * before[v];
      before[v] += x;
    }
  for (int v = 0; v < V; ++v) at(out + c + v * kLanes) = factor * pairs[v];
}

// out[c] = factor * Σ_{f<g} rows[f][c] * rows[g][c].
static void forward(const float* const* rows, int64_t count, int64_t dim, float factor,
                    float* out) {
  int64_t c = 0;
  for (; c + kWide * kLanes <= dim; c += kWide * kLanes)
    forward_block<kWide>(rows, count, c, factor, out);
  for (; c + kLanes <= dim; c += kLanes) forward_block<1>(rows, count, c, factor, out);
  for (; c < dim; ++c) {
    float before = 0.0f, pairs = 0.0f;
    for (int64_t f = 0; f < count; ++f) {
      pairs += rows[f][c] * before;
      before += rows[f][c];
    }
    out[c] = factor * pairs;
  }
}

// into[f][c] = factor * grad[c * step] * (Σ_g rows[g][c] - rows[f][c]).
static void backward(const float* const* rows, int64_t count, int64_t dim, float factor,
                     const float* grad, int64_t step, float* const* into) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    Vector sum = Vector{}, g = Vector{};
    for (int64_t f = 0; f < count; ++f) sum += at(rows[f] + c);
    if (step == 0)
      g += factor * grad[0];
    else
      g = factor * at(grad + c);
    for (int64_t f = 0; f < count; ++f) at(into[f] + c) = g * (sum - at(rows[f] + c));
  }
  for (; c < dim; ++c) {
    float sum = 0.0f;
    for (int64_t f = 0; f < count; ++f) sum += rows[f][c];
    const float g = factor * grad[c * step];
    for (int64_t f = 0; f < count; ++f) into[f][c] = g * (sum - rows[f][c]);
  }
}

}  // namespace recast::fm::RECAST_ISA
