// Softmax attention of one head of one sample, forward and backward. Included once per instruction
// set: see each_isa.h.
//
// Keys and values lie transposed and padded to whole registers, so that a row of scores is a sum of
// registers. Queries are done in blocks whose weights stay in L1.

namespace recast::attention::RECAST_ISA {

#include "parts.h"
#include "transpose8.h"
#include "vector_exponential.h"
#include "vector_products.h"

// scores = filled ? fill : scale * scores + bias, for each query and key.
static inline void cover(const Head& h, float* scores) {
  for (int64_t i = 0; i < h.queries; ++i)
    for (int64_t j = 0; j < h.padded_keys; j += kLanes) {
      const int64_t left = h.keys - j;
      Vector x = at(scores + i * h.padded_keys + j) * h.scale;
      if (h.bias.data != nullptr) x += load(h.bias.data + i * h.bias.step + j, left);
      if (h.filled.data != nullptr) {
        const Vector set = load(h.filled.data + i * h.filled.step + j, left);
        x = set != 0.0f ? Vector{} + h.fill : x;
      }
      at(scores + i * h.padded_keys + j) = x;
    }
}

// Each row = softmax(scale * row) over its first `count` elements, zero after them. Each step is
// done for all rows before the next one, so that rows hide each other's latency. If `kSafe`, a
// row of -inf becomes zeros instead of NaN.
template <bool kSafe>
static inline void softmax(float* matrix, int64_t rows, int64_t count, int64_t width, float scale,
                           float* most) {
  Bits there;  // lanes in use in the last register of a row
  for (int k = 0; k < kLanes; ++k) there[k] = width - kLanes + k < count ? -1 : 0;
  for (int64_t i = 0; i < rows; ++i) {
    float* const row = matrix + i * width;
    Vector& last = at(row + width - kLanes);
    last = there ? last : Vector{} + row[0];
    Vector highest = at(row) *= scale;
    for (int64_t j = kLanes; j < width; j += kLanes) {
      const Vector x = at(row + j) *= scale;
      highest = x > highest ? x : highest;
    }
    most[i] = largest(highest);
    if (kSafe && most[i] == -__builtin_inff()) most[i] = 0.0f;
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* const row = matrix + i * width;
    for (int64_t j = 0; j < width; j += kLanes) at(row + j) = exponential(at(row + j) - most[i]);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* const row = matrix + i * width;
    Vector& last = at(row + width - kLanes);
    last = there ? last : Vector{};
    Vector sum = Vector{};
    for (int64_t j = 0; j < width; j += kLanes) sum += at(row + j);
    const float all = total(sum), one = kSafe && all == 0.0f ? 0.0f : 1.0f / all;
    for (int64_t j = 0; j < width; j += kLanes) at(row + j) *= one;
  }
}

// room.a = the attention weights before dropout, (queries, padded keys), of the keys in room.kt.
static inline void weigh(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys;
  multiply<false>(h.queries, {h.q.data, h.q.step}, h.dim, room.kt, wide, {room.a, wide}, wide);
  const bool covered = h.bias.data != nullptr || h.filled.data != nullptr;
  if (covered) cover(h, room.a);
  const float scale = covered ? 1.0f : h.scale;
  if (h.safe)
    softmax<true>(room.a, h.queries, h.keys, wide, scale, room.most);
  else
    softmax<false>(room.a, h.queries, h.keys, wide, scale, room.most);
}

// into = matrix, (queries, padded keys), times the noise.
static inline void drop(const Head& h, const float* matrix, float* into) {
  for (int64_t i = 0; i < h.queries; ++i)
    for (int64_t j = 0; j < h.padded_keys; j += kLanes) {
      const int64_t e = i * h.padded_keys + j;
      at(into + e) = at(matrix + e) * load(h.noise + i * h.keys + j, h.keys - j);
    }
}

// function(head, more) for each block of queries; `more`: for all but the first.
template <class Function>
static inline void each_block(const Head& h, const Function& function) {
  if (h.queries <= h.block) return function(h, false);
  const int64_t blocks = (h.queries + h.block - 1) / h.block;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = h.queries * i / blocks;
    Head part = h;
    part.queries = h.queries * (i + 1) / blocks - first;
    for (Rows* rows : {&part.q, &part.out, &part.dq, &part.bias, &part.filled, &part.dbias})
      if (rows->data != nullptr) rows->data += first * rows->step;
    if (h.noise != nullptr) part.noise += first * h.keys;
    if (h.weights != nullptr) part.weights += first * h.keys;
    function(part, i > 0);
  }
}

