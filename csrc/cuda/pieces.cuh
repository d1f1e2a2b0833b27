// The gradients of embedding tables as the lookups left them, before rows are summed: the input of
// row_sort.cu, row_update.cu and row_norm.cu. A Piece describes what one lookup contributes to one
// table, a Rows one table and its optimizer state.
//
// An entry is one id of one piece, with a key and a value of its own. The key is the row, numbered
// through all tables: the table's `first_key` plus the row, or plus the table's number of rows if
// the id gets no gradient. The value says where its gradient is: piece << bag_bits | bag, or, where
// ids have weights, piece << bag_bits | position of the id within the piece.
#pragma once

#include "pack.cuh"

// RECAST_WIDE_KEY  1: keys are 64 bits wide, for 2^32 - 1 rows and more; 0: 32 bits
#if RECAST_WIDE_KEY
using Key = recast::UInt64;
#else
using Key = unsigned;
#endif

namespace recast {

// kPlain: the gradient is used as it is, with no weights, mean or factor.
enum PieceFlag { kWideIds = 1, kWideOffsets = 2, kMean = 4, kPlain = 8 };

// Eighteen fields of 8 bytes, as the host writes them.
struct Piece {
  const void* ids;      // n_ids of int32 or int64
  const void* offsets;  // starts of the bags, int32 or int64; null: `fixed` ids a bag
  Index n_ids, n_offsets;
  Index fixed;  // 1 where nothing is pooled
  Index bags;
  Index padding;  // ids equal to it get no gradient; -1: none
  Index flags;
  Index first_entry;      // Σ n_ids of the pieces before
  Index first_key, rows;  // of its table
  const void* weights;    // n_ids factors of the table's dtype, or null
  float* bag_factors;     // (bags,) 1 / number of valid ids, from bag_factors(); with kMean
  unsigned* bag_of;       // (n_ids,) each id's bag, from linearise(); with `weights`
  const void* gradient;   // (bags, dim) of dtype RECAST_GRAD
  Index stride;           // elements from one gradient row to the next
  const float* factor;    // scalar on the device that multiplies the gradient, or null
  float times, unused;    // the same factor where the host knows it
};

// One table to update: ten fields of 8 bytes, as the host writes them.
struct Rows {
  void* weight;
  Index weight_stride;  // elements
  void* state;          // optimizer state, or null
  Index state_stride;   // elements from one row's state to the next
  void* second;         // Adam's second state, or null
  Index second_stride;
  Index first_key, rows, dim;
  const float* factor;  // scalar on the device that multiplies the row gradients; null: 1
};

}  // namespace recast
