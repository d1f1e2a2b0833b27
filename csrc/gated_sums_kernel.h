// Weighted sums of vectors of one sample, forward and backward. Included once per instruction set:
// see each_isa.h.

namespace recast::gated::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));
constexpr int kWide = 4;  // registers of columns at once

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

template <int V>
static inline void sum_block(const float* const* rows, const int32_t* chosen, const float* weights,
                             int64_t count, int64_t c, float* out) {
  Vector sum[V];
  for (int v = 0; v < V; ++v) sum[v] = Vector{};
  for (int64_t k = 0; k < count; ++k)
    for (int v = 0; v < V; ++v) sum[v] += weights[k] * at(rows[chosen[k]] + c + v * kLanes);
  for (int v = 0; v < V; ++v) at(out + c + v * kLanes) = sum[v];
}

// out = Σ_k weights[k] * rows[chosen[k]].
static void sum(const float* const* rows, const int32_t* chosen, const float* weights,
                int64_t count, int64_t dim, float* out) {
  int64_t c = 0;
  for (; c + kWide * kLanes <= dim; c += kWide * kLanes)
    sum_block<kWide>(rows, chosen, weights, count, c, out);
  for (; c + kLanes <= dim; c += kLanes) sum_block<1>(rows, chosen, weights, count, c, out);
  for (; c < dim; ++c) {
    float sum = 0.0f;
    for (int64_t k = 0; k < count; ++k) sum += weights[k] * rows[chosen[k]][c];
    out[c] = sum;
  }
}

// out = a · b.
static float dot(const float* a, const float* b, int64_t dim) {
  Vector sum = Vector{};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) sum += at(a + c) * at(b + c);
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  for (; c < dim; ++c) total += a[c] * b[c];
  return total;
}

}  // namespace recast::gated::RECAST_ISA
