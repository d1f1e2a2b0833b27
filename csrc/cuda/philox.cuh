// Philox 4x32, a counter-based random number generator (Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", 2011): 10 rounds are its authors' default; with 7, the fewest allowed here, it
// still passes all of BigCrush.
#pragma once

#include "pack.cuh"

namespace recast {

struct RandomWords {
  unsigned at[4];
};

// The low and high words of a * b. Written in PTX, as for a 64-bit product nvcc emits an extra add
// of zero to the high word.
__device__ __forceinline__ void multiply(unsigned a, unsigned b, unsigned& low, unsigned& high) {
#if defined(__CUDACC__)
  asm("{\n\t.reg .b64 both;\n\tmul.wide.u32 both, %2, %3;\n\tmov.b64 {%0, %1}, both;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(a), "r"(b));
#else
  const UInt64 both = static_cast<UInt64>(a) * b;
  low = static_cast<unsigned>(both);
  high = static_cast<unsigned>(both >> 32);
#endif
}

// Four random words for the counter (a, b, c, d) under the key `seed`.
template <int Rounds = 10>
__device__ __forceinline__ RandomWords philox(UInt64 seed, unsigned a, unsigned b, unsigned c,
                                              unsigned d) {
  static_assert(Rounds >= 7, "fewer are not random enough");
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < Rounds; ++round) {
    unsigned p, over_p, q, over_q;
    multiply(0xD2511F53u, a, p, over_p);
    multiply(0xCD9E8D57u, c, q, over_q);
    a = over_q ^ b ^ k0;
    c = over_p ^ d ^ k1;
    b = q;
    d = p;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

}  // namespace recast
