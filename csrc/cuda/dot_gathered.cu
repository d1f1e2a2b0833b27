// Dot products of pairs of feature vectors some of which are looked up by the kernel itself: their
// rows are read from the tables, forward and again backward, and never written. Gradients are
// written as of given features, which is what the update of the tables reads (row_update.cu).
//
// Macros, as of dot_interaction.cu, and the dtype of tables:
//   RECAST_FEATURES, RECAST_DIM, RECAST_PAIRS
//   RECAST_IN       of given features and of all gradients
//   RECAST_ELEMENT, RECAST_OUT, RECAST_SAMPLES, RECAST_BLOCK
//   RECAST_VEC      divides the strides of tables as well, which start at multiples of 16 bytes, or
//                   of VEC elements where those are fewer
//   RECAST_TABLE    0 fp32, 1 fp16, 2 bf16
//
// Launch: as there; both kernels take the sources of all rows (dot_sources.cuh), and errors, which
// may be null, behind their other arguments.
#define RECAST_GATHER 1
#include "dot_interaction.cu"
