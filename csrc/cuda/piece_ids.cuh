// Reads the ids of a Piece: the bag and the row of each, and what is wrong with them. Included by
// row_sort.cu inside its anonymous namespace.

#include "bad_input.cuh"

// Start of a bag, clamped to the ids there are.
__device__ __forceinline__ Index start_of(const Piece& piece, Index bag) {
  if (piece.offsets == nullptr) return bag * piece.fixed;
  if (bag >= piece.n_offsets) return piece.n_ids;
  const Index at = recast::integer(piece.offsets, piece.flags & recast::kWideOffsets, bag);
  return at < 0 ? 0 : at > piece.n_ids ? piece.n_ids : at;
}

// The bag of the id at `place`: the last one that starts at or before it; -1 before the first bag,
// `bags` behind the last.
__device__ __forceinline__ Index bag_at(const Piece& piece, Index place) {
  if (piece.offsets == nullptr)  // both fit 32 bits, and 64-bit division is slow
    return static_cast<unsigned>(place) / static_cast<unsigned>(piece.fixed);
  // Where bags have equal sizes, mostly of one id each, a division finds the bag without a search.
  const unsigned ids = static_cast<unsigned>(piece.n_ids), bags = static_cast<unsigned>(piece.bags);
  const Index guess = static_cast<unsigned>(place) / (bags > 0 && ids > bags ? ids / bags : 1);
  if (guess < piece.bags && start_of(piece, guess) <= place && start_of(piece, guess + 1) > place)
    return guess;
  Index first = 0, past = piece.bags + 1;
  while (first < past) {  // the first bag that starts after it
    const Index middle = (first + past) / 2;
    const bool after = start_of(piece, middle) > place;
    past = after ? middle : past;
    first = after ? first : middle + 1;
  }
  return first - 1;
}

// The row of an id, or -1 if it gets no gradient; *bad: it is outside the table. The padding id is
// never bad, even outside the table.
__device__ __forceinline__ Index row_of(const Piece& piece, Index id, bool* bad) {
  const bool padding = id == piece.padding && piece.padding >= 0;
  *bad = !padding && static_cast<UInt64>(id) >= static_cast<UInt64>(piece.rows);
  return *bad || padding ? -1 : id;
}

__device__ __forceinline__ Index id_at(const Piece& piece, Index place) {
  return recast::integer(piece.ids, piece.flags & recast::kWideIds, place);
}

// The last of pieces [number, past) that starts at `entry` or before it.
__device__ __forceinline__ int piece_of(const Piece* pieces, int number, int past, int entry) {
  while (past - number > 1) {
    const int middle = (number + past) / 2;
    const bool before = pieces[middle].first_entry <= entry;
    number = before ? middle : number;
    past = before ? past : middle;
  }
  return number;
}
