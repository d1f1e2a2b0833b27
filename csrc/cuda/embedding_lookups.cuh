// The description of one embedding lookup, and how its bags and ids are read and checked. Included
// by embedding_forward.cu and embedding_samples.cu inside their anonymous namespaces, after `Table`
// and `Out` are defined.

#include "bad_input.cuh"

enum Mode { kSum, kMean, kMax, kNone };
enum Flag { kWideIds = 1, kWideOffsets = 2, kAlignedOut = 4 };

// One lookup: nineteen fields of 8 bytes, as the host writes them. An id outside its table is
// skipped like padding (a gather gives zeros), and offsets are clamped to the ids there are.
struct Lookup {
  const Table* table;
  Index rows, dim, row_stride;  // rows below 2^32 - 1; strides in elements, below 2^31
  const void* ids;              // n_ids of int32 or int64
  Index n_ids;                  // below 2^40; a bag has fewer than 2^31
  const void* offsets;   // starts of the bags, int32 or int64; null: every bag has `fixed` ids
  Index n_offsets;       // bags, or bags + 1 with the end of the last
  Index fixed;           // 1 where nothing is pooled
  const Table* weights;  // n_ids factors, or null
  Index bags, mode;
  Index padding;  // this id is skipped; -1: none. Always -1 with kNone: a gather reads the row
  Index flags;    // kAlignedOut: out and out_stride are multiples of VEC elements
  Out* out;       // (bags, dim)
  Index out_stride;
  Index* winner;  // (bags, dim) contiguous, or null: the position among the ids of each maximum,
                  // n_ids if there is none
  Index first_block;  // in embedding_samples.cu: vectors << 32 | ids of a sample, of the lookups
                      // before
  Index number;       // by which errors name it, below 2^23
};

constexpr int kVec = RECAST_VEC;
constexpr unsigned kNoRow = ~0u;

struct Span {
  Index start, end;
};

// Where the offsets say that a bag starts and ends.
__device__ __forceinline__ Span bag_of(const Lookup& lookup, Index bag) {
  if (lookup.offsets == nullptr) return {bag * lookup.fixed, (bag + 1) * lookup.fixed};
  const bool wide = lookup.flags & kWideOffsets, last = bag + 1 >= lookup.n_offsets;
  const Index start = recast::integer(lookup.offsets, wide, bag);
  const Index end = last ? lookup.n_ids : recast::integer(lookup.offsets, wide, bag + 1);
  return {start, end};
}

// The same, clamped to the ids there are; `reports`: whether to report wrong offsets.
__device__ __forceinline__ Span checked(const Lookup& lookup, Index bag, const Span& span,
                                        bool reports, Errors* errors) {
  const Index n = lookup.n_ids, start = span.start, end = span.end;
  const bool wrong = start < 0 || start > end || end > n || (bag == 0 && start != 0);
  if (!wrong || lookup.offsets == nullptr) return span;
  if (reports) report(&errors->bad_offsets, &errors->first_offset, lookup.number, bag);
  const Index from = start < 0 ? 0 : start > n ? n : start, to = end > n ? n : end;
  return {from, to < from ? from : to};
}

// Reads the ids and rows of a lookup; holds what it needs of it in registers.
struct Reader {
  const Table* table;
  const void* ids;
  Index start;
  unsigned rows, padding, stride;
  int number, dim;
  bool wide;
  Errors* errors;

  __device__ __forceinline__ Reader(const Lookup& lookup, Errors* errors)
      : table(recast::in_global(lookup.table)),
        ids(recast::in_global(lookup.ids)),
        start(0),
        rows(static_cast<unsigned>(lookup.rows)),
        padding(static_cast<unsigned>(lookup.padding)),
        stride(static_cast<unsigned>(lookup.row_stride)),
        number(static_cast<int>(lookup.number)),
        dim(static_cast<int>(lookup.dim)),
        wide(lookup.flags & kWideIds),
        errors(errors) {}

  __device__ __forceinline__ Index id(Index place) const {
    return recast::integer(ids, wide, place);
  }

  __device__ __forceinline__ bool is_bad(Index id) const { return static_cast<UInt64>(id) >= rows; }

  __device__ __forceinline__ void report_bad(Index place) const {
    report(&errors->bad_ids, &errors->first_id, number, place);
  }

  // The row of an id, or kNoRow for padding and ids outside the table.
  __device__ __forceinline__ unsigned row_of(Index id) const {
    return is_bad(id) || static_cast<unsigned>(id) == padding ? kNoRow : static_cast<unsigned>(id);
  }

  __device__ __forceinline__ recast::Pack<Table, kVec> read(unsigned row, int column) const {
    return recast::load<kVec>(table + static_cast<UInt64>(row) * stride + column);
  }
};
