// The tensor-core product of dot_interaction.cu and dot_warps.cu, by RECAST_ELEMENT: 1 fp16, 2
// bf16, 3 TF32. Included there inside anonymous namespaces.

// c += A B for one tile; b0 and b1 are the registers of B.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  const unsigned b[2] = {b0, b1};
#if RECAST_ELEMENT == 1
  recast::mma_fp16(c, a, b, c);
#elif RECAST_ELEMENT == 2
  recast::mma_bf16(c, a, b, c);
#else
  recast::mma_tf32(c, a, b, c);
#endif
}
