// One small kernel for each thing that the emulator does.
#include "intrinsics.cuh"

extern "C" __global__ void who_am_i(int* out) {
  int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int* mine = out + (block * int(blockDim.x * blockDim.y * blockDim.z) + thread) * 6;
  mine[0] = threadIdx.x, mine[1] = threadIdx.y, mine[2] = threadIdx.z;
  mine[3] = blockIdx.x, mine[4] = blockIdx.y, mine[5] = blockIdx.z;
}
RECAST_KERNEL(who_am_i)

extern "C" __global__ void shuffles(const int* in, int* out, int width) {
  int t = threadIdx.x;
  int v = in[t];
  out[t] = __shfl_sync(0xffffffffu, v, t * 7 + 3, width);
  out[t + 32] = __shfl_up_sync(0xffffffffu, v, 3, width);
  out[t + 64] = __shfl_down_sync(0xffffffffu, v, 3, width);
  out[t + 96] = __shfl_xor_sync(0xffffffffu, v, 5, width);
}
RECAST_KERNEL(shuffles)

extern "C" __global__ void shuffle_types(const double* wide, const __half* narrow, double* wide_out,
                                         __half* narrow_out) {
  int t = threadIdx.x;
  wide_out[t] = __shfl_xor_sync(0xffffffffu, wide[t], 1);
  narrow_out[t] = __shfl_xor_sync(0xffffffffu, narrow[t], 1);
}
RECAST_KERNEL(shuffle_types)

// Even and odd lanes go apart, each adding up its own in a different number of rounds.
extern "C" __global__ void divergent_sums(const int* in, int* out) {
  int t = threadIdx.x, lane = t % 32;
  int sum = in[t];
  if (lane % 2 == 0) {
    for (int by = 2; by < 32; by *= 2) sum += __shfl_xor_sync(0x55555555u, sum, by);
  } else {
    for (int again = 0; again < 3; ++again) sum = __shfl_xor_sync(0xaaaaaaaau, sum, 2);
    sum = __reduce_add_sync(0xaaaaaaaau, sum);
  }
  __syncwarp();
  out[t] = sum - __shfl_xor_sync(0xffffffffu, sum, 1);
}
RECAST_KERNEL(divergent_sums)

extern "C" __global__ void votes(const int* in, unsigned* out) {
  int t = threadIdx.x;
  unsigned mask = t < 20 ? 0x000fffffu : 0xfff00000u;
  out[t] = __ballot_sync(mask, in[t]);
  out[t + 32] = __any_sync(mask, in[t]);
  out[t + 64] = __all_sync(mask, in[t]);
  out[t + 96] = __match_any_sync(mask, in[t]);
  int same;
  out[t + 128] = __match_all_sync(mask, in[t], &same);
  out[t + 160] = same;
}
RECAST_KERNEL(votes)

// Lanes that have returned are excused, and have no vote.
extern "C" __global__ void votes_of_staying(unsigned* out) {
  int t = threadIdx.x;
  if (t % 3 == 0) return;
  out[t] = __ballot_sync(0xffffffffu, 1);
}
RECAST_KERNEL(votes_of_staying)

extern "C" __global__ void reductions(const int* in, int* out) {
  int t = threadIdx.x;
  unsigned mask = t < 20 ? 0x000fffffu : 0xfff00000u;
  unsigned bits = static_cast<unsigned>(in[t]);
  out[t] = __reduce_add_sync(mask, in[t]);
  out[t + 32] = __reduce_min_sync(mask, in[t]);
  out[t + 64] = __reduce_max_sync(mask, in[t]);
  out[t + 96] = static_cast<int>(__reduce_and_sync(mask, bits));
  out[t + 128] = static_cast<int>(__reduce_or_sync(mask, bits));
  out[t + 160] = static_cast<int>(__reduce_xor_sync(mask, bits));
}
RECAST_KERNEL(reductions)

