// dot_interaction.cu where some feature vectors are embedding lookups that the kernel does itself:
// rows are read from the tables, in forward and again in backward, and the looked-up features are
// never written. Gradients are written as for given features, which is what row_update.cu reads.
//
// Macros, as in dot_interaction.cu, and the dtype of tables:
//   RECAST_FEATURES, RECAST_DIM, RECAST_PAIRS
//   RECAST_IN       of given features and of all gradients
//   RECAST_ELEMENT, RECAST_OUT, RECAST_SAMPLES, RECAST_BLOCK
//   RECAST_VEC      divides the strides of tables as well, which start at multiples of 16 bytes, or
//                   of VEC elements where those are fewer
//   RECAST_TABLE    0 fp32, 1 fp16, 2 bf16
//
// Launch: as there; both kernels have two more arguments: the Source of each row (dot_source.cuh),
// and Errors, which may be null.
#define RECAST_GATHER 1
#include "dot_interaction.cu"
