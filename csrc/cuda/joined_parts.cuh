// Columns of a matrix of `Out` that are copied from other tensors, cast to its dtype, or zeros:
// part of join_columns.cu and of embedding_samples.cu, inside their namespaces.

// Neighbouring columns from one tensor, six fields of 8 bytes as the host writes them.
struct Part {
  const void* from;      // null: zeros
  Index row_step, step;  // elements from row to row, and from column to column
  Index dtype;           // as RECAST_OUT
  Index first;           // columns of the parts before
  Index column;          // of the matrix, where its first one goes
};

__device__ __forceinline__ float element(const Part& part, Index at) {
  if (part.from == nullptr) return 0.0f;
  if (part.dtype == 0) return static_cast<const float*>(part.from)[at];
  if (part.dtype == 1) return recast::widen(static_cast<const __half*>(part.from)[at]);
  return recast::widen(static_cast<const __nv_bfloat16*>(part.from)[at]);
}

// Writes element `column` of all parts of a row; parts by ascending `first`.
__device__ __forceinline__ void join(const Part* parts, int n_parts, Index row, int column,
                                     Out* out, Index out_stride) {
  int last = 0;  // the last part that begins at this column or before
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
