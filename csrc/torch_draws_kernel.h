// The Mersenne Twister (Matsumoto and Nishimura, 1998) in registers, and how torch uses its
// numbers. Included once per instruction set: see each_isa.h.

namespace recast::draws::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef uint32_t Words __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

static inline const Words& at(const uint32_t* p) { return *reinterpret_cast<const Words*>(p); }
static inline Words& at(uint32_t* p) { return *reinterpret_cast<Words*>(p); }

// The upper bit of u and the lower ones of v, shifted, with the matrix applied where v is odd.
template <class T>
static inline T twist(T u, T v) {
  const T mixed = ((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1;
  return mixed ^ ((T{} - (v & 1u)) & 0x9908b0dfu);
}

template <class T>
static inline T temper(T y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

// state[first .. last) of the next block; `far` is the offset of the third term.
static inline void advance(uint32_t* state, int first, int last, int far) {
  int i = first;
  for (; i + kLanes <= last; i += kLanes)
    at(state + i) = at(state + i + far) ^ twist<Words>(at(state + i), at(state + i + 1));
  for (; i < last; ++i) state[i] = state[i + far] ^ twist<uint32_t>(state[i], state[i + 1]);
}

static inline void next_block(uint32_t* state) {
  advance(state, 0, kBlock - kFar, kFar);
  advance(state, kBlock - kFar, kBlock - 1, kFar - kBlock);
  state[kBlock - 1] = state[kFar - 1] ^ twist<uint32_t>(state[kBlock - 1], state[0]);
}

// The next `count` numbers of the twister.
static void numbers(Twister& twister, uint32_t* out, int64_t count) {
  while (count > 0) {
    if (twister.next == kBlock) {
      next_block(twister.state);
      twister.next = 0;
    }
    const int64_t some = count < kBlock - twister.next ? count : kBlock - twister.next;
    const uint32_t* const from = twister.state + twister.next;
    int64_t i = 0;
    for (; i + kLanes <= some; i += kLanes) at(out + i) = temper<Words>(at(from + i));
    for (; i < some; ++i) out[i] = temper<uint32_t>(from[i]);
    twister.next += static_cast<int>(some);
    out += some;
    count -= some;
  }
}

// Skips `count` numbers.
static void skip(Twister& twister, int64_t count) {
  while (count > 0) {
    if (twister.next == kBlock) {
      next_block(twister.state);
      twister.next = 0;
    }
    const int64_t some = count < kBlock - twister.next ? count : kBlock - twister.next;
    twister.next += static_cast<int>(some);
    count -= some;
  }
}

// out[i] = value where number i, of 53 bits, is below `limit`, else 0. A number is the lower 21
// bits of one word above the 32 bits of the next.
template <class Real>
static inline void choose_numbers(const uint32_t* words, int64_t count, int64_t limit, Real value,
                                  Real* out) {
  const auto above = static_cast<uint32_t>(limit >> 32), rest = static_cast<uint32_t>(limit);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t high = words[2 * i] & 0x1fffffu, low = words[2 * i + 1];
    const bool below = (high < above) | ((high == above) & (low < rest));
    out[i] = below ? value : Real{0};
  }
}

template <class Real>
static inline void scale(const Real* factors, int64_t count, Real* x) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factors[i];
}

constexpr int64_t kChunk = 2048;

template <class Real>
static inline void run(Twister& twister, int64_t count, int64_t limit, Real value, Real* noise,
                       Real* x) {
  uint32_t words[2 * kChunk];
  Real own[kChunk];
  for (int64_t i = 0; i < count; i += kChunk) {
    const int64_t some = count - i < kChunk ? count - i : kChunk;
    Real* const out = noise == nullptr ? own : noise + i;
    numbers(twister, words, 2 * some);
    choose_numbers<Real>(words, some, limit, value, out);
    if (x != nullptr) scale<Real>(out, some, x + i);
  }
}

static void run_float(Twister& twister, int64_t count, int64_t limit, double value, float* noise,
                      float* x) {
  run<float>(twister, count, limit, static_cast<float>(value), noise, x);
}

static void run_double(Twister& twister, int64_t count, int64_t limit, double value, double* noise,
                       double* x) {
  run<double>(twister, count, limit, value, noise, x);
}

}  // namespace recast::draws::RECAST_ISA
