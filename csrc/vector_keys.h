// Which keys have weight: those that masks leave out for all queries of a block, at either end,
// need not be computed. Included inside the namespace of a kernel, after parts.h, once per
// instruction set: see each_isa.h.

// Whether no lane is above `limit`, or NaN.
static inline bool none_above(const Vector& x, float limit) {
#if RECAST_LANES == 16
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(limit), _CMP_NLE_UQ) == 0;
#elif RECAST_LANES == 8
  const __m256 above =
      _mm256_cmp_ps(reinterpret_cast<__m256>(x), _mm256_set1_ps(limit), _CMP_NLE_UQ);
  return _mm256_movemask_ps(above) == 0;
#else
  for (int k = 0; k < kLanes; ++k)
    if (!(x[k] <= limit)) return false;
  return true;
#endif
}

static inline bool is_zero(const Vector& x) {
  const Vector zero = Vector{};
  return none_above(x, 0.0f) && none_above(zero - x, 0.0f);
}

// Sums of numbers below it have finite products with masks, dropout and weights.
constexpr float kFar = 1e30f;

// The largest magnitude of `count` rows of `dim` numbers; inf or NaN if one is.
static inline float magnitude_of(const Rows& rows, int64_t count, int64_t dim) {
  Bits most = Bits{};  // as integers, magnitudes have the order of the numbers, and NaN is last
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < dim; j += kLanes) {
      const Vector x = load(rows.data + i * rows.step + j, dim - j);
      const Bits bits = *reinterpret_cast<const Bits*>(&x) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
  int32_t highest = 0;
  for (int k = 0; k < kLanes; ++k) highest = most[k] > highest ? most[k] : highest;
  float found;
  __builtin_memcpy(&found, &highest, sizeof(found));
  return found;
}

// The keys from `first`, at the start of a register, to `end`.
struct Live {
  int64_t first, end;
};

// Those outside of which dead(i, j) holds for the registers at j of all rows i; all if it holds
// for all. Each register is asked for until one is not dead, so what is not left out costs nothing.
template <class Dead>
static inline Live live_keys(int64_t rows, int64_t keys, const Dead& dead) {
  const int64_t whole = (keys + kLanes - 1) / kLanes * kLanes;
  int64_t first = whole, end = 0;
  for (int64_t i = rows - 1; i >= 0; --i) {
    int64_t j = whole;
    while (j > end && dead(i, j - kLanes)) j -= kLanes;
    end = j > end ? j : end;
    for (j = 0; j < first && dead(i, j);) j += kLanes;
    first = j < first ? j : first;
  }
  if (first >= end) return {0, keys};
  return {first, end < keys ? end : keys};
}

static inline void clear(const Rows& rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < dim; j += kLanes)
      store(rows.data + i * rows.step + j, dim - j, Vector{});
}
