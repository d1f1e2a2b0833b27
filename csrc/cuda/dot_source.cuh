// Where the rows of a dot interaction come from that are looked up as they are read: part of
// dot_interaction.cu and dot_warps.cu, inside their namespaces. A row of a sample is the sum, or
// the mean, of the rows that its ids name, rounded to the dtype of given features, as
// embedding_forward.cu would write it.

using recast::Wide;
using Table = recast::Dtype<RECAST_TABLE>::type;

enum Flag { kWideIds = 1, kWideOffsets = 2, kMean = 4 };

// Where one row of all samples comes from, eleven fields of 8 bytes; table null: it is given.
struct Source {
  const Table* table;
  Index rows, stride;  // rows below 2^32 - 1; the stride in elements
  const void* ids;     // n_ids of int32 or int64
  Index n_ids;
  const void* offsets;  // starts of the samples' bags; null: each has `fixed` ids
  Index n_offsets;
  Index fixed;
  Index padding;  // this id is left out; -1: none
  Index flags;
  Index number;  // what errors call it
};

// As of embedding_forward.cu: what was wrong, and ~(lookup << 40 | place) of the first of them.
struct Errors {
  Wide bad_ids, first_id, bad_offsets, first_offset;
};

// The ids of a sample.
struct Ids {
  Index start;
  int count;
};

constexpr unsigned kNoRow = ~0u;

__device__ __forceinline__ void report(Wide* counter, Wide* first, Index lookup, Index place) {
  atomicAdd(counter, 1ull);
  atomicMax(first, ~(static_cast<Wide>(lookup) << 40 | static_cast<Wide>(place)));
}

// The row of an id, which stands at a place, or kNoRow where it does not count; `errors` may be
// null.
__device__ __forceinline__ unsigned row_of_id(const Source& source, Index id, Index at,
                                              Errors* errors) {
  if (static_cast<Wide>(id) >= static_cast<Wide>(source.rows)) {
    if (errors != nullptr) report(&errors->bad_ids, &errors->first_id, source.number, at);
    return kNoRow;
  }
  return id == source.padding ? kNoRow : static_cast<unsigned>(id);
}

__device__ __forceinline__ unsigned row_of(const Source& source, Index at, Errors* errors) {
  const Index id = recast::integer(source.ids, source.flags & kWideIds, at);
  return row_of_id(source, id, at, errors);
}

// An integer that is being loaded; only using its value waits for the load.
__device__ __forceinline__ Wide read_integer(const void* from, bool wide, Index at) {
  return wide ? static_cast<const Wide*>(from)[at] : static_cast<const unsigned*>(from)[at];
}

__device__ __forceinline__ Index value_of(Wide read, bool wide) {
  return wide ? static_cast<Index>(read) : static_cast<int>(static_cast<unsigned>(read));
}

// Where the ids of a sample begin and end, as it is read, if offsets say so.
struct Ends {
  Wide start, end;
};

__device__ __forceinline__ Ends ends_of(const Source& source, Index sample) {
  if (source.offsets == nullptr) return {0, 0};
  const bool wide = source.flags & kWideOffsets, is_last = sample + 1 >= source.n_offsets;
  return {read_integer(source.offsets, wide, sample),
          read_integer(source.offsets, wide, is_last ? sample : sample + 1)};
}

// The ids of a sample; wrong offsets are clamped to the ids there are.
__device__ __forceinline__ Ids cut(const Source& source, Index sample, const Ends& ends,
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
