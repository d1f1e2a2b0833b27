// A gated recurrent unit over the steps of four sequences: forward and backward. Included once per
// instruction set: see each_isa.h.

namespace recast::gru::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

// What is left of a row may be less than a register.
static inline Vector load(const float* p, int64_t left) {
  if (left >= kLanes) return *reinterpret_cast<const Vector*>(p);
  float part[kLanes] = {};
  for (int64_t k = 0; k < left; ++k) part[k] = p[k];
  return *reinterpret_cast<const Vector*>(part);
}

static inline void store(float* p, int64_t left, const Vector& v) {
  if (left >= kLanes) {
    *reinterpret_cast<Vector*>(p) = v;
    return;
  }
  float part[kLanes];
  *reinterpret_cast<Vector*>(part) = v;
  for (int64_t k = 0; k < left; ++k) p[k] = part[k];
}

// N registers, processed side by side: one alone would be a single chain of dependent operations.
// Aligned, as the references of a loop over them have lost what Vector says about alignment.
template <int N>
struct alignas(sizeof(Vector)) Some {
  Vector at[N];
};

// e^x to 2 units in the last place, with x clamped to [-87, 87]; NaN for NaN.
template <int N>
static inline void exponential(Some<N>& x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Vector low = Vector{} - 87.0f, high = Vector{} + 87.0f;
  Some<N> shifted, y;
  for (Vector& v : x.at) v = v < low ? low : v;
  for (Vector& v : x.at) v = v > high ? high : v;
  for (int i = 0; i < N; ++i) shifted.at[i] = x.at[i] * 1.44269504088896341f + kMagic;
  for (int i = 0; i < N; ++i) {
    const Vector n = shifted.at[i] - kMagic;
    x.at[i] = (x.at[i] - n * 0.693359375f) - n * -2.12194440e-4f;
    y.at[i] = Vector{} + 1.9875691500e-4f;
  }
  for (int i = 0; i < N; ++i) y.at[i] = y.at[i] * x.at[i] + 1.3981999507e-3f;
  for (int i = 0; i < N; ++i) y.at[i] = y.at[i] * x.at[i] + 8.3334519073e-3f;
  for (int i = 0; i < N; ++i) y.at[i] = y.at[i] * x.at[i] + 4.1665795894e-2f;
  for (int i = 0; i < N; ++i) y.at[i] = y.at[i] * x.at[i] + 1.6666665459e-1f;
  for (int i = 0; i < N; ++i) y.at[i] = y.at[i] * x.at[i] + 5.0000001201e-1f;
  for (int i = 0; i < N; ++i) y.at[i] = y.at[i] * x.at[i] * x.at[i] + x.at[i] + 1.0f;
  for (int i = 0; i < N; ++i) {
    const Bits whole = *reinterpret_cast<const Bits*>(&shifted.at[i]) - 0x4B400000;
    const Bits power = (whole + 127) << 23;
    x.at[i] = y.at[i] * *reinterpret_cast<const Vector*>(&power);
  }
}

template <int N>
static inline void sigmoid(Some<N>& x) {
  for (Vector& v : x.at) v = -v;
  exponential(x);
  for (Vector& v : x.at) v = 1.0f / (1.0f + v);
}

// Near zero an odd polynomial, as 1 - 2 / (e^2x + 1) has no digits left there (Cephes, tanhf).
template <int N>
static inline void tangent(Some<N>& x) {
  const Vector zero = Vector{}, bound = zero + 0.625f;
  Some<N> far, near, square;
  for (int i = 0; i < N; ++i) far.at[i] = x.at[i] < zero ? -2.0f * x.at[i] : 2.0f * x.at[i];
  exponential(far);
  for (Vector& v : near.at) v = zero - 5.70498872745e-3f;
  for (int i = 0; i < N; ++i) square.at[i] = x.at[i] * x.at[i];
  for (int i = 0; i < N; ++i) near.at[i] = near.at[i] * square.at[i] + 2.06390887954e-2f;
  for (int i = 0; i < N; ++i) near.at[i] = near.at[i] * square.at[i] - 5.37397155531e-2f;
  for (int i = 0; i < N; ++i) near.at[i] = near.at[i] * square.at[i] + 1.33314422036e-1f;
  for (int i = 0; i < N; ++i) near.at[i] = near.at[i] * square.at[i] - 3.33332819422e-1f;
  for (int i = 0; i < N; ++i) {
    const Vector v = x.at[i], close = near.at[i] * square.at[i] * v + v;
    const Vector size = v < zero ? -v : v, out = 1.0f - 2.0f / (far.at[i] + 1.0f);
    x.at[i] = size < bound ? close : (v < zero ? -out : out);
  }
}

