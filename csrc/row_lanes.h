// Vectors of the widest registers of an instruction set, and of narrower ones for what is left of a
// row. Included by kernel headers, inside their namespace.

typedef float Vec4 __attribute__((vector_size(16)));
#if RECAST_LANES >= 8
typedef float Vec8 __attribute__((vector_size(32)));
#endif
#if RECAST_LANES >= 16
typedef float Vec16 __attribute__((vector_size(64)));
#endif

// Rows may be unaligned: memcpy says so, and compiles to unaligned moves.
template <class V>
static inline V load(const float* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}
template <class V>
static inline void store(float* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

static inline float root(float x) { return __builtin_sqrtf(x); }
static inline Vec4 root(Vec4 x) {
#if RECAST_LANES >= 8
  return _mm_sqrt_ps(x);
#else
  return Vec4{root(x[0]), root(x[1]), root(x[2]), root(x[3])};
#endif
}
#if RECAST_LANES >= 8
static inline Vec8 root(Vec8 x) { return _mm256_sqrt_ps(x); }
#endif
#if RECAST_LANES >= 16
static inline Vec16 root(Vec16 x) { return _mm512_maskz_sqrt_ps(0xffff, x); }
#endif

// Calls `each<V>(c)` for all columns, in the widest vectors that fit.
template <class Each>
static inline void each_column(int64_t dim, const Each& each) {
  int64_t c = 0;
#if RECAST_LANES >= 16
  for (; c + 16 <= dim; c += 16) each(Vec16{}, c);
#endif
#if RECAST_LANES >= 8
  for (; c + 8 <= dim; c += 8) each(Vec8{}, c);
#endif
  for (; c + 4 <= dim; c += 4) each(Vec4{}, c);
  for (; c < dim; ++c) each(0.0f, c);
}
