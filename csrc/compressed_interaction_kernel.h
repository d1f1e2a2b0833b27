// Compressed interaction on a block of columns, forward and backward. Included once per instruction
// set: see each_isa.h.
//
// A column is one (sample, d). Operands are matrices with rows of `columns` floats, a multiple of
// kStep; the products x[h] * y[m] are made in registers where they are needed, and never stored.

namespace recast::compressed::RECAST_ISA {

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));

// Rows of accumulators, chosen to fill the registers: 32 with AVX-512, else 16.
constexpr int kOut = kLanes == 16 ? 8 : 4;    // outputs at once in forward, two registers each
constexpr int kHeld = kLanes == 16 ? 16 : 8;  // upstream rows held by `of_inputs`
constexpr int kPairs = kLanes == 16 ? 8 : 4;  // its products at once
constexpr int kTall = kLanes == 16 ? 4 : 2;   // outputs x products at once in `of_weight`
constexpr int kLong = kLanes == 16 ? 6 : 4;

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

static inline float sum(const Vector& v) {
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// out[o][c ..] = bias[o] + Σ_{h,m} weight[h M + m][o] x[h][c ..] y[m][c ..], for kOut outputs.
static inline void forward_block(const Block& block, const float* weight, const float* bias,
                                 int64_t c, Vector (&total)[kOut][2]) {
  for (int r = 0; r < kOut; ++r) total[r][0] = total[r][1] = Vector{} + bias[r];
  for (int64_t h = 0; h < block.left; ++h) {
    const Vector x[2] = {at(block.x + h * block.columns + c),
                         at(block.x + h * block.columns + c + kLanes)};
    const float* y = block.y + c;
    const float* w = weight + h * block.right * block.stride;
    for (int64_t m = 0; m < block.right; ++m, y += block.columns, w += block.stride) {
      const Vector z[2] = {x[0] * at(y), x[1] * at(y + kLanes)};
      for (int r = 0; r < kOut; ++r)
        for (int v = 0; v < 2; ++v) total[r][v] += w[r] * z[v];
    }
  }
}

// block.out (outputs, columns); weight (left * right, stride), outputs padded with zeros to stride.
static void forward(const Block& block, const float* weight, const float* bias, bool relu) {
  for (int64_t c = 0; c < block.columns; c += 2 * kLanes)
    for (int64_t o = 0; o < block.outputs; o += kOut) {
      Vector total[kOut][2];
      forward_block(block, weight + o, bias + o, c, total);
      const int64_t last = block.outputs - o < kOut ? block.outputs - o : kOut;
      for (int64_t r = 0; r < last; ++r)
        for (int v = 0; v < 2; ++v) {
          const Vector value = total[r][v];
          float* const to = block.out + (o + r) * block.columns + c + v * kLanes;
          // NaN stays NaN.
          at(to) = relu ? (value < 0.0f ? Vector{} : value) : value;
        }
    }
}

// P products at once: dz = Σ_r w[r] g[r], then dx += dz y and dy += dz x.
template <int P>
static inline void of_products(const Block& block, const Vector (&g)[kHeld], const float* w,
                               int64_t m, int64_t c, const Vector& x, Vector& dx) {
  Vector dz[P];
  for (int p = 0; p < P; ++p) dz[p] = w[p * block.stride] * g[0];
  for (int r = 1; r < kHeld; ++r)
    for (int p = 0; p < P; ++p) dz[p] += w[p * block.stride + r] * g[r];
  for (int p = 0; p < P; ++p) {
    dx += dz[p] * at(block.y + (m + p) * block.columns + c);
    at(block.dy + (m + p) * block.columns + c) += dz[p] * x;
  }
}

// block.dx, block.dy += the gradients of x and y, from the upstream gradient block.out.
static void of_inputs(const Block& block, const float* weight) {
  for (int64_t c = 0; c < block.columns; c += kLanes)
    for (int64_t o = 0; o < block.outputs; o += kHeld) {
      Vector g[kHeld];
      for (int r = 0; r < kHeld; ++r)  // weights past the last output are zero
        g[r] = o + r < block.outputs ? at(block.out + (o + r) * block.columns + c) : Vector{};
      for (int64_t h = 0; h < block.left; ++h) {
        const Vector x = at(block.x + h * block.columns + c);
        Vector dx = at(block.dx + h * block.columns + c);
        const float* w = weight + h * block.right * block.stride + o;
        int64_t m = 0;
        for (; m + kPairs <= block.right; m += kPairs, w += kPairs * block.stride)
          of_products<kPairs>(block, g, w, m, c, x, dx);
        for (; m + 2 <= block.right; m += 2, w += 2 * block.stride)
          of_products<2>(block, g, w, m, c, x, dx);
        for (; m < block.right; ++m, w += block.stride) of_products<1>(block, g, w, m, c, x, dx);
        at(block.dx + h * block.columns + c) = dx;
      }
    }
}

// dw[o][h M + m] += Σ_c out[o][c] x[h][c] y[m][c], for T outputs and L products.
template <int T, int L>
static inline void of_weight_block(const Block& block, int64_t o, int64_t h, int64_t m, float* dw) {
  Vector total[T][L] = {};
  const float *x = block.x + h * block.columns, *y = block.y + m * block.columns;
  const float* g = block.out + o * block.columns;
  for (int64_t c = 0; c < block.columns; c += kLanes) {
    Vector z[L];
    for (int l = 0; l < L; ++l) z[l] = at(x + c) * at(y + l * block.columns + c);
    for (int t = 0; t < T; ++t) {
      const Vector upstream = at(g + t * block.columns + c);
      for (int l = 0; l < L; ++l) total[t][l] += upstream * z[l];
    }
  }
  for (int t = 0; t < T; ++t)
    for (int l = 0; l < L; ++l)
      dw[(o + t) * block.left * block.right + h * block.right + m + l] += sum(total[t][l]);
}

template <int T>
static inline void of_weight_rows(const Block& block, int64_t o, float* dw) {
  for (int64_t h = 0; h < block.left; ++h) {
    int64_t m = 0;
    for (; m + kLong <= block.right; m += kLong) of_weight_block<T, kLong>(block, o, h, m, dw);
    for (; m < block.right; ++m) of_weight_block<T, 1>(block, o, h, m, dw);
  }
}

// dw (outputs, left * right) += the gradient of the weight, db (outputs,) += that of the bias.
static void of_weight(const Block& block, float* dw, float* db) {
  int64_t o = 0;
  for (; o + kTall <= block.outputs; o += kTall) of_weight_rows<kTall>(block, o, dw);
  for (; o < block.outputs; ++o) of_weight_rows<1>(block, o, dw);
  for (o = 0; o < block.outputs; ++o) {
    Vector total{};
    for (int64_t c = 0; c < block.columns; c += kLanes)
      total += at(block.out + o * block.columns + c);
    db[o] += sum(total);
  }
}

}  // namespace recast::compressed::RECAST_ISA
