// Products of matrices, C = A B, packed and tiled for the caches. Included once per instruction
// set: see each_isa.h.
//
// A tile of C, kTileRows by two registers, stays in registers over a block of the depth; B lies
// packed in panels as wide as a tile, so that each step reads two registers of it and one number
// of each row of A. The terms of an element are added in the order of the depth, whatever the
// tiling, so any split of C over threads gives the same bits.

namespace recast::gemm::RECAST_ISA {

#include "tiles.h"
#include "transpose8.h"

constexpr int kAtOnce = 4;  // panels of B packed together

// into[k * width + r] = from[r * apart + k] for r in [0, count), zero for r in [count, width).
static void pack_across(const float* from, int64_t apart, int64_t count, int64_t depth, int width,
                        float* into) {
  int64_t done = 0;
  for (; done + 8 <= count && done + 8 <= width; done += 8) {
    const float* rows[8];
    for (int r = 0; r < 8; ++r) rows[r] = from + (done + r) * apart;
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) transpose8(rows, k, into + k * width + done, width);
    for (; k < depth; ++k)
      for (int r = 0; r < 8; ++r) into[k * width + done + r] = rows[r][k];
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t r = done; r < count; ++r) into[k * width + r] = from[r * apart + k];
    for (int64_t r = count; r < width; ++r) into[k * width + r] = 0.0f;
  }
}

// into[k * W + r] = from[k * apart + r] for r in [0, count), zero for r in [count, W).
template <int W>
static inline void pack_along(const float* from, int64_t apart, int64_t count, int64_t depth,
                              float* into) {
  if (count == W) {
    for (int64_t k = 0; k < depth; ++k, from += apart, into += W)
      __builtin_memcpy(into, from, W * sizeof(float));
    return;
  }
  for (int64_t k = 0; k < depth; ++k, from += apart, into += W) {
    for (int64_t r = 0; r < count; ++r) into[r] = from[r];
    for (int64_t r = count; r < W; ++r) into[r] = 0.0f;
  }
}

// Packs up to kAtOnce panels, as pack_along<kPanel> does one: longer reads suit the prefetchers.
static void pack_panels(const float* from, int64_t apart, int64_t count, int64_t depth,
                        float* into) {
  if (count < kAtOnce * kPanel) {
    for (int64_t n = 0; n < count; n += kPanel)
      pack_along<kPanel>(from + n, apart, count - n < kPanel ? count - n : kPanel, depth,
                         into + n * depth);
    return;
  }
  for (int64_t k = 0; k < depth; ++k, from += apart)
    for (int j = 0; j < kAtOnce; ++j)
      for (int v = 0; v < 2; ++v)
        at(into + (j * depth + k) * kPanel + v * kLanes) = at(from + j * kPanel + v * kLanes);
}

// Where a tile goes.
struct Place {
  float* c;
  int64_t row;        // floats from one row of C to the next
  int64_t columns;    // of the tile that exist in C
  bool add;           // to what C holds, the sum over the depth so far
  const float* bias;  // for each column; null before the end of the depth
  const float* gate;  // as C: zero where this is not positive; null before the end
  int64_t gate_row;
  bool relu;
};

static inline void finish_edge(const float* totals, int rows, const Place& to) {
  for (int r = 0; r < rows; ++r)
    for (int64_t n = 0; n < to.columns; ++n) {
      float& c = to.c[r * to.row + n];
      float total = totals[r * kPanel + n] + (to.add ? c : 0.0f);
      if (to.bias != nullptr) total += to.bias[n];
      if (to.gate != nullptr && to.gate[r * to.gate_row + n] <= 0.0f) total = 0.0f;
      if (to.relu && total < 0.0f) total = 0.0f;
      c = total;
    }
}

