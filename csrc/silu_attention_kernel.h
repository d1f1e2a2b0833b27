// Attention by silu instead of a softmax, of one head of one sample, forward and backward. Included
// once per instruction set: see each_isa.h.
//
// The scores of a head stay in the cache; keys and values lie transposed and padded to whole
// registers, so that a row of scores is a sum of registers.

namespace recast::silu_attention::RECAST_ISA {

#include "parts.h"
#include "transpose8.h"
#include "vector_exponential.h"
#include "vector_products.h"

// 1 / (1 + e^-x), and 1 minus it without cancellation.
struct Logistic {
  Vector part, rest;
};

static inline Logistic logistic(const Vector& x) {
  const Vector one = Vector{} + 1.0f;
  const Vector e = exponential(x < 0.0f ? x : -x);
  const Vector high = one / (one + e), low = e * high;
  return {x < 0.0f ? low : high, x < 0.0f ? high : low};
}

// room.a = q kᵀ, (queries, padded keys).
static inline void score(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys;
  transpose(h.k, h.keys, h.dim, wide, room.kt);
  multiply<false>(h.queries, {h.q.data, h.q.step}, h.dim, room.kt, wide, {room.a, wide}, wide);
}

// What a score becomes before silu, and the factor of what comes out of it: zero in the padding.
struct Place {
  Vector x, factor;
};

static inline Place place(const Head& h, const Vector& score, int64_t i, int64_t j) {
  const int64_t left = h.keys - j;
  Place found = {score * h.scale, Vector{} + h.factor};
  if (h.bias.data != nullptr) found.x += load(h.bias.data + i * h.bias.step + j, left);
  if (h.mask.data != nullptr) found.factor *= load(h.mask.data + i * h.mask.step + j, left);
  return found;
}

static void forward(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys, deep = h.padded_values;
  score(h, room);
  for (int64_t i = 0; i < h.queries; ++i)
    for (int64_t j = 0; j < wide; j += kLanes) {
      Vector& a = at(room.a + i * wide + j);
      const Place p = place(h, a, i, j);
      a = p.x * logistic(p.x).part * p.factor;
    }
  pad(h.v, h.keys, h.values, deep, room.v);
  multiply<false>(h.queries, {room.a, wide}, h.keys, room.v, deep, h.out, h.values);
}

static void backward(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys, deep = h.padded_values, padded = h.padded_dim;
  score(h, room);
  transpose(h.v, h.keys, h.values, wide, room.vt);
  pad(h.k, h.keys, h.dim, padded, room.k);
  pad(h.q, h.queries, h.dim, padded, room.q);
  pad(h.out, h.queries, h.values, deep, room.grad);
  multiply<false>(h.queries, {room.grad, deep}, h.values, room.vt, wide, {room.da, wide}, wide);
  for (int64_t i = 0; i < h.queries; ++i)
    for (int64_t j = 0; j < wide; j += kLanes) {
      Vector &a = at(room.a + i * wide + j), &da = at(room.da + i * wide + j);
      const Place p = place(h, a, i, j);
      const Logistic l = logistic(p.x);
      if (h.dmask.data != nullptr)
        store(h.dmask.data + i * h.dmask.step + j, h.keys - j, da * p.x * l.part * h.factor);
      const Vector part = l.part * p.factor, ds = da * part * (p.x * l.rest + 1.0f);
      a = p.x * part;
      da = ds * h.scale;
      if (h.dbias.data != nullptr) store(h.dbias.data + i * h.dbias.step + j, h.keys - j, ds);
    }
  multiply<true>(h.keys, {room.a, wide}, h.queries, room.grad, deep, h.dv, h.values);
  multiply<false>(h.queries, {room.da, wide}, h.keys, room.k, padded, h.dq, h.dim);
  multiply<true>(h.keys, {room.da, wide}, h.queries, room.q, padded, h.dk, h.dim);
}

}  // namespace recast::silu_attention::RECAST_ISA
