// Cross networks, forward and backward. Included once per instruction set: see each_isa.h.
//
// Rows are read in place, and stay in L1 while all layers of a vector network read them.

namespace recast::cross::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

static inline float across(const Vector& v) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// into[k] = x · w[k] for K vectors at once.
template <int K>
static inline void dot_block(const float* x, const float* const* w, int64_t dim, float* into) {
  Vector sum[K], other[K];
  for (int k = 0; k < K; ++k) sum[k] = other[k] = Vector{};
  int64_t c = 0;
  for (; c + 2 * kLanes <= dim; c += 2 * kLanes)
    for (int k = 0; k < K; ++k) {
      sum[k] += at(x + c) * at(w[k] + c);
      other[k] += at(x + c + kLanes) * at(w[k] + c + kLanes);
    }
  for (int k = 0; k < K; ++k) {
    float rest = 0.0f;
    for (int64_t i = c; i < dim; ++i) rest += x[i] * w[k][i];
    into[k] = across(sum[k] + other[k]) + rest;
  }
}

static void dots(const float* x, const float* const* w, int64_t count, int64_t dim, float* into) {
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) dot_block<4>(x, w + k, dim, into + k);
  for (; k + 2 <= count; k += 2) dot_block<2>(x, w + k, dim, into + k);
  for (; k < count; ++k) dot_block<1>(x, w + k, dim, into + k);
}

// out = alpha * x0 + x + beta; `beta` may be null.
static void combine(const float* x0, const float* x, const float* beta, float alpha, int64_t dim,
                    float* out) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    Vector v = alpha * at(x0 + c) + at(x + c);
    if (beta != nullptr) v += at(beta + c);
    at(out + c) = v;
  }
  for (; c < dim; ++c) out[c] = alpha * x0[c] + x[c] + (beta == nullptr ? 0.0f : beta[c]);
}

// out = factor * grad + Σ_k a[k] w[k], and of_weight[k] += a[k] * x for each k.
static void spread(const float* grad, float factor, const float* x, const float* const* w,
                   const float* a, int64_t count, int64_t dim, float* out, float* of_weight) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    Vector sum = factor * at(grad + c);
    const Vector value = at(x + c);
    for (int64_t k = 0; k < count; ++k) {
      sum += a[k] * at(w[k] + c);
      at(of_weight + k * dim + c) += a[k] * value;
    }
    at(out + c) = sum;
  }
  for (; c < dim; ++c) {
    float sum = factor * grad[c];
    for (int64_t k = 0; k < count; ++k) {
      sum += a[k] * w[k][c];
      of_weight[k * dim + c] += a[k] * x[c];
    }
    out[c] = sum;
  }
}

// into += x.
static void add(const float* x, int64_t count, float* into) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) at(into + c) += at(x + c);
  for (; c < count; ++c) into[c] += x[c];
}

// out = x0 * (m + inner) * gate + outer + x, one row; inner, gate and outer may be null.
static void tail(const TailRow& r, int64_t dim, float* out) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    Vector v = at(r.m + c);
    if (r.inner != nullptr) v += at(r.inner + c);
    v *= at(r.x0 + c);
    if (r.gate != nullptr) v *= at(r.gate + c);
    if (r.outer != nullptr) v += at(r.outer + c);
    at(out + c) = v + at(r.x + c);
  }
  for (; c < dim; ++c) {
    float v = r.m[c];
    if (r.inner != nullptr) v += r.inner[c];
    v *= r.x0[c];
    if (r.gate != nullptr) v *= r.gate[c];
    if (r.outer != nullptr) v += r.outer[c];
    out[c] = v + r.x[c];
  }
}

// Access by register or by element. A template on the type itself would lose its alignment.
struct Wide {
  static Vector load(const float* p) { return at(p); }
  static Vector& ref(float* p) { return at(p); }
};
struct Single {
  static float load(const float* p) { return *p; }
  static float& ref(float* p) { return *p; }
};

// Some of a row's gradients, from column c on; see TailGrad.
template <class By>
static inline void tail_grad_at(const TailRow& r, const TailGrad& to, int64_t c) {
  const auto grad = By::load(r.grad + c), x0 = By::load(r.x0 + c);
  auto product = By::load(r.m + c);
  if (r.inner != nullptr) product += By::load(r.inner + c);
  auto of_m = grad * x0, of_x0 = grad * product;
  if (r.gate != nullptr) {
    const auto gate = By::load(r.gate + c);
    of_m *= gate;
    of_x0 *= gate;
    const auto of_gate = of_m * product * (1.0f - gate);
    By::ref(to.gate + c) = of_gate;
    if (to.gate_sum != nullptr) By::ref(to.gate_sum + c) += of_gate;
  }
  if (to.residual) of_x0 += grad;
  if (!to.fresh) of_x0 += By::load(to.x0 + c);
  By::ref(to.m + c) = of_m;
  By::ref(to.x0 + c) = of_x0;
  if (to.inner_sum != nullptr) By::ref(to.inner_sum + c) += of_m;
  if (to.outer_sum != nullptr) By::ref(to.outer_sum + c) += grad;
}

static void tail_grad(const TailRow& r, const TailGrad& to, int64_t dim) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) tail_grad_at<Wide>(r, to, c);
  for (; c < dim; ++c) tail_grad_at<Single>(r, to, c);
}

}  // namespace recast::cross::RECAST_ISA
