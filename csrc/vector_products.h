// Products of the matrices of one head. Included inside the namespace of a kernel, after parts.h
// and transpose8.h, once per instruction set: see each_isa.h. `Rows` are vectors: row j starts at
// data + j * step.

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
  if (left <= (kWide - 1) * kLanes) __builtin_unreachable();  // there are columns in each register
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
    const int64_t left = columns - j, registers = (left + kLanes - 1) / kLanes;
    // Four are two and two: one alone reads more than it multiplies.
    if (registers == 2 || registers == 4)
      across<kTurned, 6, 2>(rows, x, inner, matrix + j, width, to, left), j += 2 * kLanes;
    else if (registers == 1)
      across<kTurned, 8, 1>(rows, x, inner, matrix + j, width, to, left), j += kLanes;
    else
      across<kTurned, 4, 3>(rows, x, inner, matrix + j, width, to, left), j += 3 * kLanes;
  }
}
