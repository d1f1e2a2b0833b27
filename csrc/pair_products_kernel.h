// Products of pairs of feature vectors of one sample, forward and backward. Included once per
// instruction set: see each_isa.h.

namespace recast::pairs::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

static inline float total(const Vector& v) {
  float sum = 0.0f;
  for (int k = 0; k < kLanes; ++k) sum += v[k];
  return sum;
}

// out[p][c] = weight[p] * left[li[p]][c] * right[lj[p]][c].
static void products(const List& list, const float* const* left, const float* const* right,
                     const float* weight, float* out) {
  const int64_t dim = list.dim;
  for (int64_t p = 0; p < list.count; ++p, out += dim) {
    const float *x = left[list.li[p]], *y = right[list.lj[p]];
    const float w = weight == nullptr ? 1.0f : weight[p];
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) at(out + c) = at(x + c) * at(y + c) * w;
    for (; c < dim; ++c) out[c] = x[c] * y[c] * w;
  }
}

// out[p] = weight[p] * Σ_c left[li[p]][c] * right[lj[p]][c].
static void inner(const List& list, const float* const* left, const float* const* right,
                  const float* weight, float* out) {
  const int64_t dim = list.dim;
  for (int64_t p = 0; p < list.count; ++p) {
    const float *x = left[list.li[p]], *y = right[list.lj[p]];
    Vector sum = Vector{};
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) sum += at(x + c) * at(y + c);
    float rest = total(sum);
    for (; c < dim; ++c) rest += x[c] * y[c];
    out[p] = weight == nullptr ? rest : rest * weight[p];
  }
}

// out[c] = Σ_p weight[p] * left[li[p]][c] * right[lj[p]][c].
static void pooled(const List& list, const float* const* left, const float* const* right,
                   const float* weight, float* out) {
  const int64_t dim = list.dim;
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    Vector sum = Vector{}, other = Vector{};  // two chains of additions, not one
    int64_t p = 0;
    for (; p + 2 <= list.count; p += 2) {
      const float w = weight == nullptr ? 1.0f : weight[p];
      const float v = weight == nullptr ? 1.0f : weight[p + 1];
      sum += at(left[list.li[p]] + c) * at(right[list.lj[p]] + c) * w;
      other += at(left[list.li[p + 1]] + c) * at(right[list.lj[p + 1]] + c) * v;
    }
    for (; p < list.count; ++p) {
      const float w = weight == nullptr ? 1.0f : weight[p];
      sum += at(left[list.li[p]] + c) * at(right[list.lj[p]] + c) * w;
    }
    at(out + c) = sum + other;
  }
  for (; c < dim; ++c) {
    float sum = 0.0f;
    for (int64_t p = 0; p < list.count; ++p)
      sum += left[list.li[p]][c] * right[list.lj[p]][c] * (weight == nullptr ? 1.0f : weight[p]);
    out[c] = sum;
  }
}

// The gradients of one pair: see backward().
template <bool kScalar>
static inline void one_pair(int64_t dim, const float* x, const float* y, const float* grad, float w,
                            float* dx, float* dy, float* dw) {
  Vector sum = Vector{};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    Vector g = Vector{};
    if (kScalar)
      g += grad[0];
    else
      g = at(grad + c);
    const Vector a = at(x + c), b = at(y + c), gw = g * w;
    if (dw != nullptr) sum += g * a * b;
    at(dx + c) += gw * b;
    at(dy + c) += gw * a;
  }
  float rest = dw == nullptr ? 0.0f : total(sum);
  for (; c < dim; ++c) {
    const float g = grad[kScalar ? 0 : c], a = x[c], b = y[c];
    rest += g * a * b;
    dx[c] += g * w * b;
    dy[c] += g * w * a;
  }
  if (dw != nullptr) *dw = rest;
}

// into_left[li[p]] += weight[p] * g * right[lj[p]], likewise into_right; into_weight[p] = Σ g * x *
// y. g = grad[p * pair_step + c], the same for all c where `scalar`. Adds to what is there.
static void backward(const List& list, const float* const* left, const float* const* right,
                     const float* weight, const float* grad, int64_t pair_step, bool scalar,
                     float* const* into_left, float* const* into_right, float* into_weight) {
  for (int64_t p = 0; p < list.count; ++p) {
    const int64_t i = list.li[p], j = list.lj[p];
    const float w = weight == nullptr ? 1.0f : weight[p];
    float* const dw = into_weight == nullptr ? nullptr : into_weight + p;
    const float* const g = grad + p * pair_step;
    if (scalar)
      one_pair<true>(list.dim, left[i], right[j], g, w, into_left[i], into_right[j], dw);
    else
      one_pair<false>(list.dim, left[i], right[j], g, w, into_left[i], into_right[j], dw);
  }
}

}  // namespace recast::pairs::RECAST_ISA
