// The inner loops of row ages. Included once per instruction set: see each_isa.h, and
// row_update_kernel.h for what must not be included here.

namespace recast::rows::RECAST_ISA {

#include "row_fades.h"
#include "row_lanes.h"

// Rows to look ahead.
constexpr int kAheadOfSweep = 6;

// Whether two vectors differ anywhere; NaN differs from itself.
static inline bool differ(float one, float other) { return one != other; }
static inline bool differ(Vec4 one, Vec4 other) {
#if RECAST_LANES >= 8
  return _mm_movemask_ps(_mm_cmp_ps(one, other, _CMP_NEQ_UQ)) != 0;
#else
  return one[0] != other[0] || one[1] != other[1] || one[2] != other[2] || one[3] != other[3];
#endif
}
#if RECAST_LANES >= 8
static inline bool differ(Vec8 one, Vec8 other) {
  return _mm256_movemask_ps(_mm256_cmp_ps(one, other, _CMP_NEQ_UQ)) != 0;
}
#endif
#if RECAST_LANES >= 16
static inline bool differ(Vec16 one, Vec16 other) {
  return _mm512_cmp_ps_mask(one, other, _CMP_NEQ_UQ) != 0;
}
#endif

// A row that moves by its moments alone.
struct Swept {
  float* weight;
  const float* first;
  const float* second;  // what the step is divided by the root of, or null
  float fade, second_fade, lr, eps;

  // Moves the columns from c on; returns whether they may move again if nothing wakes them.
  template <class V>
  inline bool move(int64_t c) const {
    const V old = load<V>(weight + c);
    V by = load<V>(first + c) * fade;
    if (second != nullptr) by = by / (root(load<V>(second + c) * second_fade) + eps);
    by = by * -lr;
    store<V>(weight + c, old + by);
    // Moves only get smaller; the factor is for a weight that decays.
    return differ(old + by * 4.0f, old);
  }
};

// The weight decay of AdamW.
static inline void shrink(float* weight, int64_t dim, float decay) {
  each_column(dim, [&](auto like, int64_t c) {
    using V = decltype(like);
    const V old = load<V>(weight + c);
    store<V>(weight + c, old - old * decay);
  });
}

// What a step does to the rows of blocks [first, last) that have no gradient in it.
static void sweep(const Target& to, int64_t rows, int64_t dim, int64_t first, int64_t last) {
  const Ages& ages = to.ages;
  auto* const weight = reinterpret_cast<float*>(to.weight);
  // The moment that moves rows, and the one by whose root it is divided (adam).
  const int moving = to.action == Action::rmsprop ? 1 : 0;
  const Target::State& mover = moving == 1 ? to.second : to.state;
  auto* const one = reinterpret_cast<const float*>(mover.data);
  auto* const two = reinterpret_cast<const float*>(to.second.data);
  const bool rooted = to.action == Action::adam;
  const float lr = to.ahead == 0.0f ? to.lr : to.lr * to.ahead;
  int32_t awake[kRowsOfBlock];
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * kRowsOfBlock;
    const int64_t end = begin + kRowsOfBlock < rows ? begin + kRowsOfBlock : rows;
    if (ages.awake[block] == 0 && !ages.wake && to.decay == 0.0f) continue;
    int count = 0;
    bool any = false;  // whether a row of the block may move at the next step
    for (int64_t row = begin; row < end; ++row) {
      const int32_t step = ages.last[row];
      any |= step == ages.now;
      if (step == 0 || (step < 0 && !ages.wake) || step == ages.now) continue;
      if (age(ages, step) < ages.known) awake[count++] = static_cast<int32_t>(row);
    }
    if (to.decay != 0.0f)
      for (int64_t row = begin; row < end; ++row)
        if (ages.last[row] != ages.now) shrink(weight + row * to.stride, dim, to.decay);
    for (int i = 0; i < count; ++i) {
      const int64_t row = awake[i];
      if (i + kAheadOfSweep < count) {
        const int64_t next = awake[i + kAheadOfSweep];
        for (int64_t c = 0; c < dim; c += 16) {
          __builtin_prefetch(weight + next * to.stride + c, 1, 3);
          __builtin_prefetch(one + next * mover.stride + c, 0, 3);
          if (rooted) __builtin_prefetch(two + next * to.second.stride + c, 0, 3);
        }
      }
      const int64_t k = age(ages, ages.last[row]);
      const Swept swept{weight + row * to.stride,
                        one + row * mover.stride,
                        rooted ? two + row * to.second.stride : nullptr,
                        fade(ages, moving, k),
                        rooted ? fade(ages, 1, k) : 0.0f,
                        lr,
                        to.eps};
      bool moves = false;
      each_column(dim, [&](auto like, int64_t c) { moves |= swept.move<decltype(like)>(c); });
      const int32_t step = ages.last[row] < 0 ? -ages.last[row] : ages.last[row];
      ages.last[row] = moves ? step : -step;
      any |= moves;
    }
    ages.awake[block] = any;
  }
}

static void settle(const Moments& moments, const Ages& ages, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t k = ages.last[row] == 0 ? 0 : age(ages, ages.last[row]);
    if (k == 0) continue;
    for (int i = 0; i < moments.count; ++i) {
      float* const m = moments.data[i] + row * moments.stride[i];
      const float by = fade(ages, i, k);
      const bool lerps = i == 0 && ages.lerps;
      each_column(moments.dim, [&](auto like, int64_t c) {
        using V = decltype(like);
        const V old = load<V>(m + c);
        store<V>(m + c, lerps ? old * by + (old - old) : old * by);
      });
    }
  }
}

// Rows of which all moments are 0 never had a gradient, or will move as if they never had.
static void begin(const Moments& moments, const Ages& ages, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    bool any = false;
    for (int i = 0; i < moments.count; ++i) {
      const float* const m = moments.data[i] + row * moments.stride[i];
      each_column(moments.dim, [&](auto like, int64_t c) {
        any |= differ(load<decltype(like)>(m + c), decltype(like){});
      });
    }
    ages.last[row] = any ? ages.now : 0;
    if (any) ages.awake[row / kRowsOfBlock] = 1;
  }
}

}  // namespace recast::rows::RECAST_ISA
