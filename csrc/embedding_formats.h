// How the rows of an embedding table are stored, and how they are read as floats and written back.
// Included once per instruction set, by embedding_bags_kernel.h. All conversions give the same bits
// on every instruction set.
//
//   float32, float16, bfloat16   one number per column
//   int8   one byte q per column, then float32 scale and bias: x = q * scale + bias
//   int4   four bits q per column, even columns in the low half, then float16 scale and bias
//
// The last two are the fused row-wise formats of FBGEMM and of torch.ops.quantized
// (embedding_bag_byte_prepack, embedding_bag_4bit_prepack).

namespace recast::embedding::RECAST_ISA {

// One register of floats, and as many integers.
constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(RECAST_LANES * 4)));
typedef uint32_t UInts __attribute__((vector_size(RECAST_LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(RECAST_LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(RECAST_LANES)));
typedef uint8_t Pairs __attribute__((vector_size(RECAST_LANES / 2)));
typedef uint16_t Wide __attribute__((vector_size(RECAST_LANES)));

// A type loses its alignment as a template argument, so a pointer to it may not be dereferenced.
template <class T>
static inline T load(const void* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}
template <class T>
static inline void store(void* p, T value) {
  __builtin_memcpy(p, &value, sizeof value);
}
template <class To, class From>
static inline To bits(From from) {
  return load<To>(&from);
}

// ---------------------------------------------------------------- float16

static inline float half_to_float(uint16_t h) {
#if RECAST_LANES > 4
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // A subnormal number as a product of normal ones: the processor may be set to flush others.
  const float small = static_cast<float>(rest) * 0x1p-24f;
  if (rest < 0x0400u) return bits<float>(bits<uint32_t>(small) | sign);
  return bits<float>(((rest << 13) + (112u << 23)) | sign);
#endif
}

// Rounds to nearest, ties to even.
static inline uint16_t float_to_half(float x) {
#if RECAST_LANES > 4
  return _cvtss_sh(x, 0);
#else
  const uint32_t from = bits<uint32_t>(x), sign = (from >> 16) & 0x8000u;
  const uint32_t rest = from & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (rest < 0x38800000u) {  // subnormal: adding 0.5 moves the mantissa into place, rounded
    const float moved = bits<float>(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (bits<uint32_t>(moved) - 0x3f000000u));
  }
  const uint32_t rounded = rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
#endif
}

static inline Vector halves(const uint16_t* p) {
#if RECAST_LANES == 16
  return (Vector)_mm512_maskz_cvtph_ps(0xffff,
                                       _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif RECAST_LANES == 8
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vector x;
  for (int j = 0; j < kLanes; ++j) x[j] = half_to_float(p[j]);
  return x;
#endif
}

static inline void put_halves(uint16_t* p, Vector x) {
#if RECAST_LANES == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, (__m512)x, 0));
#elif RECAST_LANES == 8
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, 0));
#else
  for (int j = 0; j < kLanes; ++j) p[j] = float_to_half(x[j]);
#endif
}

// ---------------------------------------------------------------- bfloat16

static inline float brain_to_float(uint16_t b) {
  return bits<float>(static_cast<uint32_t>(b) << 16);
}

static inline uint16_t float_to_brain(float x) {
  const uint32_t from = bits<uint32_t>(x);
  if (x != x) return 0x7fc0u;
  return static_cast<uint16_t>((from + 0x7fffu + ((from >> 16) & 1u)) >> 16);
}

static inline Vector brains(const uint16_t* p) {
  return (Vector)(__builtin_convertvector(load<Shorts>(p), UInts) << 16);
}

static inline void put_brains(uint16_t* p, Vector x) {
  const UInts from = (UInts)x, wrong = (UInts)(x != x);
  const UInts rounded = (from + 0x7fffu + ((from >> 16) & 1u)) >> 16;
  store<Shorts>(p, __builtin_convertvector((rounded & ~wrong) | (wrong & 0x7fc0u), Shorts));
}

// ---------------------------------------------------------------- bytes and half bytes

// By hand: GCC would convert the vectors byte by byte.
static inline Vector small(Bytes q) {
#if RECAST_LANES == 16
  return (Vector)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)q));
#elif RECAST_LANES == 8
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits<int64_t>(q))));
#else
  return __builtin_convertvector(__builtin_convertvector(q, Ints), Vector);