// R rows of A, packed or `a_row` apart, times a panel of B.
template <int R, bool Packed>
static inline void tile(const float* a, int64_t a_row, const float* b, int64_t depth,
                        const Place& to) {
  // C is not in the caches: prefetched now, it is there when the sums are, and no store waits.
  for (int r = 0; r < R; ++r) {
    __builtin_prefetch(to.c + r * to.row);
    __builtin_prefetch(to.c + r * to.row + to.columns - 1);
    if (to.gate != nullptr) __builtin_prefetch(to.gate + r * to.gate_row);
  }
  Vector total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = Vector{};
  for (int64_t k = 0; k < depth; ++k, b += kPanel) {
    const Vector left = at(b), right = at(b + kLanes);
    for (int r = 0; r < R; ++r) {
      const float x = Packed ? a[k * R + r] : a[r * a_row + k];
      total[r][0] += x * left;
      total[r][1] += x * right;
    }
  }
  if (to.columns < kPanel) {
    float totals[R * kPanel];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) at(totals + r * kPanel + v * kLanes) = total[r][v];
    return finish_edge(totals, R, to);
  }
  // One operation after the other, each on the whole tile, which stays in registers.
  if (to.add)
    for (int r = 0; r < R; ++r) {
      total[r][0] += at(to.c + r * to.row);
      total[r][1] += at(to.c + r * to.row + kLanes);
    }
  if (to.bias != nullptr) {
    const Vector left = at(to.bias), right = at(to.bias + kLanes);
    for (int r = 0; r < R; ++r) {
      total[r][0] += left;
      total[r][1] += right;
    }
  }
  if (to.gate != nullptr)
    for (int r = 0; r < R; ++r) {
      const float* gate = to.gate + r * to.gate_row;
      total[r][0] = at(gate) <= 0.0f ? Vector{} : total[r][0];
      total[r][1] = at(gate + kLanes) <= 0.0f ? Vector{} : total[r][1];
    }
  if (to.relu)  // NaN stays, as torch's
    for (int r = 0; r < R; ++r) {
      total[r][0] = total[r][0] < 0.0f ? Vector{} : total[r][0];
      total[r][1] = total[r][1] < 0.0f ? Vector{} : total[r][1];
    }
  for (int r = 0; r < R; ++r) {
    at(to.c + r * to.row) = total[r][0];
    at(to.c + r * to.row + kLanes) = total[r][1];
  }
}

template <bool Packed>
static inline void tile_of(int rows, const float* a, int64_t a_row, const float* b, int64_t depth,
                           const Place& to) {
  switch (rows) {
    case 1:
      return tile<1, Packed>(a, a_row, b, depth, to);
    case 2:
      return tile<2, Packed>(a, a_row, b, depth, to);
    case 3:
      return tile<3, Packed>(a, a_row, b, depth, to);
    case 4:
      return tile<4, Packed>(a, a_row, b, depth, to);
    case 5:
      return tile<5, Packed>(a, a_row, b, depth, to);
    case 6:
      return tile<6, Packed>(a, a_row, b, depth, to);
#if RECAST_LANES == 16
    case 8:
      return tile<8, Packed>(a, a_row, b, depth, to);
    case 12:
      return tile<12, Packed>(a, a_row, b, depth, to);
#endif
    default:
      __builtin_unreachable();
  }
}

