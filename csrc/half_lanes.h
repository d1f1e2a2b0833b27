// 16-bit numbers in memory, fp32 in registers: included by a kernel header inside its
// namespace, once for each instruction set (see each_isa.h), after Vec4, Vec8 and Vec16.
//
// A format is a type with load<V>(from) and store(to, V) for vectors V and for float. Stores round
// to the nearest, ties to even; store_at_random rounds up or down so that the expected value is
// right. All instruction sets give the same bits (but for the payload of NaN).

template <class To, class From>
static inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Integers as wide as the lanes of a float vector, and half as wide.
template <class V>
struct Lanes {
  using Word = uint32_t;
  using Short = uint16_t;
};
#define RECAST_LANES_OF(n)                                        \
  template <>                                                     \
  struct Lanes<Vec##n> {                                          \
    typedef uint32_t Word __attribute__((vector_size(4 * (n))));  \
    typedef uint16_t Short __attribute__((vector_size(2 * (n)))); \
  }
RECAST_LANES_OF(4);
#if RECAST_LANES >= 8
RECAST_LANES_OF(8);
#endif
#if RECAST_LANES >= 16
RECAST_LANES_OF(16);
#endif
#undef RECAST_LANES_OF

struct Bf16 {
  static inline float load_one(uint16_t bits) {
    return bits_as<float>(static_cast<uint32_t>(bits) << 16);
  }
  template <class V>
  static inline V load(const uint16_t* from) {
    using Word = typename Lanes<V>::Word;
    typename Lanes<V>::Short bits;
    __builtin_memcpy(&bits, from, sizeof(bits));
    return bits_as<V>(__builtin_convertvector(bits, Word) << 16);
  }
  static inline uint16_t nearest(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  template <class V>
  static inline void store(uint16_t* to, V v) {
    using Word = typename Lanes<V>::Word;
    using Short = typename Lanes<V>::Short;
    const Word bits = bits_as<Word>(v);
    const Word nan = bits_as<Word>((bits & 0x7fffffffu) > 0x7f800000u);
    const Word rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const Short out =
        __builtin_convertvector((rounded & ~nan) | ((bits >> 16 | 0x40u) & nan), Short);
    __builtin_memcpy(to, &out, sizeof(out));
  }
  static inline uint16_t at_random(float x, uint32_t word) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return nearest(x);
    return static_cast<uint16_t>((bits + (word & 0xffffu)) >> 16);
  }
};

struct Fp16 {
  static inline float load_one(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, size = half & 0x7fffu;
    if (size < 0x0400u) return bits_as<float>(sign | bits_as<uint32_t>(size * 0x1p-24f));
    const uint32_t bits = size << 13;
    return bits_as<float>(sign | (size < 0x7c00u ? bits + (112u << 23) : bits | 0x7f800000u));
  }
  static inline uint16_t nearest(float x) {
    const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000u;
    uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // from 65520 on
    if (size < 0x38800000u)  // subnormal: the sum has steps of 2^-24
      return static_cast<uint16_t>(sign |
                                   (bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000u));
    size += 0xfffu + (size >> 13 & 1u) - (112u << 23);
    return static_cast<uint16_t>(sign | size >> 13);
  }
  static inline uint16_t at_random(float x, uint32_t word) {
    const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    if (size >= 0x477fe000u) return nearest(x);  // from the largest number on
    const float whole = bits_as<float>(size);
    const uint32_t less =
        size < 0x38800000u ? static_cast<uint32_t>(whole * 0x1p24f) : (size - (112u << 23)) >> 13;
    const float least = load_one(static_cast<uint16_t>(less));
    const float most = load_one(static_cast<uint16_t>(less + 1));
    const float share = (whole - least) / (most - least);
    const bool up = static_cast<float>(word >> 8) * 0x1p-24f < share;
    return static_cast<uint16_t>(sign | (less + (up ? 1u : 0u)));
  }

  template <class V>
  static inline V load(const uint16_t* from) {
    V v;
    for (unsigned i = 0; i < sizeof(V) / sizeof(float); ++i) v[i] = load_one(from[i]);
    return v;
  }
  template <class V>
  static inline void store(uint16_t* to, V v) {
    for (unsigned i = 0; i < sizeof(V) / sizeof(float); ++i) to[i] = nearest(v[i]);
  }
};

template <>
inline float Bf16::load<float>(const uint16_t* from) {
  return load_one(*from);
}
template <>
inline void Bf16::store<float>(uint16_t* to, float v) {
  *to = nearest(v);
}
template <>
inline float Fp16::load<float>(const uint16_t* from) {
  return load_one(*from);
}
template <>
inline void Fp16::store<float>(uint16_t* to, float v) {
  *to = nearest(v);
}

#if RECAST_LANES >= 8
template <>
inline Vec4 Fp16::load<Vec4>(const uint16_t* from) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
template <>
inline void Fp16::store<Vec4>(uint16_t* to, Vec4 v) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
template <>
inline Vec8 Fp16::load<Vec8>(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
template <>
inline void Fp16::store<Vec8>(uint16_t* to, Vec8 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#endif
#if RECAST_LANES >= 16
template <>
inline Vec16 Fp16::load<Vec16>(const uint16_t* from) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
template <>
inline void Fp16::store<Vec16>(uint16_t* to, Vec16 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
}
#endif

// Philox 4x32-10 (Salmon et al., 2011): four random words for four columns of one row.
struct Words {
  uint32_t at[4];
};

static inline Words random_words(uint64_t seed, uint64_t row, uint32_t columns) {
  uint32_t a = static_cast<uint32_t>(row), b = static_cast<uint32_t>(row >> 32), c = columns, d = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t{0xD2511F53u} * a, q = uint64_t{0xCD9E8D57u} * c;
    a = static_cast<uint32_t>(q >> 32) ^ b ^ k0;
    c = static_cast<uint32_t>(p >> 32) ^ d ^ k1;
    b = static_cast<uint32_t>(q);
    d = static_cast<uint32_t>(p);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// Writes columns of row `row` from c on, as many as V has lanes.
template <class Format, class V>
static inline void store_at_random(uint16_t* to, const V& v, uint64_t seed, uint64_t row,
                                   int64_t c) {
  constexpr int lanes = sizeof(V) / sizeof(float);
  float x[lanes];
  __builtin_memcpy(x, &v, sizeof(V));
  for (int i = 0; i < lanes; i += 4) {
    const Words words = random_words(seed, row, static_cast<uint32_t>((c + i) / 4));
    for (int j = 0; j < 4 && i + j < lanes; ++j)
      to[i + j] = Format::at_random(x[i + j], words.at[(c + i + j) % 4]);
  }
}
