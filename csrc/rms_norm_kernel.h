// RMS norm of rows, forward and backward. Included once per instruction set: see each_isa.h.

namespace recast::rms_norm::RECAST_ISA {

#include "parts.h"

// Σ a b, or Σ a b c where there is a c. Four sums, so that additions do not wait for each other.
template <bool kThree>
static inline float product(const float* a, const float* b, const float* c, int64_t count) {
  constexpr int kSums = 4;
  Vector sums[kSums] = {};
  int64_t j = 0;
  for (; j + kSums * kLanes <= count; j += kSums * kLanes)
    for (int s = 0; s < kSums; ++s) {
      const int64_t at_j = j + s * kLanes;
      Vector term = at(a + at_j) * at(b + at_j);
      if constexpr (kThree) term *= at(c + at_j);
      sums[s] += term;
    }
  for (; j < count; j += kLanes) {
    Vector term = load(a + j, count - j) * load(b + j, count - j);
    if constexpr (kThree) term *= load(c + j, count - j);
    sums[0] += term;
  }
  return total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// out = x r w with r = 1 / sqrt(Σ x² / count + eps), which is returned. `weight` may be null.
static float forward(const float* x, const float* weight, int64_t count, float eps, float* out) {
  const float mean = product<false>(x, x, nullptr, count) / static_cast<float>(count);
  const float inverse = 1.0f / __builtin_sqrtf(mean + eps);
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t left = count - j;
    Vector y = load(x + j, left) * inverse;
    if (weight != nullptr) y *= load(weight + j, left);
    store(out + j, left, y);
  }
  return inverse;
}

// of_x = r (g w - x r² Σ g w x / count), where there is an of_x; of_weight += g x r likewise.
static void backward(const float* g, const float* x, const float* weight, float inverse,
                     int64_t count, float* of_x, float* of_weight) {
  float slope = 0.0f;
  if (of_x != nullptr) {
    const float along = weight == nullptr ? product<false>(g, x, nullptr, count)
                                          : product<true>(g, x, weight, count);
    slope = along * inverse * inverse / static_cast<float>(count);
  }
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t left = count - j;
    const Vector up = load(g + j, left), in = load(x + j, left);
    if (of_x != nullptr) {
      const Vector scaled = weight == nullptr ? up : up * load(weight + j, left);
      store(of_x + j, left, (scaled - in * slope) * inverse);
    }
    if (of_weight != nullptr)
      store(of_weight + j, left, load(of_weight + j, left) + up * (in * inverse));
  }
}

}  // namespace recast::rms_norm::RECAST_ISA
