// Linear layers on panels of samples. Included once per instruction set: see each_isa.h.
//
// A panel holds kPanel samples as columns. So neither Wᵀ nor packing is needed: a tile is kTileRows
// rows of W, read in place, times one panel, and its result has the layout of the next layer's
// input.

namespace recast::panels::RECAST_ISA {

#include "tiles.h"
#include "transpose8.h"

// What is done to a finished sum: as Weights, from one row of W on.
struct Ending {
  const float *bias, *scale, *shift;
  bool relu;
};

// y[r] = Σ_k w[r * apart + k] x[k] on a panel, plus what y holds if `add`; then the ending.
template <int R>
static inline void tile(const float* w, int64_t apart, const float* x, int64_t depth, bool add,
                        const Ending& then, float* y) {
  Vector total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = Vector{};
  for (int64_t k = 0; k < depth; ++k, x += kPanel) {
    const Vector left = at(x), right = at(x + kLanes);
    for (int r = 0; r < R; ++r) {
      const float one = w[r * apart + k];
      total[r][0] += one * left;
      total[r][1] += one * right;
    }
  }
  if (add)
    for (int r = 0; r < R; ++r) {
      total[r][0] += at(y + r * kPanel);
      total[r][1] += at(y + r * kPanel + kLanes);
    }
  if (then.bias != nullptr)
    for (int r = 0; r < R; ++r) {
      total[r][0] += then.bias[r];
      total[r][1] += then.bias[r];
    }
  if (then.scale != nullptr)
    for (int r = 0; r < R; ++r) {
      total[r][0] = total[r][0] * then.scale[r] + then.shift[r];
      total[r][1] = total[r][1] * then.scale[r] + then.shift[r];
    }
  if (then.relu)  // NaN stays, as torch's
    for (int r = 0; r < R; ++r) {
      total[r][0] = total[r][0] < 0.0f ? Vector{} : total[r][0];
      total[r][1] = total[r][1] < 0.0f ? Vector{} : total[r][1];
    }
  for (int r = 0; r < R; ++r) {
    at(y + r * kPanel) = total[r][0];
    at(y + r * kPanel + kLanes) = total[r][1];
  }
}

static inline void tile_of(int rows, const float* w, int64_t apart, const float* x, int64_t depth,
                           bool add, const Ending& then, float* y) {
  switch (rows) {
    case 1:
      return tile<1>(w, apart, x, depth, add, then, y);
    case 2:
      return tile<2>(w, apart, x, depth, add, then, y);
    case 3:
      return tile<3>(w, apart, x, depth, add, then, y);
    case 4:
      return tile<4>(w, apart, x, depth, add, then, y);
    case 5:
      return tile<5>(w, apart, x, depth, add, then, y);
    case 6:
      return tile<6>(w, apart, x, depth, add, then, y);
#if RECAST_LANES == 16
    case 8:
      return tile<8>(w, apart, x, depth, add, then, y);
    case 12:
      return tile<12>(w, apart, x, depth, add, then, y);
#endif
    default:
      __builtin_unreachable();
  }
}

static int64_t samples() { return kPanel; }

// into[panel][k][s] = x[(panel * kPanel + s) * depth + k]; past `rows` samples zero.
static void pack(const float* x, int64_t rows, int64_t depth, float* into) {
  for (int64_t r0 = 0; r0 < rows; r0 += kPanel, into += depth * kPanel)
    for (int s0 = 0; s0 < kPanel; s0 += 8) {
      const int64_t there = rows - r0 - s0;
      const float* from = x + (r0 + s0) * depth;
      int64_t k = 0;
      if (there >= 8) {
        const float* eight[8];
        for (int s = 0; s < 8; ++s) eight[s] = from + s * depth;
        for (; k + 8 <= depth; k += 8) transpose8(eight, k, into + k * kPanel + s0, kPanel);
      }
      for (; k < depth; ++k)
        for (int s = 0; s < 8; ++s)
          into[k * kPanel + s0 + s] = s < there ? from[s * depth + k] : 0.0f;
    }
}

// The inverse, into a contiguous (rows, width) matrix.
static void unpack(const float* x, int64_t rows, int64_t width, float* into) {
  for (int64_t r0 = 0; r0 < rows; r0 += kPanel, x += width * kPanel)
    for (int64_t n = 0; n < width; n += 8)
      for (int s0 = 0; s0 < kPanel; s0 += 8) {
        const int64_t there = rows - r0 - s0;
        if (there >= 8 && n + 8 <= width) {
          const float* from[8];
          for (int j = 0; j < 8; ++j) from[j] = x + (n + j) * kPanel;
          transpose8(from, s0, into + (r0 + s0) * width + n, width);
          continue;
        }
        const int64_t last = n + 8 < width ? n + 8 : width;
        for (int64_t s = 0; s < there && s < 8; ++s)
          for (int64_t j = n; j < last; ++j)
            into[(r0 + s0 + s) * width + j] = x[j * kPanel + s0 + s];
      }
}

static inline const float* from_row(const float* numbers, int64_t row) {
  return numbers == nullptr ? nullptr : numbers + row;
}

// The layer, for `panels` panels.
static void layer(const Weights& l, const float* x, int64_t panels, float* y) {
  const int64_t blocks = l.depth > kDepth ? (l.depth + kDepth - 1) / kDepth : 1;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t k0 = l.depth * block / blocks, depth = l.depth * (block + 1) / blocks - k0;
    const bool last = block + 1 == blocks;
    for (int64_t n0 = 0; n0 < l.width;) {
      const int64_t many = l.width - n0, n1 = n0 + (many > kRows + kRows / 2 ? kRows : many);
      for (int64_t p = 0; p < panels; ++p) {
        const float* from = x + (p * l.depth + k0) * kPanel;
        float* into = y + p * l.width * kPanel;
        for (int64_t n = n0; n < n1;) {
          const int rows = height(n1 - n);
          Ending then{};
          if (last)
            then = {from_row(l.bias, n), from_row(l.scale, n), from_row(l.shift, n), l.relu};
          tile_of(rows, l.w + n * l.depth + k0, l.depth, from, depth, block > 0, then,
                  into + n * kPanel);
          n += rows;
        }
      }
      n0 = n1;
    }
  }
}

}  // namespace recast::panels::RECAST_ISA
