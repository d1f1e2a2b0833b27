// The gradient of embedding lookups before anything is summed, as row_sort.cu, row_update.cu and
// row_norm.cu read it: one Piece a lookup, one Rows a table.
//
// An entry is one id of one piece. Its key is its row, counted through all tables (`first_key` of
// the table plus the row; plus the number of rows where the id gets no gradient), and its value
// says where its gradient is: piece << bag_bits | bag, or piece << bag_bits | place among the
// piece's ids where every id has a factor of its own.
#pragma once

#include "pack.cuh"

// RECAST_WIDE_KEY  1: keys are 64 bits wide, for 2^32 - 1 rows and more; 0: 32 bits
#if RECAST_WIDE_KEY
using Key = recast::Wide;
#else
using Key = unsigned;
#endif

namespace recast {

// kPlain: no weights, no mean and no factor.
enum PieceFlag { kWideIds = 1, kWideOffsets = 2, kMean = 4, kPlain = 8 };

// Eighteen fields of 8 bytes, as the host writes them.
struct Piece {
  const void* ids;      // n_ids of int32 or int64
  const void* offsets;  // starts of the bags, int32 or int64; null: every bag has `fixed` ids
  Index n_ids, n_offsets;
  Index fixed;  // 1 where nothing is pooled
  Index bags;
  Index padding;  // ids equal to it get no gradient; -1: none
  Index flags;
  Index first_entry;      // Σ n_ids of the pieces before
  Index first_key, rows;  // of its table
  const void* weights;    // n_ids factors of the table's dtype, or null
  float* bag_factors;     // (bags,) 1 / ids that count, by bag_factors(); given with kMean only
  unsigned* bag_of;       // (n_ids,) each id's bag, by linearise(); given where `weights` are
  const void* gradient;   // (bags, dim) of dtype RECAST_GRAD
  Index stride;           // elements from one gradient row to the next
  const float* factor;    // of the whole piece, where the device alone knows it, or null
  float times, unused;    // the same where the host knows it
};

// What to do with the gradient of one table: ten fields of 8 bytes, as the host writes them.
struct Rows {
  void* weight;
  Index weight_stride;  // elements
  void* state;          // null where the action has none
  Index state_stride;   // elements from one row's state to the next
  void* second;         // Adam's second state, or null
  Index second_stride;
  Index first_key, rows, dim;
  const float* factor;  // of the whole gradient, where the device alone knows it; null: 1
};

}  // namespace recast
