// Kernels that each do one thing wrong, and beside each its twin that does it right. All are
// launched with two blocks of 64 threads, 256 bytes of shared memory and `out` of 128 floats.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {
__device__ int place() { return blockIdx.x * blockDim.x + threadIdx.x; }
}  // namespace

// --- memory -------------------------------------------------------------------------------------

extern "C" __global__ void shared_overrun(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x + 1] = 1.0f;
  out[place()] = 1.0f;
}
RECAST_KERNEL(shared_overrun)

extern "C" __global__ void shared_within(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = 1.0f;
  out[place()] = 1.0f;
}
RECAST_KERNEL(shared_within)

extern "C" __global__ void variable_overrun(float* out) {
  RECAST_SHARED(float[4][16], tile);
  float* flat = &tile[0][0];
  flat[threadIdx.x + 1] = 1.0f;
  out[place()] = 1.0f;
}
RECAST_KERNEL(variable_overrun)

extern "C" __global__ void variable_within(float* out) {
  RECAST_SHARED(float[4][16], tile);
  float* flat = &tile[0][0];
  flat[threadIdx.x] = 1.0f;
  out[place()] = 1.0f;
}
RECAST_KERNEL(variable_within)

extern "C" __global__ void tensor_overrun(float* out) { out[place() + 1] = 1.0f; }
RECAST_KERNEL(tensor_overrun)

extern "C" __global__ void tensor_within(float* out) { out[place()] = 1.0f; }
RECAST_KERNEL(tensor_within)

extern "C" __global__ void local_overrun(float* out) {
  float row[4] = {0.0f, 1.0f, 2.0f, 3.0f};
  const float* last = row + threadIdx.x % 5;
  out[place()] = *last;
}
RECAST_KERNEL(local_overrun)

extern "C" __global__ void local_within(float* out) {
  float row[4] = {0.0f, 1.0f, 2.0f, 3.0f};
  const float* last = row + threadIdx.x % 4;
  out[place()] = *last;
}
RECAST_KERNEL(local_within)

extern "C" __global__ void index_overflow(float* out) {
  int row = 1 << 25, dim = static_cast<int>(threadIdx.x) + 1;
  out[place()] = row * dim > 0 ? 1.0f : 0.0f;
}
RECAST_KERNEL(index_overflow)

extern "C" __global__ void index_wide(float* out) {
  long long row = 1 << 25;
  int dim = static_cast<int>(threadIdx.x) + 1;
  out[place()] = row * dim > 0 ? 1.0f : 0.0f;
}
RECAST_KERNEL(index_wide)

extern "C" __global__ void vector_misaligned(float* out) {
  if (threadIdx.x < 8) *reinterpret_cast<float4*>(out + 4 * threadIdx.x + 1) = float4{};
}
RECAST_KERNEL(vector_misaligned)

extern "C" __global__ void vector_aligned(float* out) {
  if (threadIdx.x < 8 && blockIdx.x == 0)
    *reinterpret_cast<float4*>(out + 4 * threadIdx.x) = float4{};
}
RECAST_KERNEL(vector_aligned)

// --- races --------------------------------------------------------------------------------------

extern "C" __global__ void barrier_missing(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = 1.0f;
  out[place()] = tile[(threadIdx.x + 33) % 64];
}
RECAST_KERNEL(barrier_missing)

extern "C" __global__ void barrier_there(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = 1.0f;
  __syncthreads();
  out[place()] = tile[(threadIdx.x + 33) % 64];
}
RECAST_KERNEL(barrier_there)

// The second barrier: what others still read is written again.
extern "C" __global__ void second_barrier_missing(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  float sum = 0.0f;
  for (int step = 0; step < 2; ++step) {
    tile[threadIdx.x] = 1.0f;
    __syncthreads();
    sum += tile[(threadIdx.x + 33) % 64];
  }
  out[place()] = sum;
}
RECAST_KERNEL(second_barrier_missing)

