// Softmax attention of one head of one sample, forward and backward. Included once per instruction
// set: see each_isa.h.
//
// All of a head stays in L1: keys and values lie transposed and padded to whole registers, so that
// a row of scores is a sum of registers.

namespace recast::attention::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

static inline float total(const Vector& v) {
  float sum[kLanes];
  at(sum) = v;
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int k = 0; k < n; ++k) sum[k] += sum[k + n];
  return sum[0];
}

static inline float largest(const Vector& v) {
  float most[kLanes];
  at(most) = v;
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int k = 0; k < n; ++k) most[k] = most[k] > most[k + n] ? most[k] : most[k + n];
  return most[0];
}

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

// Whole registers by hand: a compiler's own loop asks first, at each row, what overlaps.
static inline void copy(const float* from, int64_t count, float* to) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) at(to + c) = at(from + c);
  for (; c < count; ++c) to[c] = from[c];
}

static inline void multiply(const float* x, const float* y, int64_t count, float* to) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) at(to + c) = at(x + c) * at(y + c);
  for (; c < count; ++c) to[c] = x[c] * y[c];
}

// into[c * width + j] = factor * rows[j][c]; what pads a row of it is zero and stays so.
static inline void transpose(const Rows& rows, int64_t count, int64_t dim, int64_t width,
                             float factor, float* into) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t c = 0; c < dim; ++c) into[c * width + j] = factor * rows.data[j * rows.step + c];
}

// into[j * width + c] = rows[j][c]; what pads a row of it is zero and stays so.
static inline void pad(const Rows& rows, int64_t count, int64_t dim, int64_t width, float* into) {
  for (int64_t j = 0; j < count; ++j) copy(rows.data + j * rows.step, dim, into + j * width);
}

// out[j ..] = Σ_c x[c] * matrix[c * width + j], for a whole row.
static inline void times(const float* x, const float* matrix, int64_t inner, int64_t width,
                         float* out) {
  int64_t j = 0;
  for (; j + 3 * kLanes <= width; j += 3 * kLanes) {
    Vector a = Vector{}, b = Vector{}, c = Vector{};
    for (int64_t k = 0; k < inner; ++k) {
      const float* row = matrix + k * width + j;
      a += x[k] * at(row), b += x[k] * at(row + kLanes), c += x[k] * at(row + 2 * kLanes);
    }
    at(out + j) = a, at(out + j + kLanes) = b, at(out + j + 2 * kLanes) = c;
  }
  for (; j < width; j += kLanes) {
    Vector a = Vector{}, b = Vector{};
    int64_t k = 0;
    for (; k + 2 <= inner; k += 2) {
      a += x[k] * at(matrix + k * width + j);
      b += x[k + 1] * at(matrix + (k + 1) * width + j);
    }
    if (k < inner) a += x[k] * at(matrix + k * width + j);
    at(out + j) = a + b;
  }
}

// Each row = softmax(row) over its first `count` elements; zero behind them. One step at a time for
// all rows: what a row waits for, others fill.
static inline void softmax(float* matrix, int64_t rows, int64_t count, int64_t width, float* most) {
  Bits there;  // in the last register of a row
  for (int k = 0; k < kLanes; ++k) there[k] = width - kLanes + k < count ? -1 : 0;
  for (int64_t i = 0; i < rows; ++i) {
    float* const row = matrix + i * width;
    Vector& last = at(row + width - kLanes);
    last = there ? last : Vector{} + row[0];
    Vector highest = at(row);
    for (int64_t j = kLanes; j < width; j += kLanes) {
      const Vector x = at(row + j);
      highest = x > highest ? x : highest;
    }
    most[i] = largest(highest);
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
    const float one = 1.0f / total(sum);
    for (int64_t j = 0; j < width; j += kLanes) at(row + j) *= one;
  }
}