#endif
}

// Unpacks kLanes / 2 bytes into twice as many: bits 0-3 of each become the first of two bytes, bits
// 4-7 the second.
static inline Bytes apart(const uint8_t* p) {
#if RECAST_LANES == 16
  const __m128i both = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif RECAST_LANES == 8
  const __m128i both = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(load<int32_t>(p)));
#else
  const Wide both = __builtin_convertvector(load<Pairs>(p), Wide);
  return (Bytes)((both | both << 4) & 0x0f0f);
#endif
#if RECAST_LANES > 4
  const __m128i found =
      _mm_and_si128(_mm_or_si128(both, _mm_slli_epi16(both, 4)), _mm_set1_epi16(0x0f0f));
  return load<Bytes>(&found);
#endif
}

// ---------------------------------------------------------------- rows, by format

// Each has kBits per column and kTail bytes after the columns; lanes(c) reads columns [c, c +
// kLanes), one(c) a single one.
template <Format F>
struct Row;

template <>
struct Row<Format::float32> {
  static constexpr int kBits = 32, kTail = 0;
  const float* data;
  Row(const Run& run, int64_t id) : data(run.row<float>(id)) {}
  Vector lanes(int64_t c) const { return load<Vector>(data + c); }
  float one(int64_t c) const { return data[c]; }
};

template <>
struct Row<Format::float16> {
  static constexpr int kBits = 16, kTail = 0;
  const uint16_t* data;
  Row(const Run& run, int64_t id) : data(run.row<uint16_t>(id)) {}
  Vector lanes(int64_t c) const { return halves(data + c); }
  float one(int64_t c) const { return half_to_float(data[c]); }
};

template <>
struct Row<Format::bfloat16> {
  static constexpr int kBits = 16, kTail = 0;
  const uint16_t* data;
  Row(const Run& run, int64_t id) : data(run.row<uint16_t>(id)) {}
  Vector lanes(int64_t c) const { return brains(data + c); }
  float one(int64_t c) const { return brain_to_float(data[c]); }
};

template <>
struct Row<Format::int8> {
  static constexpr int kBits = 8, kTail = 8;
  const uint8_t* data;
  float scale, bias;
  Row(const Run& run, int64_t id) : data(run.row<uint8_t>(id)) {
    scale = load<float>(data + run.dim);
    bias = load<float>(data + run.dim + 4);
  }
  Vector lanes(int64_t c) const { return small(load<Bytes>(data + c)) * scale + bias; }
  float one(int64_t c) const { return static_cast<float>(data[c]) * scale + bias; }
};

template <>
struct Row<Format::int4> {
  static constexpr int kBits = 4, kTail = 4;
  const uint8_t* data;
  float scale, bias;
  Row(const Run& run, int64_t id) : data(run.row<uint8_t>(id)) {
    const uint8_t* numbers = data + (run.dim + 1) / 2;
    scale = half_to_float(load<uint16_t>(numbers));
    bias = half_to_float(load<uint16_t>(numbers + 2));
  }
  Vector lanes(int64_t c) const { return small(apart(data + c / 2)) * scale + bias; }
  float one(int64_t c) const {
    return static_cast<float>(data[c / 2] >> (c % 2 * 4) & 15) * scale + bias;
  }
};

// ---------------------------------------------------------------- outputs, by format

template <Format F>
struct Out;

template <>
struct Out<Format::float32> {
  float* data;
  explicit Out(void* p) : data(static_cast<float*>(p)) {}
  void put(int64_t c, Vector x) const { store<Vector>(data + c, x); }
  void put_one(int64_t c, float x) const { data[c] = x; }
};

template <>
struct Out<Format::float16> {
  uint16_t* data;
  explicit Out(void* p) : data(static_cast<uint16_t*>(p)) {}
  void put(int64_t c, Vector x) const { put_halves(data + c, x); }
  void put_one(int64_t c, float x) const { data[c] = float_to_half(x); }
};

template <>
struct Out<Format::bfloat16> {
  uint16_t* data;
  explicit Out(void* p) : data(static_cast<uint16_t*>(p)) {}
  void put(int64_t c, Vector x) const { put_brains(data + c, x); }
  void put_one(int64_t c, float x) const { data[c] = float_to_brain(x); }
};

}  // namespace recast::embedding::RECAST_ISA
