// Batch norm, a block of rows at a time. Included once per instruction set: see each_isa.h. Sums
// are added to what is there; a register holds neighbouring columns. `stride` is that of x; all
// other matrices are contiguous.

namespace recast::batch_norm::RECAST_ISA {

constexpr int64_t kTile = 4 * RECAST_LANES;  // columns whose sums stay in registers

// sum[column] += Σ_row part(row, column).
template <class Part>
static inline void down(int64_t rows, int64_t columns, float* sum, const Part& part) {
  int64_t c = 0;
  for (; c + kTile <= columns; c += kTile) {
    float held[kTile];
    for (int64_t k = 0; k < kTile; ++k) held[k] = sum[c + k];
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < kTile; ++k) held[k] += part(r, c + k);
    for (int64_t k = 0; k < kTile; ++k) sum[c + k] = held[k];
  }
  if (c == columns) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = c; k < columns; ++k) sum[k] += part(r, k);
}

static void sums(const float* x, int64_t stride, int64_t rows, int64_t columns, float* sum) {
  down(rows, columns, sum, [=](int64_t r, int64_t c) { return x[r * stride + c]; });
}

static void squares(const float* x, int64_t stride, const float* mean, int64_t rows,
                    int64_t columns, float* sum) {
  down(rows, columns, sum, [=](int64_t r, int64_t c) {
    const float centred = x[r * stride + c] - mean[c];
    return centred * centred;
  });
}

// out = (x - mean) scale + shift
static void apply(const float* x, int64_t stride, const float* mean, const float* scale,
                  const float* shift, int64_t rows, int64_t columns, float* out) {
  for (int64_t r = 0; r < rows; ++r, x += stride, out += columns)
    for (int64_t c = 0; c < columns; ++c) out[c] = (x[c] - mean[c]) * scale[c] + shift[c];
}

// Sums of the upstream gradient, and of its product with the centred rows.
static void backward_sums(const float* g, const float* x, int64_t stride, const float* mean,
                          int64_t rows, int64_t columns, float* of_bias, float* along) {
  down(rows, columns, of_bias, [=](int64_t r, int64_t c) { return g[r * columns + c]; });
  down(rows, columns, along,
       [=](int64_t r, int64_t c) { return g[r * columns + c] * (x[r * stride + c] - mean[c]); });
}

// dx = scale (g - shift - (x - mean) slope)
static void backward_apply(const float* g, const float* x, int64_t stride, const float* mean,
                           const float* scale, const float* shift, const float* slope, int64_t rows,
                           int64_t columns, float* out) {
  for (int64_t r = 0; r < rows; ++r, g += columns, x += stride, out += columns)
    for (int64_t c = 0; c < columns; ++c)
      out[c] = scale[c] * (g[c] - shift[c] - (x[c] - mean[c]) * slope[c]);
}

}  // namespace recast::batch_norm::RECAST_ISA