// to[i][j ..] = from[j ..] + Σ_k a[i][k] b[k * width + j ..], for `kWide` registers from j on.
template <int kRows, int kWide>
static inline void tile(const float* const* a, int64_t inner, const float* b, int64_t width,
                        const float* from, float* const* to, int64_t j) {
  Vector sum[kRows][kWide];
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kWide; ++v)
      sum[i][v] = from == nullptr ? load(to[i] + j + v * kLanes, kLanes)
                                  : load(from + j + v * kLanes, kLanes);
  for (int64_t k = 0; k < inner; ++k) {
    Vector right[kWide];
    for (int v = 0; v < kWide; ++v) right[v] = load(b + k * width + j + v * kLanes, kLanes);
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kWide; ++v) sum[i][v] += a[i][k] * right[v];
  }
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kWide; ++v) store(to[i] + j + v * kLanes, kLanes, sum[i][v]);
}

// All columns; `width` is in whole registers. Without `from` the product is added to `to`.
template <int kRows>
static inline void multiply(const float* const* a, int64_t inner, const float* b, int64_t width,
                            const float* from, float* const* to) {
  int64_t j = 0;
  for (; j + 3 * kLanes <= width; j += 3 * kLanes) tile<kRows, 3>(a, inner, b, width, from, to, j);
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) tile<kRows, 2>(a, inner, b, width, from, to, j);
  for (; j < width; j += kLanes) tile<kRows, 1>(a, inner, b, width, from, to, j);
}

static inline void multiply(int64_t rows, const float* const* a, int64_t inner, const float* b,
                            int64_t width, const float* from, float* const* to) {
  if (rows == 4) return multiply<4>(a, inner, b, width, from, to);
  if (rows == 3) return multiply<3>(a, inner, b, width, from, to);
  if (rows == 2) return multiply<2>(a, inner, b, width, from, to);
  multiply<1>(a, inner, b, width, from, to);
}

// One step of one sequence. `gates` holds what x adds to r, z and n, and is overwritten by r, z and
// n; `inner` holds what h adds to them, in three rows of `width`; the third is saved in `kept`.
struct Row {
  const float *inner, *h;
  float *gates, *kept, *next;
  float score;
};

// next = h + w (n - h), of N rows side by side.
template <int N>
static inline void gate(const Call& call, const Row* rows) {
  const int64_t size = call.size, width = call.width;
  for (int64_t j = 0; j < size; j += kLanes) {
    const int64_t left = size - j;
    Some<N> r, z, n;
    for (int i = 0; i < N; ++i) {
      const float* const x = rows[i].gates + j;
      r.at[i] = load(x, left) + load(rows[i].inner + j, kLanes);
      z.at[i] = load(x + size, left) + load(rows[i].inner + width + j, kLanes);
    }
    sigmoid(r);
    sigmoid(z);
    for (int i = 0; i < N; ++i) {
      const Vector q = load(rows[i].inner + 2 * width + j, kLanes);
      if (rows[i].kept != nullptr) store(rows[i].kept + j, left, q);
      n.at[i] = load(rows[i].gates + 2 * size + j, left) + r.at[i] * q;
    }
    tangent(n);
    for (int i = 0; i < N; ++i) {
      const Vector before = load(rows[i].h + j, left);
      const Vector share = call.keeps ? 1.0f - z.at[i] : z.at[i];
      store(rows[i].gates + j, left, r.at[i]);
      store(rows[i].gates + size + j, left, z.at[i]);
      store(rows[i].gates + 2 * size + j, left, n.at[i]);
      store(rows[i].next + j, left, before + rows[i].score * share * (n.at[i] - before));
    }
  }
}

// All steps of up to kSequences sequences, from `first` on.
static void forward(const Call& call, int64_t first, float* scratch) {
  const int64_t size = call.size;
  const float* before[kSequences] = {};
  float* inner[kSequences] = {};
  const int64_t all = call.active(0, first);
  for (int64_t i = 0; i < all; ++i) {
    before[i] = call.start == nullptr ? call.zeros : call.start + call.who[first + i] * size;
    inner[i] = scratch + i * 3 * call.width;
  }
  for (int64_t t = 0; t < call.steps; ++t) {
    const int64_t rows = call.active(t, first);
    if (rows == 0) break;
    multiply(rows, before, size, call.weight, 3 * call.width, call.bias, inner);
    Row each[kSequences] = {};
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = call.row(t, first + i), home = call.home(t, first + i);
      float* const next = call.out + home * size;
      float* const kept = call.kept == nullptr ? nullptr : call.kept + row * size;
      each[i] = {inner[i], before[i], call.gates + row * 3 * size, kept, next, call.score(home)};
      before[i] = next;
    }
    if (rows > 1) gate<2>(call, each);
    if (rows > 3) gate<2>(call, each + 2);
    if (rows % 2 == 1) gate<1>(call, each + rows - 1);
  }
  for (int64_t i = 0; i < all; ++i) {
    float* const last = call.last + call.who[first + i] * size;
    for (int64_t c = 0; c < size; ++c) last[c] = before[i][c];
    for (int64_t t = call.pads ? call.lengths[first + i] : call.steps; t < call.steps; ++t) {
      float* const out = call.out + call.home(t, first + i) * size;
      for (int64_t c = 0; c < size; ++c) out[c] = call.padding;
    }
  }
}