extern "C" __global__ void block_votes(const int* in, int* out) {
  int t = threadIdx.x, threads = blockDim.x;
  out[t] = __syncthreads_count(in[t]);
  out[t + threads] = __syncthreads_and(in[t]);
  out[t + 2 * threads] = __syncthreads_or(in[t]);
}
RECAST_KERNEL(block_votes)

extern "C" __global__ void atomic_sums(const float* in, float* f32, double* f64, __half* f16,
                                       __nv_bfloat16* bf16, int* i32, unsigned long long* u64,
                                       int bins) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, bin = i % bins;
  atomicAdd(&f32[bin], in[i]);
  atomicAdd(&f64[bin], static_cast<double>(in[i]));
  atomicAdd(&f16[bin], __float2half(in[i]));
  atomicAdd(&bf16[bin], __float2bfloat16(in[i]));
  atomicAdd(&i32[bin], static_cast<int>(in[i]));
  atomicAdd(&u64[bin], 1ull << 40);
}
RECAST_KERNEL(atomic_sums)

extern "C" __global__ void atomic_pairs(__half2* f16, __nv_bfloat162* bf16) {
  atomicAdd(f16, __floats2half2_rn(1.0f, 2.0f));
  atomicAdd(bf16, __floats2bfloat162_rn(1.0f, 2.0f));
}
RECAST_KERNEL(atomic_pairs)

extern "C" __global__ void atomic_words(int* out, unsigned* wrap, int* slots) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicMax(&out[0], i);
  atomicMin(&out[1], -i);
  atomicOr(&out[2], 1 << (i % 31));
  atomicAnd(&out[3], ~(1 << (i % 31)));
  atomicXor(&out[4], i);
  atomicSub(&out[5], 2);
  atomicInc(&wrap[0], 9);
  atomicDec(&wrap[1], 9);
  int place = 0;  // the first free slot
  while (atomicCAS(&slots[place], -1, i) != -1) ++place;
  atomicExch(&out[6], i);
}
RECAST_KERNEL(atomic_words)

extern "C" __global__ void shared_memory(float* out, int n) {
  RECAST_DYNAMIC_SHARED(float, dynamic);
  RECAST_SHARED(float[2][32], fixed);
  RECAST_SHARED(int, counter);
  int t = threadIdx.x;
  float* mine = out + blockIdx.x * 4 * n;
  mine[t] = dynamic[t];  // before anything is written
  mine[n + t] = fixed[t % 2][t / 2] + counter;
  __syncthreads();
  if (t == 0) counter = 0;
  dynamic[t] = t;
  fixed[t % 2][t / 2] = 100.0f + t;
  __syncthreads();
  atomicAdd(&counter, 1);
  __syncthreads();
  int other = n - 1 - t;
  mine[2 * n + t] = dynamic[other] + fixed[other % 2][other / 2];
  mine[3 * n + t] = counter;
}
RECAST_KERNEL(shared_memory)

// Three stages of copies; each is there after its own wait, and not before.
extern "C" __global__ void async_copies(const float* in, float* early, float* out, int valid) {
  RECAST_DYNAMIC_SHARED(float, tile);
  int t = threadIdx.x;
  for (int stage = 0; stage < 3; ++stage) {
    float* to = tile + (stage * blockDim.x + t) * 4;
    recast::async_copy_16(to, in + (stage * blockDim.x + t) * 4, t < valid);
    recast::async_commit();
  }
  recast::async_wait<2>();
  early[t] = tile[t * 4];
  early[blockDim.x + t] = tile[(blockDim.x + t) * 4];
  recast::async_wait<0>();
  __syncthreads();
  for (int i = t; i < int(12 * blockDim.x); i += blockDim.x) out[i] = tile[i];
}
RECAST_KERNEL(async_copies)