extern "C" __global__ void second_barrier_there(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  float sum = 0.0f;
  for (int step = 0; step < 2; ++step) {
    tile[threadIdx.x] = 1.0f;
    __syncthreads();
    sum += tile[(threadIdx.x + 33) % 64];
    __syncthreads();
  }
  out[place()] = sum;
}
RECAST_KERNEL(second_barrier_there)

// A shuffle makes lanes meet, but orders no memory.
extern "C" __global__ void shuffle_for_barrier(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = 1.0f;
  float other = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  out[place()] = tile[threadIdx.x ^ 1] + other;
}
RECAST_KERNEL(shuffle_for_barrier)

extern "C" __global__ void warp_barrier_there(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = 1.0f;
  __syncwarp();
  float other = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  out[place()] = tile[threadIdx.x ^ 1] + other;
}
RECAST_KERNEL(warp_barrier_there)

extern "C" __global__ void blocks_add_plainly(float* out) { out[threadIdx.x] += 1.0f; }
RECAST_KERNEL(blocks_add_plainly)

extern "C" __global__ void blocks_add_atomically(float* out) { atomicAdd(&out[threadIdx.x], 1.0f); }
RECAST_KERNEL(blocks_add_atomically)

// What orders the threads of a block does not order two blocks.
extern "C" __global__ void blocks_add_after_barrier(float* out) {
  __syncthreads();
  __syncwarp();
  out[threadIdx.x] += 1.0f;
  __syncthreads();
}
RECAST_KERNEL(blocks_add_after_barrier)

// The last block to come reads what the others wrote: out[127] counts the blocks.
extern "C" __global__ void fence_missing(float* out) {
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = 2.0f;
  if (atomicAdd(&out[127], 1.0f) == 1.0f) out[2] = out[0] + out[1];
}
RECAST_KERNEL(fence_missing)

extern "C" __global__ void fence_there(float* out) {
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = 2.0f;
  __threadfence();
  if (atomicAdd(&out[127], 1.0f) == 1.0f) {
    __threadfence();
    out[2] = out[0] + out[1];
  }
}
RECAST_KERNEL(fence_there)

// A copy is for the thread that waits; others need a barrier.
extern "C" __global__ void copy_without_barrier(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  if (threadIdx.x < 16) recast::async_copy_16(tile + 4 * threadIdx.x, out + 4 * threadIdx.x);
  recast::async_commit();
  recast::async_wait<0>();
  out[64 + threadIdx.x] = tile[63 - threadIdx.x];
}
RECAST_KERNEL(copy_without_barrier)

extern "C" __global__ void copy_with_barrier(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  if (threadIdx.x < 16) recast::async_copy_16(tile + 4 * threadIdx.x, out + 4 * threadIdx.x);
  recast::async_commit();
  recast::async_wait<0>();
  __syncthreads();
  if (blockIdx.x == 0) out[64 + threadIdx.x] = tile[63 - threadIdx.x];
}
RECAST_KERNEL(copy_with_barrier)

// --- collectives --------------------------------------------------------------------------------

extern "C" __global__ void shuffle_from_returned(float* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[place()] = __shfl_xor_sync(0xffffffffu, 1.0f, 16);
}
RECAST_KERNEL(shuffle_from_returned)

extern "C" __global__ void shuffle_among_staying(float* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[place()] = __shfl_xor_sync(0xffffffffu, 1.0f, 8);
}
RECAST_KERNEL(shuffle_among_staying)

extern "C" __global__ void shuffle_outside_mask(float* out) {
  if (threadIdx.x % 32 < 16) out[place()] = __shfl_xor_sync(0x0000ffffu, 1.0f, 16);
}
RECAST_KERNEL(shuffle_outside_mask)

extern "C" __global__ void mask_without_caller(float* out) {
  out[place()] = __shfl_xor_sync(0x0000ffffu, 1.0f, 8);
}
RECAST_KERNEL(mask_without_caller)

extern "C" __global__ void mask_of_caller(float* out) {
  unsigned mask = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  out[place()] = __shfl_xor_sync(mask, 1.0f, 8);
}
RECAST_KERNEL(mask_of_caller)

