// Rows of a dot interaction that are looked up as they are read: part of dot_interaction.cu, inside
// its namespace.

#include "dot_source.cuh"

// The ids of a sample; `row` is the one row of a bag of one id, null where it does not count, as in
// a bag of none. Of a row that is given the count is -1.
struct Bag {
  Index start;
  const Table* row;
  int count;
};

__device__ __forceinline__ bool is_single(const Bag& bag) {
  return bag.count == 0 || bag.count == 1;
}

__device__ __forceinline__ Bag bag_of(const Source& source, Index sample, Errors* errors) {
  const auto [start, count] = cut(source, sample, ends_of(source, sample), errors);
  const unsigned row = count == 1 ? row_of(source, start, errors) : kNoRow;
  const Table* const at =
      row == kNoRow ? nullptr : source.table + static_cast<Wide>(row) * source.stride;
  return {start, at, count};
}

// The bags of `count` samples; their ids are read at once, before any row waits for one.
__device__ __forceinline__ void find_bags(const Source* sources, Index first, int count, Bag* bags,
                                          Errors* errors) {
  for (int w = threadIdx.x; w < count * kF; w += RECAST_BLOCK) {
    const Source& source = sources[w % kF];
    bags[w] =
        source.table == nullptr ? Bag{0, nullptr, -1} : bag_of(source, first + w / kF, errors);
  }
  __syncthreads();
}

// As given features would hold them.
__device__ __forceinline__ recast::Pack<Element, kVec> rounded(const float (&values)[kVec]) {
  recast::Pack<Element, kVec> pack;
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    In written;
    recast::narrow(values[e], written);
    narrow(recast::widen(written), pack.at[e]);
  }
  return pack;
}

// kVec columns of the sum of several rows, from column c on.
__device__ __forceinline__ recast::Pack<Element, kVec> looked_up(const Source& source,
                                                                 const Bag& bag, int c,
                                                                 Errors* errors) {
  float sum[kVec] = {};
  int counted = 0;
  for (int i = 0; i < bag.count; ++i) {
    const unsigned row = row_of(source, bag.start + i, c == 0 ? errors : nullptr);
    if (row == kNoRow) continue;
    const auto read = recast::load<kVec>(source.table + static_cast<Wide>(row) * source.stride + c);
    ++counted;
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[e] += recast::widen(read.at[e]);
  }
  const float by = (source.flags & kMean) && counted > 1 ? static_cast<float>(counted) : 1.0f;
#pragma unroll
  for (int e = 0; e < kVec; ++e) sum[e] /= by;
  return rounded(sum);
}

// Whether rows of tables go to shared memory as they are.
constexpr bool kCopies =
    RECAST_TABLE == RECAST_IN && RECAST_TABLE == RECAST_ELEMENT && kVec * sizeof(Table) == 16;
constexpr int kUnderWay = 4;  // else, reads of a thread at the same time

// Writes the rows that are one row of a table, or none, to shared memory.
__device__ __forceinline__ void look_up(const Source* sources, const Bag* bags, int count,
                                        unsigned char* to, int bytes) {
  constexpr int packs = kD / kVec;
  const int all = count * kF * packs;
  for (int from = threadIdx.x; from < all; from += kUnderWay * RECAST_BLOCK) {
    [[maybe_unused]] recast::Pack<Table, kVec> read[kUnderWay];
    if constexpr (!kCopies) {
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        const int w = from + k * RECAST_BLOCK;
        const Table* const row = w < all ? bags[w / packs].row : nullptr;
        const bool is_there = row != nullptr;
        read[k] =
            is_there ? recast::load<kVec>(row + w % packs * kVec) : recast::zeros<kVec, Table>();
      }
    }
#pragma unroll
    for (int k = 0; k < kUnderWay; ++k) {
      const int w = from + k * RECAST_BLOCK;
      if (w < all && is_single(bags[w / packs])) {
        const int s = w / (kF * packs), r = w % (kF * packs) / packs, c = w % packs * kVec;
        Element* const into = reinterpret_cast<Element*>(to + s * bytes) + r * kStride + c;
        if constexpr (kCopies) {
          const Table* row = bags[w / packs].row;
          const bool counts = row != nullptr;
          if (!counts) row = sources[r].table;
          recast::async_copy_16(into, row + c, counts);
        } else {
          float values[kVec];
#pragma unroll
          for (int e = 0; e < kVec; ++e) values[e] = 0.0f + recast::widen(read[k].at[e]);
          recast::store<kVec>(into, rounded(values));
        }
      }
    }
  }
}
