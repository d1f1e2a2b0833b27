// Dot products of pairs of few feature vectors, some of which are looked up by the kernel itself,
// as dot_gathered.cu does, by a warp for each sample, as dot_warps.cu does.
//
// Macros, as of dot_warps.cu, and the dtype of tables:
//   RECAST_FEATURES, RECAST_DIM, RECAST_PAIRS, RECAST_ELEMENT, RECAST_BLOCK
//   RECAST_TABLE    0 fp32, or that of all else. Their rows start at multiples of 16 bytes
//
// Launch: as there; both kernels take the sources of all rows (dot_source.cuh), and errors, which
// may be null, behind their other arguments. Where tables are fp32 and nothing else is, a warp has
// the bytes of F rows of a table more of shared memory, and has those of its F rows, or F + 1,
// once.
#define RECAST_GATHER 1
#include "dot_warps.cu"
