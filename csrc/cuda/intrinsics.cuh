// What every kernel includes: the macros of the launch contract, and the instructions that CUDA C++
// has no name for. Each of those is a pair: PTX on the device, C++ in the emulator (csrc/simt).
//
//     RECAST_DYNAMIC_SHARED(type, name);     the block's dynamic shared memory, 16-byte aligned
//     RECAST_SHARED(float[16][17], name);    a shared variable of fixed size
//     RECAST_KERNEL(name)                    after a kernel: the emulator can launch it
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

// Copies 16 bytes from global to shared memory, or writes zeros there if not `valid` (`global` is
// then not read, but must be a valid address). Both addresses are multiples of 16. The bytes are
// there for this thread after async_wait, for others after a barrier too.
__device__ __forceinline__ void async_copy_16(void* shared, const void* global, bool valid = true) {
#if defined(__CUDACC__)
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
#else
  simt::copy_later({"async_copy_16", __FILE__, __LINE__}, shared, valid ? global : nullptr);
#endif
}

// Closes the group of the copies so far.
__device__ __forceinline__ void async_commit() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  simt::close_copies();
#endif
}

// Waits for all closed groups but the last `open`.
template <int open>
__device__ __forceinline__ void async_wait() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(open) : "memory");
#else
  simt::await_copies(open, [](void* to, const void* from) {
    auto* words = static_cast<uint4*>(to);
    *words = from == nullptr ? make_uint4(0, 0, 0, 0) : *static_cast<const uint4*>(from);
  });
#endif
}

// Loads 16 bytes that are read only once, without keeping them in the first-level cache. Nothing
// may write to that memory while the kernel runs.
__device__ __forceinline__ uint4 load_16_once(const void* from) {
#if defined(__CUDACC__)
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
#else
  simt::check_aligned({"load_16_once", __FILE__, __LINE__}, from, 16);
  return *static_cast<const uint4*>(from);
#endif
}

// Stores 16 bytes that are not read again soon: the cache drops them before other data.
__device__ __forceinline__ void store_16_once(void* to, uint4 v) {
#if defined(__CUDACC__)
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
#else
  simt::check_aligned({"store_16_once", __FILE__, __LINE__}, to, 16);
  *static_cast<uint4*>(to) = v;
#endif
}

// Prefetches global memory into the second-level cache.
__device__ __forceinline__ void prefetch(const void* from) {
#if defined(__CUDACC__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#else
  [[maybe_unused]] const char seen =
      *static_cast<const volatile char*>(from);  // a wrong address must fault here
#endif
}

// The nearest TF32 number, ties away from zero, as mma_tf32 takes it.
__device__ __forceinline__ unsigned to_tf32(float x) {
#if defined(__CUDACC__)
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
#else
  return simt::to_tf32(x);
#endif
}

// Four tiles of 8 rows x 16 bytes from shared memory, by a whole warp: lane l gives the address of
// row l % 8 of tile l / 8, a multiple of 16, and gets of tile i, with g = l / 4 and t = l % 4 (PTX
// ISA, "ldmatrix"):
//     load_tiles         r[i] = word t of row g
//     load_turned_tiles  r[i] = halves g of rows 2t (low) and 2t+1
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

__device__ __forceinline__ void load_turned_tiles(unsigned (&r)[4], const void* row) {
#if defined(__CUDACC__)
  unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
#else
  simt::load_tiles({"load_turned_tiles", __FILE__, __LINE__}, r, row, true);
#endif
}

// D = A B + C by a whole warp: A is 16 x 16, B 16 x 8, C and D 16 x 8, of which lane l holds, with
// g = l / 4 and t = l % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k16"; .x is the low half):
//     a[0] = A[g][2t, 2t+1]    a[1] = A[g+8][2t, 2t+1]    b[0] = B[2t, 2t+1][g]      c[0, 1] =
//     C[g][2t, 2t+1] a[2] = A[g][2t+8, 2t+9]  a[3] = A[g+8][2t+8, 2t+9]  b[1] = B[2t+8, 2t+9][g]
//     c[2, 3] = C[g+8][2t, 2t+1]
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

// The same with A 16 x 8 and B 8 x 8 in TF32 (see to_tf32; PTX ISA, "mma.m16n8k8"):
//     a[0] = A[g][t]    a[1] = A[g+8][t]    a[2] = A[g][t+4]    a[3] = A[g+8][t+4]
//     b[0] = B[t][g]    b[1] = B[t+4][g]    c, d as above
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
