// Scans and sums over a block of kThreads threads. Included by row_sort.cu inside its anonymous
// namespace.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFull = 0xffffffffu;

// Exclusive prefix sum of one number a thread; *total = the sum of all.
__device__ unsigned block_scan(unsigned value, unsigned* total) {
  RECAST_SHARED(unsigned[kWarps], sums);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned before = __shfl_up_sync(kFull, inclusive, d);
    if (lane >= d) inclusive += before;
  }
  __syncthreads();  // an earlier call may still read `sums`
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  unsigned all = 0, before = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all += sums[w];
  }
  *total = all;
  return before + inclusive - value;
}

// The sum of n numbers, by the whole block.
__device__ unsigned block_sum(const unsigned* from, int n) {
  unsigned mine = 0, total;
  for (int i = threadIdx.x; i < n; i += kThreads) mine += from[i];
  block_scan(mine, &total);
  return total;
}