// The gradients of one step. `carry` holds that of its result, and is overwritten by the part of
// h's that flows through h + w (n - h) alone; `inner` gets those of what h adds to r, z and n.
// Returns that of the score.
static inline float gate_back(const Call& call, int64_t row, float score, const float* grad,
                              const float* h, float* carry, float* inner) {
  const int64_t size = call.size, width = call.width;
  const float *const gates = call.gates + row * 3 * size, *const kept = call.kept + row * size;
  float *const of_x = call.of_gates + row * 3 * size, *const of_h = call.of_inner + row * 3 * size,
               *const copy = call.before + row * size;
  Vector sum = Vector{};
  for (int64_t j = 0; j < size; j += kLanes) {
    const int64_t left = size - j;
    Vector g = load(carry + j, kLanes);
    if (grad != nullptr) g += load(grad + j, left);
    const Vector r = load(gates + j, left), z = load(gates + size + j, left),
                 n = load(gates + 2 * size + j, left), before = load(h + j, left);
    const Vector share = call.keeps ? 1.0f - z : z, change = g * (n - before);
    const Vector of_n = g * (score * share) * (1.0f - n * n), of_q = of_n * r;
    const Vector of_r = of_n * load(kept + j, left) * r * (1.0f - r);
    const Vector slope = score * change * z * (1.0f - z);
    const Vector of_z = call.keeps ? -slope : slope;
    sum += change * share;
    store(of_x + j, left, of_r);
    store(of_x + size + j, left, of_z);
    store(of_x + 2 * size + j, left, of_n);
    store(of_h + j, left, of_r);
    store(of_h + size + j, left, of_z);
    store(of_h + 2 * size + j, left, of_q);
    store(copy + j, left, before);
    store(inner + j, kLanes, of_r);
    store(inner + width + j, kLanes, of_z);
    store(inner + 2 * width + j, kLanes, of_q);
    store(carry + j, kLanes, g * (1.0f - score * share));
  }
  float parts[kLanes], whole = 0.0f;
  store(parts, kLanes, sum);
  for (int k = 0; k < kLanes; ++k) whole += parts[k];
  return whole;
}

// The padding of `inner` is zero, as that of r, z, n, h and g is, and contributes nothing.
static void backward(const Call& call, int64_t first, float* scratch) {
  const int64_t size = call.size;
  const float* before[kSequences];
  float *inner[kSequences], *carry[kSequences];
  const int64_t all = call.active(0, first);
  for (int64_t i = 0; i < kSequences; ++i) {
    inner[i] = scratch + i * 3 * call.width;
    carry[i] = scratch + (kSequences * 3 + i) * call.width;
    for (int64_t c = 0; c < call.width; ++c) carry[i][c] = 0.0f;
    if (i >= all || call.of_last == nullptr) continue;
    const float* const grad = call.of_last + call.who[first + i] * size;
    for (int64_t c = 0; c < size; ++c) carry[i][c] = grad[c];
  }
  for (int64_t t = call.steps - 1; t >= 0; --t) {
    const int64_t rows = call.active(t, first);
    if (rows == 0) continue;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = call.row(t, first + i), home = call.home(t, first + i);
      if (t > 0)
        before[i] = call.out + call.home(t - 1, first + i) * size;
      else
        before[i] = call.start == nullptr ? call.zeros : call.start + call.who[first + i] * size;
      const float* const grad = call.of_out == nullptr ? nullptr : call.of_out + home * size;
      const float of_score =
          gate_back(call, row, call.score(home), grad, before[i], carry[i], inner[i]);
      if (call.of_scores != nullptr) call.of_scores[home] = of_score;
    }
    const float* const* from = inner;
    multiply(rows, from, 3 * call.width, call.weight, call.width, nullptr, carry);
  }
  if (call.of_start == nullptr) return;
  for (int64_t i = 0; i < all; ++i) {
    float* const of_start = call.of_start + call.who[first + i] * size;
    for (int64_t c = 0; c < size; ++c) of_start[c] = carry[i][c];
  }
}

}  // namespace recast::gru::RECAST_ISA
