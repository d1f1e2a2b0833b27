// dot_warps.cu (a warp for each sample, few features, on tensor cores) where some feature vectors
// are embedding lookups that the kernel does itself, as in dot_gathered.cu.
//
// Macros, as in dot_warps.cu, and the dtype of tables:
//   RECAST_FEATURES, RECAST_DIM, RECAST_PAIRS, RECAST_ELEMENT, RECAST_BLOCK
//   RECAST_TABLE    0 fp32, or the dtype of all other tensors. Rows of tables start at multiples of
//                   16 bytes
//
// Launch: as there; both kernels have two more arguments: the Source of each row (dot_source.cuh),
// and Errors, which may be null. Where only tables are fp32, a warp's shared memory has a staging
// buffer of F table rows, and one buffer for its F or F + 1 rows instead of two.
#define RECAST_GATHER 1
#include "dot_warps.cu"
