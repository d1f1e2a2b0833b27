// One row of floats as int8 and back. Included once per instruction set: see each_isa.h.
//
// Products are in double precision: the nearest integer to 127 x / amax is then found exactly, even
// if the instruction set fuses products and sums (see kHalf), and the largest element of a row is
// restored exactly.

namespace recast::wire::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef uint32_t Words __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

// A half and a little more. With 24 bits of x and of amax, 127 x / amax is either exactly k + 1/2
// or, where it does not round to 0, at least 2^-33 away from it; a product and a sum of doubles
// below 128 are off by less than 2^-44. So the excess decides ties, and nothing else.
constexpr double kHalf = 0.5 + 0x1p-36;

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// The bits of the largest magnitude; greater than infinity's if there is a NaN.
static inline uint32_t largest(const float* x, int64_t dim) {
  Words most = Words{};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const Words size = *reinterpret_cast<const Words*>(x + c) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  uint32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found = most[i] > found ? most[i] : found;
  for (; c < dim; ++c) {
    const uint32_t size = bits_of(x[c]) & 0x7fffffffu;
    found = size > found ? size : found;
  }
  return found;
}

static inline int8_t nearest(float x, double inverse) {
  const double t = static_cast<double>(x) * inverse;
  return static_cast<int8_t>(static_cast<int32_t>(t + __builtin_copysign(kHalf, t)));
}

#if RECAST_LANES >= 8
// Four products, rounded. The bias takes the sign of the product.
static inline __m128i nearest4(const float* x, __m256d inverse) {
  const __m256d sign = _mm256_set1_pd(-0.0), half = _mm256_set1_pd(kHalf);
  const __m256d t = _mm256_mul_pd(_mm256_cvtps_pd(_mm_loadu_ps(x)), inverse);
  return _mm256_cvttpd_epi32(_mm256_add_pd(t, _mm256_or_pd(_mm256_and_pd(t, sign), half)));
}
#endif

// A row with elements that are not finite: these have codes of their own, and the others get 126
// steps. The sign bit of amax marks such a row.
static inline void encode_marked(const float* x, int64_t dim, int8_t* q, float* amax) {
  uint32_t most = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const uint32_t size = bits_of(x[c]) & 0x7fffffffu;
    if (size < 0x7f800000u && size > most) most = size;
  }
  const double inverse = most == 0 ? 0.0 : 126.0 / static_cast<double>(float_of(most));
  for (int64_t c = 0; c < dim; ++c) {
    const uint32_t size = bits_of(x[c]) & 0x7fffffffu;
    if (size < 0x7f800000u)
      q[c] = nearest(x[c], inverse);
    else
      q[c] = static_cast<int8_t>(size > 0x7f800000u ? -128 : x[c] > 0.0f ? 127 : -127);
  }
  *amax = float_of(most | 0x80000000u);
}

static void encode(const float* x, int64_t dim, int8_t* q, float* amax) {
  const uint32_t most = largest(x, dim);
  if (most >= 0x7f800000u) return encode_marked(x, dim, q, amax);
  *amax = float_of(most);
  const double inverse = most == 0 ? 0.0 : 127.0 / static_cast<double>(*amax);
  int64_t c = 0;
#if RECAST_LANES >= 8
  const __m256d factor = _mm256_set1_pd(inverse);
  for (; c + 16 <= dim; c += 16) {
    const __m128i low = _mm_packs_epi32(nearest4(x + c, factor), nearest4(x + c + 4, factor));
    const __m128i high = _mm_packs_epi32(nearest4(x + c + 8, factor), nearest4(x + c + 12, factor));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + c), _mm_packs_epi16(low, high));
  }
#endif
  for (; c < dim; ++c) q[c] = nearest(x[c], inverse);
}

static void decode(const int8_t* q, int64_t dim, float amax, float* x) {
  const bool marked = bits_of(amax) >> 31 != 0;
  const double size = static_cast<double>(marked ? -amax : amax);
  const double scale = size / (marked ? 126.0 : 127.0);
  int64_t c = 0;
#if RECAST_LANES >= 8
  const __m256d factor = _mm256_set1_pd(scale);
  for (; c + 8 <= dim; c += 8) {
    const __m256i wide =
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + c)));
    const __m256d low = _mm256_cvtepi32_pd(_mm256_castsi256_si128(wide));
    const __m256d high = _mm256_cvtepi32_pd(_mm256_extracti128_si256(wide, 1));
    _mm_storeu_ps(x + c, _mm256_cvtpd_ps(_mm256_mul_pd(low, factor)));
    _mm_storeu_ps(x + c + 4, _mm256_cvtpd_ps(_mm256_mul_pd(high, factor)));
  }
#endif
  for (; c < dim; ++c) x[c] = static_cast<float>(q[c] * scale);
  if (!marked) return;
  for (c = 0; c < dim; ++c) {
    if (q[c] == -128) x[c] = float_of(0x7fc00000u);
    if (q[c] == 127) x[c] = float_of(0x7f800000u);
    if (q[c] == -127) x[c] = float_of(0xff800000u);
  }
}

}  // namespace recast::wire::RECAST_ISA
