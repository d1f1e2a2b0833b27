// Included by every kernel: the macros by which a source also builds for the emulator, and the PTX
// instructions that CUDA C++ has no intrinsic for. Each has two bodies: inline PTX for the device,
// and plain C++ with the same result for the emulator (csrc/simt/intrinsics.h).
//
//     RECAST_DYNAMIC_SHARED(type, name);     the block's dynamic shared memory, 16-byte aligned
//     RECAST_SHARED(float[16][17], name);    a statically sized shared variable
//     RECAST_KERNEL(name)                    after a kernel: registers it with the emulator
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(__CUDACC__)
#define RECAST_KERNEL(name)
#define RECAST_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char recast_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(recast_dynamic_shared)
#define RECAST_SHARED(type, name)    \
  using recast_shared_##name = type; \
  __shared__ __align__(16) recast_shared_##name name
#else
#include "simt/kernel.h"
#endif

namespace recast {

// Starts a cp.async of 16 bytes from global to shared memory; both addresses are multiples of 16.
// If not `valid`, writes zeros instead and does not read `global`, which must still be a mapped
// address. The calling thread sees the bytes after async_wait, other threads after a barrier too.
__device__ __forceinline__ void async_copy_16(void* shared, const void* global, bool valid = true) {
#if defined(__CUDACC__)
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
#else
  simt::start_copy({"async_copy_16", __FILE__, __LINE__}, shared, valid ? global : nullptr);
#endif
}

// Commits the copies started since the last commit as one group.
__device__ __forceinline__ void async_commit() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  simt::commit_copies();
#endif
}

// Waits until at most the last `pending` committed groups are incomplete.
template <int pending>
__device__ __forceinline__ void async_wait() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  simt::wait_for_copies(pending, [](void* to, const void* from) {
    auto* words = static_cast<uint4*>(to);
    *words = from == nullptr ? make_uint4(0, 0, 0, 0) : *static_cast<const uint4*>(from);
  });
#endif
}

// Rounds to the nearest TF32 number, ties away from zero; mma_tf32 takes the bits.
__device__ __forceinline__ unsigned to_tf32(float x) {
#if defined(__CUDACC__)
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
#else
  return simt::to_tf32(x);
#endif
}

// ldmatrix: a whole warp loads four tiles of 8 rows x 16 bytes from shared memory. Lane l passes
// the address of row l % 8 of tile l / 8, a multiple of 16, and receives from tile i, with g = l /
// 4 and t = l % 4:
//     load_tiles             r[i] = 32-bit word t of row g
//     load_transposed_tiles  r[i] = 16-bit element g of row 2t (low half) and of row 2t + 1
__device__ __forceinline__ void load_tiles(unsigned (&r)[4], const void* row) {
#if defined(__CUDACC__)
  unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
#else
  simt::load_tiles({"load_tiles", __FILE__, __LINE__}, r, row, false);
#endif
}

__device__ __forceinline__ void load_transposed_tiles(unsigned (&r)[4], const void* row) {
#if defined(__CUDACC__)
  unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
#else
  simt::load_tiles({"load_transposed_tiles", __FILE__, __LINE__}, r, row, true);
#endif
}

// D = A B + C by a whole warp: A is 16 x 16, B 16 x 8, C and D 16 x 8. Lane l holds, with g = l / 4
// and t = l % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k16"; the lower column or row of a pair is
// the low half of the register):
//     a[0] = A[g][2t, 2t+1]      a[1] = A[g+8][2t, 2t+1]
//     a[2] = A[g][2t+8, 2t+9]    a[3] = A[g+8][2t+8, 2t+9]
//     b[0] = B[2t, 2t+1][g]      b[1] = B[2t+8, 2t+9][g]
//     c[0, 1] = C[g][2t, 2t+1]   c[2, 3] = C[g+8][2t, 2t+1]
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2], const float (&c)[4]) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
#else
  simt::mma_16x8x16<__nv_bfloat16>({"mma_bf16", __FILE__, __LINE__}, d, a, b, c);
#endif
}

__device__ __forceinline__ void mma_fp16(float (&d)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2], const float (&c)[4]) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
#else
  simt::mma_16x8x16<__half>({"mma_fp16", __FILE__, __LINE__}, d, a, b, c);
#endif
}

// The same in TF32 (see to_tf32; PTX ISA, "mma.m16n8k8"), with A 16 x 8 and B 8 x 8:
//     a[0] = A[g][t]     a[1] = A[g+8][t]     a[2] = A[g][t+4]     a[3] = A[g+8][t+4]
//     b[0] = B[t][g]     b[1] = B[t+4][g]     c, d as above
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2], const float (&c)[4]) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
#else
  simt::mma_16x8x8_tf32({"mma_tf32", __FILE__, __LINE__}, d, a, b, c);
#endif
}

}  // namespace recast
