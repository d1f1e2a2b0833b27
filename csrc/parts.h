// Partial registers, as at the end of a row, and the sum and the maximum of a register's lanes.
// Included inside the namespace of a kernel, once per instruction set: see each_isa.h. With masks:
// a register loaded from memory that was just written number by number waits for all of the stores.

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

#if RECAST_LANES == 8
// All ones in the first `left` lanes.
static inline __m256i first_lanes(int64_t left) {
  static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones + 8 - left));
}
#endif

// The first `left` numbers of p, or as many as there are lanes, and zeros.
static inline Vector load(const float* p, int64_t left) {
  if (left >= kLanes) return at(p);
#if RECAST_LANES == 16
  return reinterpret_cast<Vector>(
      _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), p));
#elif RECAST_LANES == 8
  return reinterpret_cast<Vector>(_mm256_maskload_ps(p, first_lanes(left)));
#else
  Vector v = Vector{};
  for (int64_t k = 0; k < left; ++k) v[k] = p[k];
  return v;
#endif
}

// The first `left` lanes, or all where there are no more, to p.
static inline void store(float* p, int64_t left, const Vector& v) {
  if (left >= kLanes) {
    at(p) = v;
    return;
  }
#if RECAST_LANES == 16
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << left) - 1), reinterpret_cast<__m512>(v));
#elif RECAST_LANES == 8
  _mm256_maskstore_ps(p, first_lanes(left), reinterpret_cast<__m256>(v));
#else
  for (int64_t k = 0; k < left; ++k) p[k] = v[k];
#endif
}

#if RECAST_LANES >= 8
typedef float Four __attribute__((vector_size(16)));

// One half of a register, or a register of 8 lanes itself. Not by AVX-512's own extracts and
// reductions: GCC warns of what they leave undefined.
static inline __m256 eight_of(const Vector& v, int half) {
  __m256 eight;
  __builtin_memcpy(&eight, reinterpret_cast<const float*>(&v) + 8 * half, sizeof(eight));
  return eight;
}
#endif

static inline float total(const Vector& v) {
#if RECAST_LANES >= 8
  __m256 all = eight_of(v, 0);
#if RECAST_LANES == 16
  all = _mm256_add_ps(all, eight_of(v, 1));
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  const Four sum = reinterpret_cast<Four>(four);
#else
  const Vector& sum = v;
#endif
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

static inline float largest(const Vector& v) {
#if RECAST_LANES >= 8
  __m256 all = eight_of(v, 0);
#if RECAST_LANES == 16
  all = _mm256_max_ps(all, eight_of(v, 1));
#endif
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
#endif
}
