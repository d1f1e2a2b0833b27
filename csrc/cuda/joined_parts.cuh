// Copies columns of other tensors into a matrix of `Out`, cast to its dtype. Included by
// join_columns.cu and embedding_samples.cu inside their anonymous namespaces, after `Out` is
// defined.

// Consecutive columns that come from one tensor: six fields of 8 bytes, as the host writes them.
struct Part {
  const void* from;      // null: the columns become zeros
  Index row_step, step;  // elements from row to row, and from column to column
  Index dtype;           // as RECAST_OUT
  Index first;           // number of columns of the parts before
  Index column;          // of the matrix, where the first of them goes
};

__device__ __forceinline__ float element(const Part& part, Index at) {
  if (part.from == nullptr) return 0.0f;
  if (part.dtype == 0) return static_cast<const float*>(part.from)[at];
  if (part.dtype == 1) return recast::widen(static_cast<const __half*>(part.from)[at]);
  return recast::widen(static_cast<const __nv_bfloat16*>(part.from)[at]);
}

// Writes column `column` of one row, counted through all parts, which are in order of `first`.
__device__ __forceinline__ void join(const Part* parts, int n_parts, Index row, int column,
                                     Out* out, Index out_stride) {
  int last = 0;  // binary search: the last part with first <= column
  for (int n = n_parts; n > 1;) {
    const int half = n / 2;
    const bool behind = parts[last + half].first <= column;
    last += behind ? half : 0;
    n = behind ? n - half : half;
  }
  const Part& part = parts[last];
  const Index c = column - part.first;
  recast::narrow(element(part, row * part.row_step + c * part.step),
                 out[row * out_stride + part.column + c]);
}
