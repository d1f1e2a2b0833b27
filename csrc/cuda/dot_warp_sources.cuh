// dot_warp_rows.cuh where rows may be looked up: a lane loads the ids of its row two samples ahead,
// and their offsets three ahead. Included by dot_warps.cu inside its anonymous namespace.

#include "dot_source.cuh"

#define RECAST_SOURCES , const Source* __restrict__ sources, Errors* errors

// Rows of tables of another dtype are copied to a staging buffer first, then converted.
constexpr bool kStages = RECAST_TABLE != RECAST_ELEMENT % 3;
constexpr int kTablePacks = kD * static_cast<int>(sizeof(Table)) / 16;
constexpr int kTablePacksOfLane = (kF * kTablePacks + 31) / 32;
constexpr int kStagedBytes = kStages ? kF * kTablePacks * 16 : 0;

// Set in an address (16-byte aligned, so the bit is free) where zeros are to be written instead.
constexpr UInt64 kNothing = 1;

struct RowLoader {
  UInt64* from;  // in shared memory
  Row mine;      // the row of this lane, where it is given
  Source own;    // or its lookup
  const Source* sources;
  Errors* errors;
  Index step, batch;
  bool looks_up;
  unsigned given;  // bit r: row r is given
  Ids ids;         // of the sample whose copies are next
  Ids next;        // of the sample after that
  Ends then;       // of the one after `next`
  UInt64 id;       // the first of `next`

  __device__ __forceinline__ RowLoader(UInt64* from, const Row& mine, const Source* sources,
                                       Errors* errors, Index first, Index step, Index batch)
      : from(from), mine(mine), own{}, sources(sources), errors(errors), step(step), batch(batch) {
    if (lane() < kF) own = sources[lane()];
    looks_up = own.table != nullptr;
    given = __ballot_sync(0xffffffffu, !looks_up);
    ids = next = {0, 0};
    then = {0, 0};
    id = 0;
    if (looks_up && first < batch) then = ends_of(own, first);
    prefetch_ids(first);
  }

  // Starts the loads of ids and offsets, where `sample` is the next to be copied; waits for earlier
  // loads only.
  __device__ __forceinline__ void prefetch_ids(Index sample) {
    if (!looks_up || sample >= batch) return;
    next = clamped_ids(own, sample, then, errors);
    if (next.count == 1) id = read_integer(own.ids, own.flags & kWideIds, next.start);
    if (sample + step < batch) then = ends_of(own, sample + step);
  }

  // Writes the addresses of the rows of `sample`, whose copies are next.
  __device__ __forceinline__ void locate(Index sample) {
    ids = next;
    UInt64 at = 0;
    if (looks_up) {
      unsigned row = kNoRow;
      if (ids.count == 1)
        row = row_of_id(own, value_of(id, own.flags & kWideIds), ids.start, errors);
      const bool valid = row != kNoRow;
      at = reinterpret_cast<UInt64>(own.table + (valid ? row * own.stride : 0));
      at |= valid ? 0 : kNothing;
    } else {
      at = reinterpret_cast<UInt64>(mine.at + sample * mine.stride);
    }
    if (lane() < kF) from[lane()] = at;
    prefetch_ids(sample + step);
  }

  // Starts the copies; a __syncwarp must be between locate() and this.
  __device__ __forceinline__ void start_copies(Element* to, unsigned char* staged) const {
#pragma unroll
    for (int k = 0; k < kTablePacksOfLane; ++k) {
      const auto [row, pack, valid] = place_of<kTablePacks>(k);
      if (!valid || (kStages && (given >> row & 1) && pack >= kPacks)) continue;
      unsigned char* const into =
          kStages ? staged + (row * kTablePacks + pack) * 16
                  : reinterpret_cast<unsigned char*>(to + row * kStride + pack * kVec);
      const UInt64 at = from[row];
      const auto* const start = reinterpret_cast<const unsigned char*>(at & ~kNothing);
      recast::async_copy_16(into, start + pack * 16, !(at & kNothing));
    }
  }

  // Converts what was staged, and sums the bags of several ids; `of`: the ids of the sample.
  __device__ __forceinline__ void finish(Element* to, const unsigned char* staged,
                                         const Ids& of) const {
    if constexpr (kStages) {
      constexpr int each = 16 / static_cast<int>(sizeof(Table));  // elements of a pack
#pragma unroll
      for (int k = 0; k < kTablePacksOfLane; ++k) {
        const auto [row, pack, valid] = place_of<kTablePacks>(k);
        if (!valid) continue;
        const unsigned char* const at = staged + (row * kTablePacks + pack) * 16;
        if (given >> row & 1) {
          if (pack < kPacks)
            recast::store<kVec>(to + row * kStride + pack * kVec,
                                recast::load<kVec>(reinterpret_cast<const Element*>(at)));
          continue;
        }
        const auto read = recast::load<each>(reinterpret_cast<const Table*>(at));
        recast::Pack<Element, each> made;
#pragma unroll
        for (int e = 0; e < each; ++e) recast::narrow(recast::widen(read.at[e]), made.at[e]);
        recast::store<each>(to + row * kStride + pack * each, made);
      }
    }
    unsigned many = __ballot_sync(0xffffffffu, looks_up && of.count > 1);
    if (many == 0) return;
    __syncwarp();
    for (; many != 0; many &= many - 1) {
      const int row = __ffs(many) - 1;
      const Index start = __shfl_sync(0xffffffffu, of.start, row);
      sum(sources[row], {start, __shfl_sync(0xffffffffu, of.count, row)}, to + row * kStride);
    }
    if (!kStages) __syncwarp();
  }

  // The sum or mean of a bag of several ids.
  __device__ __forceinline__ void sum(const Source& source, Ids of, Element* to) const {
    for (int c = lane() * kVec; c < kD; c += 32 * kVec) {
      float total[kVec] = {};
      int counted = 0;
      for (int i = 0; i < of.count; ++i) {
        const unsigned row = row_of(source, of.start + i, c == 0 ? errors : nullptr);
        if (row == kNoRow) continue;
        const auto read = recast::load<kVec>(source.table + row * source.stride + c);
        ++counted;
#pragma unroll
        for (int e = 0; e < kVec; ++e) total[e] += recast::widen(read.at[e]);
      }
      const float by = (source.flags & kMean) && counted > 1 ? static_cast<float>(counted) : 1.0f;
      Vector made;
#pragma unroll
      for (int e = 0; e < kVec; ++e) recast::narrow(total[e] / by, made.at[e]);
      recast::store<kVec>(to + c, made);
    }
  }
};
