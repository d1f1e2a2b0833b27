// Finding ids in buckets. Included once per instruction set: see each_isa.h.

namespace recast::ids::RECAST_ISA {

// Bit k: slot k has this id, or is empty and had it last.
static inline unsigned same(const Bucket& bucket, int64_t id) {
#if defined(__x86_64__) && RECAST_LANES > 4
  const __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.ids));
  const __m256i equal = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(id));
  const auto first = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
  return first | static_cast<unsigned>(bucket.ids[4] == id) << 4;
#else
  unsigned found = 0;
  for (int k = 0; k < kSlots; ++k) found |= static_cast<unsigned>(bucket.ids[k] == id) << k;
  return found;
#endif
}

static inline uint32_t row_of(const Bucket* buckets, uint64_t mask, int64_t id, uint64_t at) {
  while (true) {
    const Bucket& bucket = buckets[at];
    for (unsigned left = same(bucket, id); left != 0; left &= left - 1) {
      const uint32_t row = bucket.rows[__builtin_ctz(left)];
      if (row != kPadding) return row;
    }
    if (bucket.past == 0) return kPadding;
    at = (at + 1) & mask;
  }
}

// The row of each id, or kAbsent; how many are absent. Cache lines of `kAhead` ids are fetched
// together.
static int64_t find(const Bucket* buckets, uint64_t mask, const int64_t* ids, int64_t n,
                    int64_t* rows) {
  uint64_t homes[kAhead];  // a ring
  const auto fetch = [&](int64_t i) {
    const uint64_t home = mixed(ids[i]) & mask;
    homes[i % kAhead] = home;
    __builtin_prefetch(buckets + home);
  };
  int64_t absent = 0;
  const auto look = [&](int64_t i, uint64_t home) {
    const uint32_t row = row_of(buckets, mask, ids[i], home);
    absent += row == kPadding;
    rows[i] = row == kPadding ? kAbsent : static_cast<int64_t>(row);
  };
  for (int64_t i = 0; i < n && i < kAhead; ++i) fetch(i);
  int64_t i = 0;
  for (; i + kAhead < n; ++i) {
    const uint64_t home = homes[i % kAhead];
    fetch(i + kAhead);
    look(i, home);
  }
  for (; i < n; ++i) look(i, homes[i % kAhead]);
  return absent;
}

}  // namespace recast::ids::RECAST_ISA
