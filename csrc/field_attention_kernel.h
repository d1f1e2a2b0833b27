// Softmax attention of one head of one sample, forward and backward. Included once per instruction
// set: see each_isa.h.
//
// Keys and values lie transposed and padded to whole registers, so that a row of scores is a sum of
// registers. Queries are done in blocks whose weights stay in L1, and each block only with the keys
// that its masks leave it: half of them, of a long causal attention.

namespace recast::attention::RECAST_ISA {

#include "parts.h"
#include "transpose8.h"
#include "vector_exponential.h"
#include "vector_keys.h"
#include "vector_products.h"

constexpr float kInf = __builtin_inff();

// The score of a query i and the keys from j on.
static inline Vector covered(const Head& h, const Vector& product, int64_t i, int64_t j) {
  const int64_t left = h.keys - j;
  Vector x = product * h.scale;
  if (h.bias.data != nullptr) x += load(h.bias.data + i * h.bias.step + j, left);
  if (h.filled.data == nullptr) return x;
  const Vector set = load(h.filled.data + i * h.filled.step + j, left);
  return set != 0.0f ? Vector{} + h.fill : x;
}

// Each row of room.a, of products, becomes e^(score - highest score), zero in its padding, and
// room.parts[i] what makes its sum 1. If `kSafe`, a row of -inf becomes zeros instead of NaN.
// Returns the lowest of the rows' highest scores, NaN if a row is NaN. Without `kScored` a score is
// its product times h.scale, which must be above 0.
template <bool kScored, bool kSafe>
static inline float softmax(const Head& h, const Room& room) {
  constexpr int64_t kTogether = 8;  // rows that hide each other's latency, and stay in L1
  const int64_t end = h.padded_keys, last = end - kLanes;
  Bits there;  // lanes in use in the last register of a row
  for (int k = 0; k < kLanes; ++k) there[k] = last + k < h.keys ? -1 : 0;
  // After the subtraction: fused with it, the highest score would be e^(how far it was rounded).
  const float scale = kScored ? 1.0f : h.scale;
  float lowest = kInf, most[kTogether];
  for (int64_t start = 0; start < h.queries; start += kTogether) {
    const int64_t stop = start + kTogether < h.queries ? start + kTogether : h.queries;
    for (int64_t i = start; i < stop; ++i) {
      float* const row = room.a + i * h.wide;
      Vector highest = Vector{} - kInf;
      for (int64_t j = 0; j < last; j += kLanes) {
        Vector& x = at(row + j);
        if (kScored) x = covered(h, x, i, j);
        highest = x > highest ? x : highest;
      }
      Vector& x = at(row + last);
      if (kScored) x = covered(h, x, i, last);
      highest = (there & (x > highest)) ? x : highest;
      most[i - start] = largest(highest);
    }
    for (int64_t i = start; i < stop; ++i) {
      float& top = most[i - start];
      lowest = top < lowest ? top : lowest;
      if (kSafe && top == -kInf) top = 0.0f;
      float* const row = room.a + i * h.wide;
      Vector sum = Vector{};
      for (int64_t j = 0; j < last; j += kLanes)
        sum += at(row + j) = exponential((at(row + j) - top) * scale);
      const Vector rest = exponential((at(row + last) - top) * scale);
      sum += at(row + last) = there ? rest : Vector{};
      const float all = total(sum);
      if (all != all) lowest = all;
      room.parts[i] = kSafe && all == 0.0f ? 0.0f : 1.0f / all;
    }
  }
  return lowest;
}

// The keys in use of one block of queries, and the memory that begins with the first of them.
struct Part {
  Head head;
  Room room;
};

// room.a = the attention weights before dropout, as softmax leaves them. Returns as softmax.
static inline float weigh(const Head& h, const Room& room) {
  multiply<false>(h.queries, {h.q.data, h.q.step}, h.dim, room.kt, h.wide, {room.a, h.wide},
                  h.padded_keys);
  const bool scored = h.bias.data != nullptr || h.filled.data != nullptr || !(h.scale > 0.0f);
  if (!scored) return h.safe ? softmax<false, true>(h, room) : softmax<false, false>(h, room);
  return h.safe ? softmax<true, true>(h, room) : softmax<true, false>(h, room);
}

// A mask that leaves out a place adds no more than this.
constexpr float kLeftOut = -9000.0f;

// What is known of a head before its blocks are done.
struct Known {
  bool some_left_out;  // whether keys may be left out
  float largest;       // no product of a query and a key is larger
};

// All must be finite: what is left out would be multiplied by zero, which makes NaN of inf.
static inline Known know(const Head& h, bool backward) {
  const bool masked = h.bias.data != nullptr || h.filled.data != nullptr;
  if (!masked || h.weights != nullptr || h.dbias.data != nullptr) return {false, 0.0f};
  const float product = magnitude_of(h.q, h.queries, h.dim) * magnitude_of(h.k, h.keys, h.dim);
  float largest = product * static_cast<float>(h.dim) * (h.scale < 0.0f ? -h.scale : h.scale);
  float values = magnitude_of(h.v, h.keys, h.values);
  if (backward) values *= magnitude_of(h.out, h.queries, h.values);
  return {largest < kFar && values < kFar, largest};
}

// The block with its weights, of the keys that are not left out for all of its queries: by numbers
// so low that their weights would be zero.
static inline Part weighed(const Head& h, const Room& room, const Known& known) {
  if (known.some_left_out) {
    bool exactly = true;  // -inf, which no score changes
    const bool same = (h.bias.data == nullptr || h.bias.step == 0) &&
                      (h.filled.data == nullptr || h.filled.step == 0);
    Bits behind;  // lanes after the last key
    for (int k = 0; k < kLanes; ++k) behind[k] = h.padded_keys - kLanes + k < h.keys ? 0 : -1;
    const auto left_out = [&](int64_t i, int64_t j) {
      const int64_t left = h.keys - j;
      Vector x = Vector{};
      if (h.bias.data != nullptr) x = load(h.bias.data + i * h.bias.step + j, left);
      if (h.filled.data != nullptr) {
        const Vector set = load(h.filled.data + i * h.filled.step + j, left);
        x = set != 0.0f ? Vector{} + h.fill : x;
      }
      if (left < kLanes) x = behind ? Vector{} - kInf : x;
      if (!none_above(x, kLeftOut)) return false;
      exactly = exactly && none_above(x, -kInf);
      return true;
    };
    const Live live = live_keys(same ? 1 : h.queries, h.keys, left_out);
    if (live.first > 0 || live.end < h.keys) {
      Part part = {h, room};
      part.head.keys = live.end - live.first;
      part.head.padded_keys = (part.head.keys + kLanes - 1) / kLanes * kLanes;
      part.head.k.data += live.first * h.k.step, part.head.v.data += live.first * h.v.step;
      if (h.bias.data != nullptr) part.head.bias.data += live.first;
      if (h.filled.data != nullptr) part.head.filled.data += live.first;
      if (h.noise != nullptr) part.head.noise += live.first;
      if (h.dk.data != nullptr) part.head.dk.data += live.first * h.dk.step;
      if (h.dv.data != nullptr) part.head.dv.data += live.first * h.dv.step;
      part.room.kt += live.first, part.room.vt += live.first;
      part.room.k += live.first * h.padded_dim, part.room.v += live.first * h.padded_values;
      const float lowest = weigh(part.head, part.room);
      // e^-104 is zero in float32. A row of NaN has NaN for all keys.
      if (exactly ? lowest == lowest : lowest > kLeftOut + known.largest + 104.0f) return part;
    }
  }
  weigh(h, room);
  return {h, room};
}

// room.a = weights whose sums are 1.
static inline void normalise(const Head& h, const Room& room) {
  for (int64_t i = 0; i < h.queries; ++i)
    for (int64_t j = 0; j < h.padded_keys; j += kLanes)
      at(room.a + i * h.wide + j) *= room.parts[i];
}

// into = matrix, (queries, wide), times the noise.
static inline void drop(const Head& h, const float* matrix, float* into) {
  for (int64_t i = 0; i < h.queries; ++i)
    for (int64_t j = 0; j < h.padded_keys; j += kLanes) {
      const int64_t e = i * h.wide + j;
      at(into + e) = at(matrix + e) * load(h.noise + i * h.row + j, h.keys - j);
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
    if (h.noise != nullptr) part.noise += first * h.row;
    if (h.weights != nullptr) part.weights += first * h.row;
    function(part, i > 0);
  }
}

static void forward(const Head& whole, const Room& room) {
  const int64_t deep = whole.padded_values;
  const Known known = know(whole, false);
  transpose(whole.k, whole.keys, whole.dim, whole.wide, room.kt);
  pad(whole.v, whole.keys, whole.values, deep, room.v);
  each_block(whole, [&](const Head& block, bool) {
    const Part part = weighed(block, room, known);
    const Head& h = part.head;
    if (h.weights != nullptr) {
      normalise(h, room);
      for (int64_t i = 0; i < h.queries; ++i)
        for (int64_t j = 0; j < h.padded_keys; j += kLanes)
          store(h.weights + i * h.row + j, h.keys - j, at(room.a + i * h.wide + j));
    }
    if (h.noise != nullptr) drop(h, room.a, room.a);
    multiply<false>(h.queries, {room.a, h.wide}, h.keys, part.room.v, deep, h.out, h.values);
    if (h.weights != nullptr) return;
    // Rows of the result are shorter than those of the weights.
    for (int64_t i = 0; i < h.queries; ++i)
      for (int64_t j = 0; j < h.values; j += kLanes) {
        float* const out = h.out.data + i * h.out.step + j;
        store(out, h.values - j, load(out, h.values - j) * room.parts[i]);
      }
  });
}

// room.a = the gradient of the scores, of the weights in room.a and their gradient in room.da.
static inline void through_softmax(const Head& h, const Room& room) {
  for (int64_t i = 0; i < h.queries; ++i) {
    float *const a = room.a + i * h.wide, *const da = room.da + i * h.wide;
    Vector sum = Vector{};
    for (int64_t j = 0; j < h.padded_keys; j += kLanes) sum += at(a + j) * at(da + j);
    const float mean = total(sum);
    for (int64_t j = 0; j < h.padded_keys; j += kLanes) at(a + j) *= (at(da + j) - mean) * h.scale;
  }
}

// The same, 0 where `filled`, and as it is before the scale to `dbias`.
static inline void through_masks(const Head& h, const Room& room) {
  for (int64_t i = 0; i < h.queries; ++i) {
    float *const a = room.a + i * h.wide, *const da = room.da + i * h.wide;
    Vector sum = Vector{};
    for (int64_t j = 0; j < h.padded_keys; j += kLanes) sum += at(a + j) * at(da + j);
    const float mean = total(sum);
    for (int64_t j = 0; j < h.padded_keys; j += kLanes) {
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
  const int64_t wide = whole.wide, deep = whole.padded_values, padded = whole.padded_dim;
  const Known known = know(whole, true);
  transpose(whole.k, whole.keys, whole.dim, wide, room.kt);
  transpose(whole.v, whole.keys, whole.values, wide, room.vt);
  pad(whole.k, whole.keys, whole.dim, padded, room.k);
  if (known.some_left_out) {  // a block adds to the gradients of its own keys only
    clear(whole.dk, whole.keys, whole.dim);
    clear(whole.dv, whole.keys, whole.values);
  }
  each_block(whole, [&](const Head& block, bool later) {
    const bool more = later || known.some_left_out;
    const Part part = weighed(block, room, known);
    const Head& h = part.head;
    normalise(h, room);
    pad(h.q, h.queries, h.dim, padded, room.q);
    pad(h.out, h.queries, h.values, deep, room.grad);
    multiply<false>(h.queries, {room.grad, deep}, h.values, part.room.vt, wide, {room.da, wide},
                    h.padded_keys);
    const float* summed = room.a;
    if (h.noise != nullptr) {
      drop(h, room.da, room.da);
      drop(h, room.a, room.dropped);
      summed = room.dropped;
    }
    multiply<true>(h.keys, {summed, wide, more}, h.queries, room.grad, deep, h.dv, h.values);
    if (h.weights != nullptr)
      for (int64_t i = 0; i < h.queries; ++i)
        for (int64_t j = 0; j < h.padded_keys; j += kLanes)
          at(room.da + i * wide + j) += load(h.weights + i * h.row + j, h.keys - j);
    if (h.filled.data != nullptr || h.dbias.data != nullptr)
      through_masks(h, room);
    else
      through_softmax(h, room);
    multiply<false>(h.queries, {room.a, wide}, h.keys, part.room.k, padded, h.dq, h.dim);
    multiply<true>(h.keys, {room.a, wide, more}, h.queries, room.q, padded, h.dk, h.dim);
  });
}

}  // namespace recast::attention::RECAST_ISA
