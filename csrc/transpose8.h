// Transposes eight rows of eight numbers. Included inside the namespace of a kernel, once per
// instruction set: see each_isa.h.

// out[c * stride + r] = rows[r][at + c].
static inline void transpose8(const float* const* rows, int64_t at, float* out, int64_t stride) {
#if RECAST_LANES >= 8
  __m256 a[8];
  for (int r = 0; r < 4; ++r) {  // the halves of rows r and r + 4 side by side
    const __m256 low = _mm256_loadu_ps(rows[r] + at), high = _mm256_loadu_ps(rows[r + 4] + at);
    a[r] = _mm256_permute2f128_ps(low, high, 0x20);
    a[r + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
  for (int h = 0; h < 8; h += 4) {
    const __m256 p = _mm256_unpacklo_ps(a[h], a[h + 1]), q = _mm256_unpackhi_ps(a[h], a[h + 1]);
    const __m256 s = _mm256_unpacklo_ps(a[h + 2], a[h + 3]);
    const __m256 t = _mm256_unpackhi_ps(a[h + 2], a[h + 3]);
    _mm256_storeu_ps(out + (h + 0) * stride, _mm256_shuffle_ps(p, s, 0x44));
    _mm256_storeu_ps(out + (h + 1) * stride, _mm256_shuffle_ps(p, s, 0xee));
    _mm256_storeu_ps(out + (h + 2) * stride, _mm256_shuffle_ps(q, t, 0x44));
    _mm256_storeu_ps(out + (h + 3) * stride, _mm256_shuffle_ps(q, t, 0xee));
  }
#else
  for (int r = 0; r < 8; ++r)
    for (int c = 0; c < 8; ++c) out[c * stride + r] = rows[r][at + c];
#endif
}
