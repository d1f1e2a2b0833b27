// The emulator's implementation of the instructions of csrc/cuda/intrinsics.cuh.
#pragma once

#include "simt/collectives.h"
#include "simt/math.h"

namespace simt {

inline void check_aligned(const Site& site, const void* at, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0)
    misuse(&site, "address %p is no multiple of %zu", at, bytes);
}

// TF32 keeps 10 of a float's 23 fraction bits.
inline unsigned to_tf32(float x) {
  auto bits = same_bits<unsigned>(x);
  bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return (finite ? bits + 0x1000u : bits) & 0xffffe000u;
}

// ldmatrix: lane l passes the address of row l % 8 of tile l / 8. All 32 lanes take part.
inline void load_tiles(const Site& site, unsigned (&r)[4], const void* row, bool transposed) {
  check_aligned(site, row, 16);
  const LaneValues& values = exchange(site, 0xffffffffu, row);
  if (values.present != 0xffffffffu)
    misuse(&site, "needs the whole warp; lanes %08x have returned", ~values.present);
  const int group = here->lane / 4, within = here->lane % 4;
  for (int tile = 0; tile < 4; ++tile) {
    auto at = [&](int of) { return value_of<const char*>(values, tile * 8 + of); };
    if (transposed) {
      std::memcpy(&r[tile], at(2 * within) + 2 * group, 2);
      std::memcpy(reinterpret_cast<char*>(&r[tile]) + 2, at(2 * within + 1) + 2 * group, 2);
    } else {
      std::memcpy(&r[tile], at(group) + 4 * within, 4);
    }
  }
}

struct Fragments {
  unsigned a[4], b[2];
  float c[4];
};

// All 32 lanes take part, and none may have returned.
inline const LaneValues& exchange_fragments(const Site& site, const unsigned (&a)[4],
                                            const unsigned (&b)[2], const float (&c)[4]) {
  Fragments mine;
  std::memcpy(mine.a, a, sizeof a);
  std::memcpy(mine.b, b, sizeof b);
  std::memcpy(mine.c, c, sizeof c);
  const LaneValues& values = exchange(site, 0xffffffffu, mine);
  if (values.present != 0xffffffffu)
    misuse(&site, "needs the whole warp; lanes %08x have returned", ~values.present);
  return values;
}

inline const Fragments& fragments(const LaneValues& values, int lane) {
  return *reinterpret_cast<const Fragments*>(values.of[lane]);
}

// d[i] = sum over k of a(row, k) b(k, column) + c[i] for the elements of this lane.
template <class A, class B>
void multiply(float (&d)[4], const float (&c)[4], int depth, A a, B b) {
  int group = here->lane / 4, within = here->lane % 4;
  float sums[4];
  for (int i = 0; i < 4; ++i) {
    int row = group + (i < 2 ? 0 : 8), column = 2 * within + i % 2;
    float sum = c[i];
    for (int k = 0; k < depth; ++k) sum += a(row, k) * b(k, column);
    sums[i] = sum;
  }
  std::memcpy(d, sums, sizeof d);  // d may be c
}

template <class T>
float half_of(unsigned pair, int which) {
  auto bits = static_cast<unsigned short>(pair >> (16 * which));
  return static_cast<float>(same_bits<T>(bits));
}

template <class T>
void mma_16x8x16(const Site& site, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                 const float (&c)[4]) {
  const LaneValues& values = exchange_fragments(site, a, b, c);
  auto a_at = [&](int row, int k) {
    const Fragments& of = fragments(values, row % 8 * 4 + k % 8 / 2);
    return half_of<T>(of.a[row / 8 + k / 8 * 2], k % 2);
  };
  auto b_at = [&](int k, int column) {
    const Fragments& of = fragments(values, column * 4 + k % 8 / 2);
    return half_of<T>(of.b[k / 8], k % 2);
  };
  multiply(d, c, 16, a_at, b_at);
}

inline void mma_16x8x8_tf32(const Site& site, float (&d)[4], const unsigned (&a)[4],
                            const unsigned (&b)[2], const float (&c)[4]) {
  const LaneValues& values = exchange_fragments(site, a, b, c);
  auto value = [](unsigned bits) { return same_bits<float>(bits & 0xffffe000u); };
  auto a_at = [&](int row, int k) {
    const Fragments& of = fragments(values, row % 8 * 4 + k % 4);
    return value(of.a[row / 8 + k / 4 * 2]);
  };
  auto b_at = [&](int k, int column) {
    const Fragments& of = fragments(values, column * 4 + k % 4);
    return value(of.b[k / 4]);
  };
  multiply(d, c, 8, a_at, b_at);
}

}  // namespace simt
