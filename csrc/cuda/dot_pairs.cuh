// The feature rows of a dot interaction and the places of their pairs in the output. Included by
// dot_interaction.cu and dot_warps.cu inside their anonymous namespaces, after `In`, the dtype of
// the rows.

constexpr int kF = RECAST_FEATURES;
constexpr int kProducts = RECAST_PAIRS == 0   ? kF * kF
                          : RECAST_PAIRS == 2 ? kF * (kF + 1) / 2
                                              : kF * (kF - 1) / 2;

// One feature of all samples: the address in sample 0, and the stride of samples in elements.
struct Row {
  In* at;
  Index stride;
};

// The index of pair (i, j), j <= i, among the products; -1: not selected.
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