// Rows [top, bottom) and columns [left, right) of the product. `room`: kRoom floats.
static void multiply(const Product& p, int64_t top, int64_t bottom, int64_t left, int64_t right,
                     float* room) {
  float* const panels = room;
  float* const strips = room + kDepth * (kColumns + 32);
  const int64_t blocks = p.depth > kDepth ? (p.depth + kDepth - 1) / kDepth : 1;
  const bool strided = p.a_depth != 1;  // A is packed too
  for (int64_t n0 = left; n0 < right; n0 += kColumns) {
    const int64_t n1 = n0 + kColumns < right ? n0 + kColumns : right;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t k0 = p.depth * block / blocks, depth = p.depth * (block + 1) / blocks - k0;
      const bool last = block + 1 == blocks;
      if (p.b_depth == 1)
        for (int64_t n = n0; n < n1; n += kPanel)
          pack_across(p.b + n * p.b_column + k0, p.b_column, n1 - n < kPanel ? n1 - n : kPanel,
                      depth, kPanel, panels + (n - n0) * depth);
      else
        for (int64_t n = n0; n < n1; n += kAtOnce * kPanel)
          pack_panels(p.b + k0 * p.b_depth + n, p.b_depth, n1 - n, depth,
                      panels + (n - n0) * depth);
      for (int64_t m0 = top; m0 < bottom;) {
        const int64_t many = bottom - m0, m1 = m0 + (many > kRows + kRows / 2 ? kRows : many);
        if (strided)
          for (int64_t m = m0; m < m1;) {
            const int rows = height(m1 - m);
            float* strip = strips + (m - m0) * depth;
            const float* from = p.a + k0 * p.a_depth + m;
            if (rows == kTileRows)
              pack_along<kTileRows>(from, p.a_depth, kTileRows, depth, strip);
            else
              for (int64_t k = 0; k < depth; ++k)
                for (int r = 0; r < rows; ++r) strip[k * rows + r] = from[k * p.a_depth + r];
            m += rows;
          }
        for (int64_t n = n0; n < n1; n += kPanel) {
          const float* panel = panels + (n - n0) * depth;
          Place to{nullptr,
                   p.c_row,
                   n1 - n < kPanel ? n1 - n : kPanel,
                   block > 0 || p.add,
                   last && p.bias != nullptr ? p.bias + n : nullptr,
                   nullptr,
                   p.gate_row,
                   last && p.relu};
          for (int64_t m = m0; m < m1;) {
            const int rows = height(m1 - m);
            to.c = p.c + m * p.c_row + n;
            if (last && p.gate != nullptr) to.gate = p.gate + m * p.gate_row + n;
            if (strided)
              tile_of<true>(rows, strips + (m - m0) * depth, 0, panel, depth, to);
            else
              tile_of<false>(rows, p.a + m * p.a_row + k0, p.a_row, panel, depth, to);
            m += rows;
          }
        }
        m0 = m1;
      }
    }
  }
}

// out[c] = Σ_r g[r * columns + c] for c in [left, right): sums of kSummed rows, then their sum,
// plus what was there if `add`.
static void sum_rows(const float* g, int64_t rows, int64_t columns, int64_t left, int64_t right,
                     float* out, bool add) {
  if (!add)
    for (int64_t c = left; c < right; ++c) out[c] = 0.0f;
  for (int64_t r0 = 0; r0 < rows; r0 += kSummed) {
    const int64_t r1 = r0 + kSummed < rows ? r0 + kSummed : rows;
    int64_t c = left;
    for (; c + kPanel <= right; c += kPanel) {
      Vector low = Vector{}, high = Vector{};
      for (int64_t r = r0; r < r1; ++r) {
        low += at(g + r * columns + c);
        high += at(g + r * columns + c + kLanes);
      }
      at(out + c) += low;
      at(out + c + kLanes) += high;
    }
    for (; c < right; ++c) {
      float total = 0.0f;
      for (int64_t r = r0; r < r1; ++r) total += g[r * columns + c];
      out[c] += total;
    }
  }
}

// out[r * width + n] = Σ_k x[r * depth + k] w[n * depth + k] + bias[n]: for few n.
static void dots(const float* x, int64_t rows, int64_t depth, const float* w, const float* bias,
                 int64_t width, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < width; ++n) {
      const float *a = x + r * depth, *b = w + n * depth;
      Vector sums[4] = {};
      int64_t k = 0;
      for (; k + 4 * kLanes <= depth; k += 4 * kLanes)
        for (int v = 0; v < 4; ++v) sums[v] += at(a + k + v * kLanes) * at(b + k + v * kLanes);
      const Vector four = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      float total = 0.0f;
      for (int i = 0; i < kLanes; ++i) total += four[i];
      for (; k < depth; ++k) total += a[k] * b[k];
      out[r * width + n] = total + (bias == nullptr ? 0.0f : bias[n]);
    }
}

// into = g where y is positive (or NaN), else zero: the gradient behind a relu.
static void gate(const float* g, const float* y, int64_t count, float* into) {
  for (int64_t i = 0; i < count; ++i) into[i] = y[i] <= 0.0f ? 0.0f : g[i];
}

}  // namespace recast::gemm::RECAST_ISA
