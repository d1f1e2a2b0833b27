// The rows of a dot interaction and their pairs: part of dot_interaction.cu and dot_warps.cu,
// inside their namespaces, behind `In`, the dtype of the rows.

constexpr int kF = RECAST_FEATURES;
constexpr int kProducts = RECAST_PAIRS == 0   ? kF * kF
                          : RECAST_PAIRS == 2 ? kF * (kF + 1) / 2
                                              : kF * (kF - 1) / 2;

// One row of all samples: where sample 0's starts, and elements from one sample's to the next.
struct Row {
  In* at;
  Index stride;
};

// Place of the pair (i, j) with j <= i among the products; -1: not asked for.
__device__ __forceinline__ int place(int i, int j) {
#if RECAST_PAIRS == 0
  return i * kF + j;
#elif RECAST_PAIRS == 1
  return i == j ? -1 : i * (i - 1) / 2 + j;
#elif RECAST_PAIRS == 2
  return i * (i + 1) / 2 + j;
#else
  return i == j ? -1 : j * kF - j * (j + 1) / 2 + i - j - 1;
#endif
}
