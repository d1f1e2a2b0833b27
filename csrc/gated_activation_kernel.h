// act(gate) * value of rows, forward and backward. Included once per instruction set: see
// each_isa.h.

namespace recast::gated_activation::RECAST_ISA {

#include "parts.h"
#include "vector_exponential.h"

// What an activation is multiplied by its argument to give, and its slope.
struct Gate {
  Vector part, slope;
};

// 1 / (1 + e^-x); its slope is p (1 + x (1 - p)).
static inline Gate logistic(const Vector& x) {
  const Vector e = exponential(-magnitude(x));
  const Vector high = inverse(e + 1.0f), low = e * high;  // of |x| and of -|x|
  const Vector part = by_sign(x, low, high), rest = by_sign(x, high, low);
  return {part, part * (x * rest + 1.0f)};  // rest: 1 - part, without cancellation
}

// (1 + erf(x / sqrt(2))) / 2, by Abramowitz and Stegun 7.1.26, to 1e-7; slope: part + x density.
static inline Gate normal(const Vector& x) {
  const Vector t = 1.0f / (magnitude(x) * 0.23164190f + 1.0f);  // 0.3275911 / sqrt(2)
  Vector y = Vector{} + 0.5307027145f;                          // half of the coefficients
  y = y * t - 0.7265760135f;
  y = y * t + 0.7107068705f;
  y = y * t - 0.142248368f;
  y = y * t + 0.127414796f;
  const Vector e = exponential(x * -0.5f * x);
  const Vector tail = y * t * e;
  const Vector part = by_sign(x, tail, 1.0f - tail);
  return {part, x * (e * 0.39894228040143268f) + part};
}

// (1 + tanh(u)) / 2 = logistic(2 u) with u = sqrt(2 / pi) (x + 0.044715 x³).
static inline Gate bent(const Vector& x) {
  const Vector square = x * x;
  const Vector twice = x * (square * 0.07135481627f + 1.5957691216057308f);
  const Vector e = exponential(-magnitude(twice));
  const Vector high = inverse(e + 1.0f), low = e * high;
  const Vector part = by_sign(twice, low, high);
  const Vector inner = square * 0.2140644488f + 1.5957691216057308f;
  return {part, x * (high * low) * inner + part};
}

template <Kind kKind>
static inline Gate gate_of(const Vector& x) {
  if constexpr (kKind == Kind::silu) return logistic(x);
  if constexpr (kKind == Kind::gelu) return normal(x);
  return bent(x);
}

template <Kind kKind>
static void forward_of(const float* x, const float* value, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t left = count - j;
    const Vector in = load(x + j, left);
    store(out + j, left, in * gate_of<kKind>(in).part * load(value + j, left));
  }
}

template <Kind kKind>
static void backward_of(const float* g, const float* x, const float* value, int64_t count,
                        float* of_x, float* of_value) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t left = count - j;
    const Vector in = load(x + j, left), up = load(g + j, left);
    const Gate gate = gate_of<kKind>(in);
    if (of_x != nullptr) store(of_x + j, left, up * load(value + j, left) * gate.slope);
    if (of_value != nullptr) store(of_value + j, left, up * (in * gate.part));
  }
}

static void forward(Kind kind, const float* x, const float* value, int64_t count, float* out) {
  if (kind == Kind::silu) return forward_of<Kind::silu>(x, value, count, out);
  if (kind == Kind::gelu) return forward_of<Kind::gelu>(x, value, count, out);
  forward_of<Kind::gelu_tanh>(x, value, count, out);
}

// Writes the gradients that are not null.
static void backward(Kind kind, const float* g, const float* x, const float* value, int64_t count,
                     float* of_x, float* of_value) {
  if (kind == Kind::silu) return backward_of<Kind::silu>(g, x, value, count, of_x, of_value);
  if (kind == Kind::gelu) return backward_of<Kind::gelu>(g, x, value, count, of_x, of_value);
  backward_of<Kind::gelu_tanh>(g, x, value, count, of_x, of_value);
}

}  // namespace recast::gated_activation::RECAST_ISA
