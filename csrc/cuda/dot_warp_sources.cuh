// The same where rows may be looked up: part of dot_warps.cu, inside its namespace. A lane reads
// the ids of its row two samples ahead, and what says where they are three ahead.

#include "dot_source.cuh"

#define RECAST_SOURCES , const Source* __restrict__ sources, Errors* errors

// Rows of tables of another dtype are first copied as they are.
constexpr bool kStages = RECAST_TABLE != RECAST_ELEMENT % 3;
constexpr int kTablePacks = kD * static_cast<int>(sizeof(Table)) / 16;
constexpr int kTableTurns = (kF * kTablePacks + 31) / 32;
constexpr int kStagedBytes = kStages ? kF * kTablePacks * 16 : 0;

// The bit of an address that says that nothing is to be read there.
constexpr Wide kNothing = 1;

struct Coming {
  Wide* from;  // in shared memory
  Row mine;    // what this lane knows of: its row, where that is given
  Source own;  // or where it is looked up
  const Source* sources;
  Errors* errors;
  Index step, batch;
  bool looks_up;
  unsigned given;  // bits of rows that are
  Ids ids;         // of the sample that comes
  Ids next;        // of the one behind it
  Ends then;       // of the one behind that
  Wide id;         // the first of `next`

  __device__ __forceinline__ Coming(Wide* from, const Row& mine, const Source* sources,
                                    Errors* errors, Index first, Index step, Index batch)
      : from(from), mine(mine), own{}, sources(sources), errors(errors), step(step), batch(batch) {
    if (lane() < kF) own = sources[lane()];
    looks_up = own.table != nullptr;
    given = __ballot_sync(0xffffffffu, !looks_up);
    ids = next = {0, 0};
    then = {0, 0};
    id = 0;
    if (looks_up && first < batch) then = ends_of(own, first);
    ahead(first);
  }

  // Starts the next loads, where `sample` is the next to be copied. Waits only for earlier loads.
  __device__ __forceinline__ void ahead(Index sample) {
    if (!looks_up || sample >= batch) return;
    next = cut(own, sample, then, errors);
    if (next.count == 1) id = read_integer(own.ids, own.flags & kWideIds, next.start);
    if (sample + step < batch) then = ends_of(own, sample + step);
  }

  // Finds out where the rows of `sample` are, the next to come.
  __device__ __forceinline__ void aim(Index sample) {
    ids = next;
    Wide at = 0;
    if (looks_up) {
      unsigned row = kNoRow;
      if (ids.count == 1)
        row = row_of_id(own, value_of(id, own.flags & kWideIds), ids.start, errors);
      const bool is_there = row != kNoRow;
      at = reinterpret_cast<Wide>(own.table + (is_there ? row * own.stride : 0));
      at |= is_there ? 0 : kNothing;
    } else {
      at = reinterpret_cast<Wide>(mine.at + sample * mine.stride);
    }
    if (lane() < kF) from[lane()] = at;
    ahead(sample + step);
  }

  // Copies them, after the lanes that found the rows have synchronised with the others.
  __device__ __forceinline__ void fetch(Element* to, unsigned char* staged) const {
#pragma unroll
    for (int k = 0; k < kTableTurns; ++k) {
      const auto [row, pack, is_there] = place_of<kTablePacks>(k);
      if (!is_there || (kStages && (given >> row & 1) && pack >= kPacks)) continue;
      unsigned char* const into =
          kStages ? staged + (row * kTablePacks + pack) * 16
                  : reinterpret_cast<unsigned char*>(to + row * kStride + pack * kVec);
      const Wide at = from[row];
      const auto* const start = reinterpret_cast<const unsigned char*>(at & ~kNothing);
      recast::async_copy_16(into, start + pack * 16, !(at & kNothing));
    }
  }

  // What has come, as numbers that are multiplied; `of`: the ids of its sample.
  __device__ __forceinline__ void take(Element* to, const unsigned char* staged,
                                       const Ids& of) const {
    if constexpr (kStages) {
      constexpr int each = 16 / static_cast<int>(sizeof(Table));  // elements of a pack
#pragma unroll
      for (int k = 0; k < kTableTurns; ++k) {
        const auto [row, pack, is_there] = place_of<kTablePacks>(k);
        if (!is_there) continue;
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
    unsigned several = __ballot_sync(0xffffffffu, looks_up && of.count > 1);
    if (several == 0) return;
    __syncwarp();
    for (; several != 0; several &= several - 1) {
      const int row = __ffs(several) - 1;
      const Index start = __shfl_sync(0xffffffffu, of.start, row);
      sum(sources[row], {start, __shfl_sync(0xffffffffu, of.count, row)}, to + row * kStride);
    }
    if (!kStages) __syncwarp();
  }

  // The sum, or mean, of several rows.
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