extern "C" __global__ void masks_disagree(float* out) {
  unsigned mask = threadIdx.x % 32 < 16 ? 0xffffffffu : 0xffff0000u;
  out[place()] = __shfl_xor_sync(mask, 1.0f, 8);
  __syncthreads();
}
RECAST_KERNEL(masks_disagree)

extern "C" __global__ void collectives_disagree(float* out) {
  if (threadIdx.x % 2 == 0)
    out[place()] = __shfl_xor_sync(0xffffffffu, 1.0f, 2);
  else
    out[place()] = __any_sync(0xffffffffu, 1) ? 1.0f : 0.0f;
}
RECAST_KERNEL(collectives_disagree)

extern "C" __global__ void barrier_in_branch(float* out) {
  if (threadIdx.x % 2 == 0) __syncthreads();
  out[place()] = 1.0f;
}
RECAST_KERNEL(barrier_in_branch)

extern "C" __global__ void barrier_in_uniform_branch(float* out) {
  if (blockIdx.x == 0) __syncthreads();
  out[place()] = 1.0f;
}
RECAST_KERNEL(barrier_in_uniform_branch)

extern "C" __global__ void barrier_after_return(float* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  out[place()] = 1.0f;
}
RECAST_KERNEL(barrier_after_return)

extern "C" __global__ void barriers_differ(float* out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[place()] = 1.0f;
}
RECAST_KERNEL(barriers_differ)

extern "C" __global__ void barrier_against_warp(float* out) {
  if (threadIdx.x % 2 == 0)
    __syncthreads();
  else
    __syncwarp();
  out[place()] = 1.0f;
}
RECAST_KERNEL(barrier_against_warp)

extern "C" __global__ void spin_for_nobody(float* out) {
  RECAST_SHARED(int, flag);
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  while (atomicAdd(&flag, 0) == 0) {
  }
  out[place()] = 1.0f;
}
RECAST_KERNEL(spin_for_nobody)

extern "C" __global__ void spin_for_another(float* out) {
  RECAST_SHARED(int, flag);
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 63) atomicExch(&flag, 1);
  while (atomicAdd(&flag, 0) == 0) {
  }
  out[place()] = 1.0f;
}
RECAST_KERNEL(spin_for_another)

extern "C" __global__ void copy_never_awaited(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  if (threadIdx.x < 16) recast::async_copy_16(tile + 4 * threadIdx.x, out + 4 * threadIdx.x);
}
RECAST_KERNEL(copy_never_awaited)

extern "C" __global__ void copy_misaligned(float* out) {
  RECAST_DYNAMIC_SHARED(float, tile);
  if (threadIdx.x < 15) recast::async_copy_16(tile + 4 * threadIdx.x, out + 4 * threadIdx.x + 1);
  recast::async_commit();
  recast::async_wait<0>();
}
RECAST_KERNEL(copy_misaligned)

extern "C" __global__ void load_misaligned(float* out) {
  if (threadIdx.x < 15) out[0] = recast::load<4>(out + 4 * threadIdx.x + 2).at[0];
}
RECAST_KERNEL(load_misaligned)

extern "C" __global__ void store_misaligned(float* out) {
  if (threadIdx.x < 15) recast::store(out + 4 * threadIdx.x + 2, recast::zeros<4, float>());
}
RECAST_KERNEL(store_misaligned)

#if !defined(__CUDACC__)  // whose assembler refuses it
extern "C" __global__ void variables_too_large(float* out) {
  RECAST_SHARED(float[8192], first);
  RECAST_SHARED(float[8192], second);
  first[threadIdx.x] = second[threadIdx.x] = 1.0f;
  out[place()] = 1.0f;
}
RECAST_KERNEL(variables_too_large)
#endif

extern "C" __global__ void matrix_by_half_a_warp(float* out) {
  if (threadIdx.x % 32 >= 16) return;
  unsigned a[4] = {}, b[2] = {};
  float c[4] = {};
  recast::mma_bf16(c, a, b, c);
  out[place()] = c[0];
}
RECAST_KERNEL(matrix_by_half_a_warp)
