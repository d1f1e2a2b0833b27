// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#pragma once

#include "pack.cuh"

namespace recast {

struct RandomWords {
  unsigned at[4];
};

// Four random words for the counter (a, b, c, d) under the key `seed`.
__device__ __forceinline__ RandomWords philox(Wide seed, unsigned a, unsigned b, unsigned c,
                                              unsigned d) {
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const Wide p = static_cast<Wide>(0xD2511F53u) * a, q = static_cast<Wide>(0xCD9E8D57u) * c;
    a = static_cast<unsigned>(q >> 32) ^ b ^ k0;
    c = static_cast<unsigned>(p >> 32) ^ d ^ k1;
    b = static_cast<unsigned>(q);
    d = static_cast<unsigned>(p);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

}  // namespace recast
