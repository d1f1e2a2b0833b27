// Feature rows of a dot interaction that are embedding lookups: their description, and how ids are
// read and checked. Included by dot_interaction.cu and dot_warps.cu inside their anonymous
// namespaces. A looked-up feature is the sum or the mean of the rows that a sample's ids name,
// rounded to the dtype of given features, as embedding_forward.cu would write it.

using recast::UInt64;

#include "bad_input.cuh"

using Table = recast::Dtype<RECAST_TABLE>::type;

enum Flag { kWideIds = 1, kWideOffsets = 2, kMean = 4 };

// One feature: eleven fields of 8 bytes, as the host writes them. table null: it is given, not
// looked up.
struct Source {
  const Table* table;
  Index rows, stride;  // rows below 2^32 - 1; the stride in elements
  const void* ids;     // n_ids of int32 or int64
  Index n_ids;
  const void* offsets;  // starts of the samples' bags; null: each has `fixed` ids
  Index n_offsets;
  Index fixed;
  Index padding;  // this id is skipped; -1: none
  Index flags;
  Index number;  // by which errors name it
};

// The ids of a sample.
struct Ids {
  Index start;
  int count;
};

constexpr unsigned kNoRow = ~0u;

// The row of the id at position `at`, or kNoRow for padding and ids outside the table. `errors` may
// be null.
__device__ __forceinline__ unsigned row_of_id(const Source& source, Index id, Index at,
                                              Errors* errors) {
  if (static_cast<UInt64>(id) >= static_cast<UInt64>(source.rows)) {
    if (errors != nullptr) report(&errors->bad_ids, &errors->first_id, source.number, at);
    return kNoRow;
  }
  return id == source.padding ? kNoRow : static_cast<unsigned>(id);
}

__device__ __forceinline__ unsigned row_of(const Source& source, Index at, Errors* errors) {
  const Index id = recast::integer(source.ids, source.flags & kWideIds, at);
  return row_of_id(source, id, at, errors);
}

// Loads an integer without using it yet: converting it to a signed value would wait for the load.
__device__ __forceinline__ UInt64 read_integer(const void* from, bool wide, Index at) {
  return wide ? static_cast<const UInt64*>(from)[at] : static_cast<const unsigned*>(from)[at];
}

__device__ __forceinline__ Index value_of(UInt64 read, bool wide) {
  return wide ? static_cast<Index>(read) : static_cast<int>(static_cast<unsigned>(read));
}

// The offsets of a sample's ids as loaded, before value_of().
struct Ends {
  UInt64 start, end;
};

__device__ __forceinline__ Ends ends_of(const Source& source, Index sample) {
  if (source.offsets == nullptr) return {0, 0};
  const bool wide = source.flags & kWideOffsets, is_last = sample + 1 >= source.n_offsets;
  return {read_integer(source.offsets, wide, sample),
          read_integer(source.offsets, wide, is_last ? sample : sample + 1)};
}

// The ids of a sample; wrong offsets are reported and clamped to the ids there are.
__device__ __forceinline__ Ids clamped_ids(const Source& source, Index sample, const Ends& ends,
                                           Errors* errors) {
  if (source.offsets == nullptr) return {sample * source.fixed, static_cast<int>(source.fixed)};
  const bool wide = source.flags & kWideOffsets;
  const Index n = source.n_ids;
  Index start = value_of(ends.start, wide);
  Index end = sample + 1 >= source.n_offsets ? n : value_of(ends.end, wide);
  if (start < 0 || start > end || end > n || (sample == 0 && start != 0)) {
    if (errors != nullptr)
      report(&errors->bad_offsets, &errors->first_offset, source.number, sample);
    start = start < 0 ? 0 : start > n ? n : start;
    end = end > n ? n : end;
    end = end < start ? start : end;
  }
  return {start, static_cast<int>(end - start)};
}
