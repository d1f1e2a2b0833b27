// Included inside the namespace of a kernel, after parts.h, once per instruction set: see
// each_isa.h.

// e^x for x <= 0, to 2 units in the last place; 0 below the smallest normal number, NaN for NaN.
static inline Vector exponential(const Vector& x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Vector shifted = x * 1.44269504088896341f + kMagic;
  const Vector n = shifted - kMagic;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  // The best polynomial of degree 6 that begins with 1 + r, for |r| <= log(2) / 2: to 3e-9.
  Vector y = Vector{} + 1.3814590130e-3f;
  y = y * r + 8.3687172747e-3f;
  y = y * r + 4.1668388185e-2f;
  y = y * r + 1.6666520629e-1f;
  y = y * r + 4.9999993447e-1f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
#if RECAST_LANES == 16
  const __mmask16 normal =
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  return reinterpret_cast<Vector>(
      _mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(n)));
#else
  const Bits power = (*reinterpret_cast<const Bits*>(&shifted) - 0x4B400000 + 127) << 23;
  const Vector whole = y * *reinterpret_cast<const Vector*>(&power);
  const Vector zero = Vector{};
  return x < -87.0f ? zero : whole;
#endif
}

// 1 / x for numbers from 1 to 2, to 2 units in the last place.
static inline Vector inverse(const Vector& x) {
#if RECAST_LANES == 16
  // A division of 16 lanes takes as long as ten products.
  const Vector r =
      reinterpret_cast<Vector>(_mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(x)));
  return r + r * (1.0f - x * r);
#else
  return 1.0f / x;
#endif
}

static inline Vector magnitude(const Vector& x) {
  const Bits bits = *reinterpret_cast<const Bits*>(&x) & 0x7fffffff;
  return *reinterpret_cast<const Vector*>(&bits);
}

// below where x has a minus, else above.
static inline Vector by_sign(const Vector& x, const Vector& below, const Vector& above) {
#if RECAST_LANES == 8
  return reinterpret_cast<Vector>(_mm256_blendv_ps(reinterpret_cast<__m256>(above),
                                                   reinterpret_cast<__m256>(below),
                                                   reinterpret_cast<__m256>(x)));
#else
  return x < 0.0f ? below : above;
#endif
}
