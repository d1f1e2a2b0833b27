// Cross entropy of rows of logits, forward and backward. Included once per instruction set: see
// each_isa.h.

namespace recast::cross_entropy::RECAST_ISA {

#include "parts.h"
#include "vector_exponential.h"

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kBlock = 2048;  // numbers that stay in the first cache between their two passes

// Of each lane.
static inline Vector larger(const Vector& a, const Vector& b) { return a > b ? a : b; }

// The largest of `count` numbers, not NaN; minus infinity for none.
static inline float peak(const float* x, int64_t count) {
  float best = -kInfinity;
  int64_t j = 0;
  if (count >= 4 * kLanes) {
    Vector high[4] = {at(x), at(x + kLanes), at(x + 2 * kLanes), at(x + 3 * kLanes)};
    // By index: GCC takes what a range is over to be aligned.
    for (int s = 0; s < 4; ++s) high[s] = high[s] == high[s] ? high[s] : Vector{} - kInfinity;
    for (j = 4 * kLanes; j + 4 * kLanes <= count; j += 4 * kLanes)
      for (int s = 0; s < 4; ++s) high[s] = larger(at(x + j + s * kLanes), high[s]);
    best = largest(larger(larger(high[0], high[1]), larger(high[2], high[3])));
  }
  for (; j < count; ++j) best = x[j] > best ? x[j] : best;
  return best;
}

// Σ exp(x - top) of numbers that are at most top, or NaN.
static inline float exponentials(const float* x, int64_t count, float top) {
  Vector sums[2] = {};
  int64_t j = 0;
  for (; j + 2 * kLanes <= count; j += 2 * kLanes)
    for (int s = 0; s < 2; ++s) sums[s] += exponential(at(x + j + s * kLanes) - top);
  float sum = total(sums[0] + sums[1]);
  for (; j < count; j += kLanes) {
    const int64_t left = count - j < kLanes ? count - j : kLanes;
    float last[kLanes] = {};
    store(last, left, exponential(load(x + j, left) - top));
    sum += total(at(last));
  }
  return sum;
}

// Σ x
static inline double sum_of(const float* x, int64_t count) {
  double sum = 0.0;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = first + kBlock < count ? first + kBlock : count;
    Vector part = {};
    for (int64_t j = first; j < last; j += kLanes) part += load(x + j, last - j);
    sum += total(part);
  }
  return sum;
}

// top = max x, sum = Σ exp(x - top), in one pass over memory; NaN where torch's are.
static void normalise(const float* x, int64_t count, float* top, float* sum) {
  float highest = -kInfinity;
  double found = 0.0;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = first + kBlock < count ? kBlock : count - first;
    const float here = peak(x + first, size);
    if (here > highest) {
      if (found != 0.0) found *= __builtin_exp(static_cast<double>(highest) - here);
      highest = here;
    }
    if (highest == -kInfinity) {  // all are minus infinity or NaN, so far
      for (int64_t j = first; j < first + size; ++j)
        if (x[j] != x[j]) found = __builtin_nan("");
      continue;
    }
    found += exponentials(x + first, size, highest);
  }
  *top = highest;
  *sum = highest == -kInfinity ? __builtin_nanf("") : static_cast<float>(found);
}

// into = up (softmax(x) - even), and up less at the target by `hit`; `into` may be x.
static void gradient(const float* x, int64_t count, float top, float log_sum, int64_t target,
                     float hit, float even, float up, float* into) {
  const Vector own = exponential((Vector{} + (x[target] - top)) - log_sum);
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t left = count - j;
    const Vector share = exponential((load(x + j, left) - top) - log_sum);
    store(into + j, left, (share - even) * up);
  }
  into[target] = ((own[0] - hit) - even) * up;
}

}  // namespace recast::cross_entropy::RECAST_ISA
