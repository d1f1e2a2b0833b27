// Attention by silu instead of a softmax, of one head of one sample, forward and backward. Included
// once per instruction set: see each_isa.h.
//
// Keys and values lie transposed and padded to whole registers, so that a row of scores is a sum of
// registers. Queries are done in blocks whose scores stay in L1, and each block only with the keys
// that its mask leaves it: half of them, of a long causal attention.

namespace recast::silu_attention::RECAST_ISA {

#include "parts.h"
#include "transpose8.h"
#include "vector_exponential.h"
#include "vector_keys.h"
#include "vector_products.h"

// 1 / (1 + e^-x), and 1 minus it without cancellation.
struct Logistic {
  Vector part, rest;
};

static inline Logistic logistic(const Vector& x) {
  const Vector e = exponential(-magnitude(x));
  const Vector high = inverse(e + 1.0f), low = e * high;
  return {by_sign(x, low, high), by_sign(x, high, low)};
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

// Whether keys whose mask is zero may be left out. All must be finite: what is left out would be
// multiplied by zero, which makes NaN of inf.
static inline bool may_leave_out(const Head& h, bool backward) {
  if (h.mask.data == nullptr || h.dbias.data != nullptr || h.dmask.data != nullptr) return false;
  const float product = magnitude_of(h.q, h.queries, h.dim) * magnitude_of(h.k, h.keys, h.dim);
  const float scale = (h.scale < 0.0f ? -h.scale : h.scale) * static_cast<float>(h.dim);
  float values = magnitude_of(h.v, h.keys, h.values);
  if (backward) values *= magnitude_of(h.out, h.queries, h.values);
  return product * scale < kFar && values < kFar;
}

// The keys in use of one block of queries, and the memory that begins with the first of them.
struct Part {
  Head head;
  Room room;
};

// The block with the keys that its mask does not leave out for all of its queries.
static inline Part live_part(const Head& h, const Room& room) {
  const auto left_out = [&](int64_t i, int64_t j) {
    const int64_t left = h.keys - j;
    if (!is_zero(load(h.mask.data + i * h.mask.step + j, left))) return false;
    if (h.bias.data == nullptr) return true;
    const Vector bias = load(h.bias.data + i * h.bias.step + j, left);
    return none_above(bias, kFar) && none_above(-bias, kFar);
  };
  const bool same = h.mask.step == 0 && (h.bias.data == nullptr || h.bias.step == 0);
  const Live live = live_keys(same ? 1 : h.queries, h.keys, left_out);
  Part part = {h, room};
  part.head.keys = live.end - live.first;
  part.head.padded_keys = (part.head.keys + kLanes - 1) / kLanes * kLanes;
  for (Rows* rows : {&part.head.k, &part.head.v, &part.head.dk, &part.head.dv})
    if (rows->data != nullptr) rows->data += live.first * rows->step;
  for (Rows* plane : {&part.head.bias, &part.head.mask})
    if (plane->data != nullptr) plane->data += live.first;
  part.room.kt += live.first, part.room.vt += live.first;
  part.room.k += live.first * h.padded_dim, part.room.v += live.first * h.padded_values;
  return part;
}

// function(part, more) for each block of queries; `more`: for all but the first.
template <class Function>
static inline void each_block(const Head& h, const Room& room, bool leave_out,
                              const Function& function) {
  const int64_t blocks = (h.queries + h.block - 1) / h.block;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = h.queries * i / blocks;
    Head part = h;
    part.queries = h.queries * (i + 1) / blocks - first;
    for (Rows* rows :
         {&part.q, &part.out, &part.dq, &part.bias, &part.mask, &part.dbias, &part.dmask})
      if (rows->data != nullptr) rows->data += first * rows->step;
    function(leave_out ? live_part(part, room) : Part{part, room}, i > 0);
  }
}

// room.a = q kᵀ, (queries, wide).
static inline void score(const Head& h, const Room& room) {
  multiply<false>(h.queries, {h.q.data, h.q.step}, h.dim, room.kt, h.wide, {room.a, h.wide},
                  h.padded_keys);
}

static void forward(const Head& whole, const Room& room) {
  const int64_t wide = whole.wide, deep = whole.padded_values;
  transpose(whole.k, whole.keys, whole.dim, wide, room.kt);
  pad(whole.v, whole.keys, whole.values, deep, room.v);
  each_block(whole, room, may_leave_out(whole, false), [&](const Part& part, bool) {
    const Head& h = part.head;
    score(h, part.room);
    for (int64_t i = 0; i < h.queries; ++i)
      for (int64_t j = 0; j < h.padded_keys; j += kLanes) {
        Vector& a = at(room.a + i * wide + j);
        const Place p = place(h, a, i, j);
        a = p.x * logistic(p.x).part * p.factor;
      }
    multiply<false>(h.queries, {room.a, wide}, h.keys, part.room.v, deep, h.out, h.values);
  });
}

static void backward(const Head& whole, const Room& room) {
  const int64_t wide = whole.wide, deep = whole.padded_values, padded = whole.padded_dim;
  const bool leave_out = may_leave_out(whole, true);
  transpose(whole.k, whole.keys, whole.dim, wide, room.kt);
  transpose(whole.v, whole.keys, whole.values, wide, room.vt);
  pad(whole.k, whole.keys, whole.dim, padded, room.k);
  if (leave_out) {  // a block adds to the gradients of its own keys only
    clear(whole.dk, whole.keys, whole.dim);
    clear(whole.dv, whole.keys, whole.values);
  }
  each_block(whole, room, leave_out, [&](const Part& part, bool later) {
    const Head& h = part.head;
    const bool more = later || leave_out;
    score(h, part.room);
    pad(h.q, h.queries, h.dim, padded, room.q);
    pad(h.out, h.queries, h.values, deep, room.grad);
    multiply<false>(h.queries, {room.grad, deep}, h.values, part.room.vt, wide, {room.da, wide},
                    h.padded_keys);
    for (int64_t i = 0; i < h.queries; ++i)
      for (int64_t j = 0; j < h.padded_keys; j += kLanes) {
        Vector &a = at(room.a + i * wide + j), &da = at(room.da + i * wide + j);
        const Place p = place(h, a, i, j);
        const Logistic l = logistic(p.x);
        if (h.dmask.data != nullptr)
          store(h.dmask.data + i * h.dmask.step + j, h.keys - j, da * p.x * l.part * h.factor);
        const Vector by = l.part * p.factor, ds = da * by * (p.x * l.rest + 1.0f);
        a = p.x * by;
        da = ds * h.scale;
        if (h.dbias.data != nullptr) store(h.dbias.data + i * h.dbias.step + j, h.keys - j, ds);
      }
    multiply<true>(h.keys, {room.a, wide, more}, h.queries, room.grad, deep, h.dv, h.values);
    multiply<false>(h.queries, {room.da, wide}, h.keys, part.room.k, padded, h.dq, h.dim);
    multiply<true>(h.keys, {room.da, wide, more}, h.queries, room.q, padded, h.dk, h.dim);
  });
}

}  // namespace recast::silu_attention::RECAST_ISA