// What the values are summed by, before dropout: room.a, (queries, padded keys).
static inline void weigh(const Head& h, const Room& room) {
  transpose(h.k, h.keys, h.dim, h.padded_keys, h.scale, room.kt);
  for (int64_t i = 0; i < h.queries; ++i)
    times(h.q.data + i * h.q.step, room.kt, h.dim, h.padded_keys, room.a + i * h.padded_keys);
  softmax(room.a, h.queries, h.keys, h.padded_keys, room.most);
}

// Each row of `matrix` (queries, padded keys) times the noise.
static inline void drop(const Head& h, float* matrix) {
  for (int64_t i = 0; i < h.queries; ++i)
    for (int64_t j = 0; j < h.keys; ++j) matrix[i * h.padded_keys + j] *= h.noise[i * h.keys + j];
}

static void forward(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys, deep = h.padded_values;
  weigh(h, room);
  pad(h.v, h.keys, h.values, deep, room.v);
  if (h.weights != nullptr)
    for (int64_t i = 0; i < h.queries; ++i) copy(room.a + i * wide, h.keys, h.weights + i * h.keys);
  if (h.noise != nullptr) drop(h, room.a);
  for (int64_t i = 0; i < h.queries; ++i) {
    times(room.a + i * wide, room.v, h.keys, deep, room.row);
    copy(room.row, h.values, h.out.data + i * h.out.step);
  }
}

// sums[j ..] += x[j] * row, for each key j.
static inline void outer(const float* x, const float* row, int64_t count, int64_t width,
                         float* sums) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t c = 0; c < width; c += kLanes) at(sums + j * width + c) += x[j] * at(row + c);
}

static void backward(const Head& h, const Room& room) {
  const int64_t wide = h.padded_keys, deep = h.padded_values, padded = h.padded_dim;
  weigh(h, room);
  transpose(h.v, h.keys, h.values, wide, 1.0f, room.vt);
  pad(h.k, h.keys, h.dim, padded, room.k);
  pad(h.q, h.queries, h.dim, padded, room.q);
  pad(h.out, h.queries, h.values, deep, room.grad);
  for (int64_t e = 0; e < h.keys * padded; ++e) room.dk[e] = 0.0f;
  for (int64_t e = 0; e < h.keys * deep; ++e) room.dv[e] = 0.0f;
  for (int64_t i = 0; i < h.queries; ++i)
    times(room.grad + i * deep, room.vt, h.values, wide, room.da + i * wide);
  if (h.noise == nullptr) {
    for (int64_t i = 0; i < h.queries; ++i)
      outer(room.a + i * wide, room.grad + i * deep, h.keys, deep, room.dv);
  } else {
    drop(h, room.da);
    for (int64_t i = 0; i < h.queries; ++i) {
      multiply(room.a + i * wide, h.noise + i * h.keys, h.keys, room.row);
      outer(room.row, room.grad + i * deep, h.keys, deep, room.dv);
    }
  }
  if (h.weights != nullptr)
    for (int64_t i = 0; i < h.queries; ++i)
      for (int64_t j = 0; j < h.keys; ++j) room.da[i * wide + j] += h.weights[i * h.keys + j];
  for (int64_t i = 0; i < h.queries; ++i) {
    float *const a = room.a + i * wide, *const da = room.da + i * wide;
    Vector sum = Vector{};
    for (int64_t j = 0; j < wide; j += kLanes) sum += at(a + j) * at(da + j);
    const float mean = total(sum);
    for (int64_t j = 0; j < wide; j += kLanes) at(a + j) *= (at(da + j) - mean) * h.scale;
  }
  for (int64_t i = 0; i < h.queries; ++i) {
    times(room.a + i * wide, room.k, h.keys, padded, room.row);
    copy(room.row, h.dim, h.dq.data + i * h.dq.step);
  }
  for (int64_t i = 0; i < h.queries; ++i)
    outer(room.a + i * wide, room.q + i * padded, h.keys, padded, room.dk);
  for (int64_t j = 0; j < h.keys; ++j) {
    copy(room.dk + j * padded, h.dim, h.dk.data + j * h.dk.step);
    copy(room.dv + j * deep, h.values, h.dv.data + j * h.dv.step);
  }
}

}  // namespace recast::attention::RECAST_ISA