namespace {

__device__ void add_product(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                            __nv_bfloat16) {
  recast::mma_bf16(sum, a, b, sum);
}

__device__ void add_product(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                            __half) {
  recast::mma_fp16(sum, a, b, sum);
}

template <class T>
__device__ unsigned pair(const T& low, const T& high) {
  return reinterpret_cast<const unsigned short&>(low) |
         static_cast<unsigned>(reinterpret_cast<const unsigned short&>(high)) << 16;
}

// out (16 x 8) = a (16 x depth) b (depth x 8) + start, a warp.
template <class T>
__device__ void multiply_halves(const T* a, const T* b, const float* start, float* out, int depth) {
  int group = threadIdx.x / 4, within = threadIdx.x % 4;
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = start[(group + i / 2 * 8) * 8 + within * 2 + i % 2];
  for (int k = 0; k < depth; k += 16) {
    unsigned a_of[4], b_of[2];
    for (int i = 0; i < 4; ++i) {
      const T* at = a + (group + i % 2 * 8) * depth + k + within * 2 + i / 2 * 8;
      a_of[i] = pair(at[0], at[1]);
    }
    for (int i = 0; i < 2; ++i) {
      const T* at = b + (k + within * 2 + i * 8) * 8 + group;
      b_of[i] = pair(at[0], at[8]);
    }
    add_product(sum, a_of, b_of, T());
  }
  for (int i = 0; i < 4; ++i) out[(group + i / 2 * 8) * 8 + within * 2 + i % 2] = sum[i];
}

}  // namespace

extern "C" __global__ void multiply_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b,
                                         const float* start, float* out, int depth) {
  multiply_halves(a, b, start, out, depth);
}
RECAST_KERNEL(multiply_bf16)

extern "C" __global__ void multiply_fp16(const __half* a, const __half* b, const float* start,
                                         float* out, int depth) {
  multiply_halves(a, b, start, out, depth);
}
RECAST_KERNEL(multiply_fp16)

extern "C" __global__ void multiply_tf32(const float* a, const float* b, const float* start,
                                         float* out, int depth) {
  int group = threadIdx.x / 4, within = threadIdx.x % 4;
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = start[(group + i / 2 * 8) * 8 + within * 2 + i % 2];
  for (int k = 0; k < depth; k += 8) {
    unsigned a_of[4], b_of[2];
    for (int i = 0; i < 4; ++i)
      a_of[i] = recast::to_tf32(a[(group + i % 2 * 8) * depth + k + within + i / 2 * 4]);
    for (int i = 0; i < 2; ++i) b_of[i] = recast::to_tf32(b[(k + within + i * 4) * 8 + group]);
    recast::mma_tf32(sum, a_of, b_of, sum);
  }
  for (int i = 0; i < 4; ++i) out[(group + i / 2 * 8) * 8 + within * 2 + i % 2] = sum[i];
}
RECAST_KERNEL(multiply_tf32)

// 32 rows of 8 halves through shared memory: out[turned][lane][tile].
extern "C" __global__ void tiles(const unsigned* rows, unsigned* out) {
  RECAST_SHARED(unsigned[32][4], kept);
  for (int w = 0; w < 4; ++w) kept[threadIdx.x][w] = rows[threadIdx.x * 4 + w];
  __syncthreads();
  unsigned r[4];
  recast::load_tiles(r, kept[threadIdx.x]);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = r[i];
  recast::load_transposed_tiles(r, kept[threadIdx.x]);
  for (int i = 0; i < 4; ++i) out[(32 + threadIdx.x) * 4 + i] = r[i];
}
RECAST_KERNEL(tiles)

// Which block and thread comes how late.
extern "C" __global__ void order_of_coming(int* ticket, int* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(ticket, 1);
}
RECAST_KERNEL(order_of_coming)

extern "C" __global__ void bit_functions(const int* in, int* out, int n) {
  int i = threadIdx.x, x = in[i];
  unsigned u = static_cast<unsigned>(x);
  out[i] = __popc(u);
  out[n + i] = __clz(x);
  out[2 * n + i] = __ffs(x);
  out[3 * n + i] = static_cast<int>(__brev(u));
  out[4 * n + i] = static_cast<int>(__umulhi(u, 0x9e3779b9u));
  out[5 * n + i] = static_cast<int>(__funnelshift_l(u, ~u, 5));
  out[6 * n + i] = __float_as_int(__int_as_float(x));
}
RECAST_KERNEL(bit_functions)
