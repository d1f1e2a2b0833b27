// Softmax attention of one head of one sample, forward and backward. Included once per instruction
// set: see each_isa.h.
//
// Keys and values lie transposed and padded to whole registers, so that a row of scores is a sum of
// registers. Queries are done in blocks whose weights stay in L1.

namespace recast::attention::RECAST_ISA {

#include "parts.h"
#include "transpose8.h"

// e^x for x <= 0, to 2 units in the last place; 0 below the smallest normal number, NaN for NaN.
static inline Vector exponential(const Vector& x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Vector shifted = x * 1.44269504088896341f + kMagic;
  const Vector n = shifted - kMagic;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector y = Vector{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Bits power = (*reinterpret_cast<const Bits*>(&shifted) - 0x4B400000 + 127) << 23;
  const Vector whole = y * *reinterpret_cast<const Vector*>(&power);
  const Vector zero = Vector{};
  return x < -87.0f ? zero : whole;
}

// into[c * width + j] = rows[j][c]; the padding of its rows is zero and stays so.
static inline void transpose(const Rows& rows, int64_t count, int64_t dim, int64_t width,
                             float* into) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    const float* eight[8];
    for (int i = 0; i < 8; ++i) eight[i] = rows.data + (j + i) * rows.step;
    int64_t c = 0;
    for (; c + 8 <= dim; c += 8) transpose8(eight, c, into + c * width + j, width);
    for (; c < dim; ++c)
      for (int i = 0; i < 8; ++i) into[c * width + j + i] = eight[i][c];
  }
  for (; j < count; ++j)
    for (int64_t c = 0; c < dim; ++c) into[c * width + j] = rows.data[j * rows.step + c];
}

// into[j * width + c] = rows[j][c], and zeros after it.
static inline void pad(const Rows& rows, int64_t count, int64_t dim, int64_t width, float* into) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t c = 0; c < width; c += kLanes)
      at(into + j * width + c) = load(rows.data + j * rows.step + c, dim - c);
}

// The left matrix of a product: x(i, k) is at data + i * step + k, or transposed (`kTurned`) at
// data + k * step + i. A transposed one may add to what is there, if `more`.
struct Left {
  const float* data;
  int64_t step;
  bool more = false;
};

// out[i][j] = Σ_k x(i, k) matrix[k * width + j], for kRows rows and kWide registers of columns, of
// which `left` columns are written.
template <bool kTurned, int kRows, int kWide>
static inline void tile(const Left& x, int64_t inner, const float* matrix, int64_t width,
                        const Rows& out, int64_t left) {
  Vector sum[kRows][kWide];
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kWide; ++v) sum[i][v] = Vector{};
  if (kTurned && x.more)
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kWide; ++v)
        sum[i][v] = load(out.data + i * out.step + v * kLanes, left - v * kLanes);
  for (int64_t k = 0; k < inner; ++k) {
    const float* const from = x.data + (kTurned ? k * x.step : k);
    Vector right[kWide];
    for (int v = 0; v < kWide; ++v) right[v] = at(matrix + k * width + v * kLanes);
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kWide; ++v) sum[i][v] += from[kTurned ? i : i * x.step] * right[v];
  }
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kWide; ++v)
      store(out.data + i * out.step + v * kLanes, left - v * kLanes, sum[i][v]);
}

template <bool kTurned, int kRows, int kWide>
static void down(int64_t rows, const Left& x, int64_t inner, const float* matrix, int64_t width,
                 const Rows& out, int64_t left) {
  if (rows == kRows) return tile<kTurned, kRows, kWide>(x, inner, matrix, width, out, left);
  if constexpr (kRows > 1)
    return down<kTurned, kRows - 1, kWide>(rows, x, inner, matrix, width, out, left);
}

// All rows, in parts of even height of at most kMost: a part of one row would be one chain of sums
// that wait for each other.
template <bool kTurned, int kMost, int kWide>
static inline void across(int64_t rows, const Left& x, int64_t inner, const float* matrix,
                          int64_t width, const Rows& out, int64_t left) {
  const int64_t parts = (rows + kMost - 1) / kMost;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t i = rows * p / parts;
    down<kTurned, kMost, kWide>(rows * (p + 1) / parts - i,
                                {x.data + (kTurned ? i : i * x.step), x.step, x.more}, inner,
                                matrix, width, {out.data + i * out.step, out.step}, left);
  }
}

// out[i][j] = Σ_k x(i, k) matrix[k * width + j] for j < columns; `width` is in whole registers.
template <bool kTurned>
static inline void multiply(int64_t rows, const Left& x, int64_t inner, const float* matrix,
                            int64_t width, const Rows& out, int64_t columns) {
  for (int64_t j = 0; j < columns;) {
    const Rows to = {out.data + j, out.step};
    const int64_t left = columns - j;
    if (left > 2 * kLanes)
      across<kTurned, 4, 3>(rows, x, inner, matrix + j, width, to, left), j += 3 * kLanes;
    else if (left > kLanes)
      across<kTurned, 6, 2>(rows, x, inner, matrix + j, width, to, left), j += 2 * kLanes;
    else
      across<kTurned, 8, 1>(rows, x, inner, matrix + j, width, to, left), j += kLanes;
  }
}

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