static void forward(const Head& whole, const Room& room) {
  const int64_t wide = whole.padded_keys, deep = whole.padded_values;
  transpose(whole.k, whole.keys, whole.dim, wide, room.kt);
  pad(whole.v, whole.keys, whole.values, deep, room.v);
  each_block(whole, [&](const Head& h, bool) {
    weigh(h, room);
    if (h.weights != nullptr)
      for (int64_t i = 0; i < h.queries; ++i)
        for (int64_t j = 0; j < wide; j += kLanes)
          store(h.weights + i * h.keys + j, h.keys - j, at(room.a + i * wide + j));
    if (h.noise != nullptr) drop(h, room.a, room.a);
    multiply<false>(h.queries, {room.a, wide}, h.keys, room.v, deep, h.out, h.values);
  });
}

// room.a = the gradient of the scores, of the weights in room.a and their gradient in room.da.
static inline void through_softmax(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys;
  for (int64_t i = 0; i < h.queries; ++i) {
    float *const a = room.a + i * wide, *const da = room.da + i * wide;
    Vector sum = Vector{};
    for (int64_t j = 0; j < wide; j += kLanes) sum += at(a + j) * at(da + j);
    const float mean = total(sum);
    for (int64_t j = 0; j < wide; j += kLanes) at(a + j) *= (at(da + j) - mean) * h.scale;
  }
}

// The same, 0 where `filled`, and as it is before the scale to `dbias`.
static inline void through_masks(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys;
  for (int64_t i = 0; i < h.queries; ++i) {
    float *const a = room.a + i * wide, *const da = room.da + i * wide;
    Vector sum = Vector{};
    for (int64_t j = 0; j < wide; j += kLanes) sum += at(a + j) * at(da + j);
    const float mean = total(sum);
    for (int64_t j = 0; j < wide; j += kLanes) {
      Vector ds = at(a + j) * (at(da + j) - mean);
      if (h.filled.data != nullptr) {
        const Vector set = load(h.filled.data + i * h.filled.step + j, h.keys - j);
        ds = set != 0.0f ? Vector{} : ds;
      }
      if (h.dbias.data != nullptr) store(h.dbias.data + i * h.dbias.step + j, h.keys - j, ds);
      at(a + j) = ds * h.scale;
    }
  }
}

static void backward(const Head& whole, const Room& room) {
  const int64_t wide = whole.padded_keys, deep = whole.padded_values, padded = whole.padded_dim;
  transpose(whole.k, whole.keys, whole.dim, wide, room.kt);
  transpose(whole.v, whole.keys, whole.values, wide, room.vt);
  pad(whole.k, whole.keys, whole.dim, padded, room.k);
  each_block(whole, [&](const Head& h, bool more) {
    weigh(h, room);
    pad(h.q, h.queries, h.dim, padded, room.q);
    pad(h.out, h.queries, h.values, deep, room.grad);
    multiply<false>(h.queries, {room.grad, deep}, h.values, room.vt, wide, {room.da, wide}, wide);
    const float* summed = room.a;
    if (h.noise != nullptr) {
      drop(h, room.da, room.da);
      drop(h, room.a, room.dropped);
      summed = room.dropped;
    }
    multiply<true>(h.keys, {summed, wide, more}, h.queries, room.grad, deep, h.dv, h.values);
    if (h.weights != nullptr)
      for (int64_t i = 0; i < h.queries; ++i)
        for (int64_t j = 0; j < wide; j += kLanes)
          at(room.da + i * wide + j) += load(h.weights + i * h.keys + j, h.keys - j);
    if (h.filled.data != nullptr || h.dbias.data != nullptr)
      through_masks(h, room);
    else
      through_softmax(h, room);
    multiply<false>(h.queries, {room.a, wide}, h.keys, room.k, padded, h.dq, h.dim);
    multiply<true>(h.keys, {room.a, wide, more}, h.queries, room.q, padded, h.dk, h.dim);
  });
}

}  // namespace recast::attention::RECAST_ISA
