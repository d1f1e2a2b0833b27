// Loads looked-up feature rows for dot_interaction.cu. Included there by dot_rows.cuh, inside its
// anonymous namespace.

#include "dot_source.cuh"

// The ids of one feature of a sample. `row`: the table row of a bag's only id; null if that is
// invalid or padding, or the bag is empty. count -1: the feature is given, not looked up.
struct Bag {
  Index start;
  const Table* row;
  int count;
};

__device__ __forceinline__ bool is_single(const Bag& bag) {
  return bag.count == 0 || bag.count == 1;
}

__device__ __forceinline__ Bag bag_of(const Source& source, Index sample, Errors* errors) {
  const auto [start, count] = clamped_ids(source, sample, ends_of(source, sample), errors);
  const unsigned row = count == 1 ? row_of(source, start, errors) : kNoRow;
  const Table* const at =
      row == kNoRow ? nullptr : source.table + static_cast<UInt64>(row) * source.stride;
  return {start, at, count};
}

// Finds the bags of `count` samples. All ids are loaded together, before any row is.
__device__ __forceinline__ void find_bags(const Source* sources, Index first, int count, Bag* bags,
                                          Errors* errors) {
  for (int w = threadIdx.x; w < count * kF; w += RECAST_BLOCK) {
    const Source& source = sources[w % kF];
    bags[w] =
        source.table == nullptr ? Bag{0, nullptr, -1} : bag_of(source, first + w / kF, errors);
  }
  __syncthreads();
}

// Rounds to the dtype of given features, then to that of the operands.
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

// Columns [c, c + kVec) of the sum or mean of a bag of several ids.
__device__ __forceinline__ recast::Pack<Element, kVec> pooled_row(const Source& source,
                                                                  const Bag& bag, int c,
                                                                  Errors* errors) {
  float sum[kVec] = {};
  int counted = 0;
  for (int i = 0; i < bag.count; ++i) {
    const unsigned row = row_of(source, bag.start + i, c == 0 ? errors : nullptr);
    if (row == kNoRow) continue;
    const auto read =
        recast::load<kVec>(source.table + static_cast<UInt64>(row) * source.stride + c);
    ++counted;
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[e] += recast::widen(read.at[e]);
  }
  const float by = (source.flags & kMean) && counted > 1 ? static_cast<float>(counted) : 1.0f;
#pragma unroll
  for (int e = 0; e < kVec; ++e) sum[e] /= by;
  return rounded(sum);
}

// Whether table rows can be copied to shared memory by cp.async, unconverted.
constexpr bool kCopies =
    RECAST_TABLE == RECAST_IN && RECAST_TABLE == RECAST_ELEMENT && kVec * sizeof(Table) == 16;
constexpr int kInFlight = 4;  // otherwise, loads of a thread in flight

// Loads the features of bags with one id, or none, to shared memory.
__device__ __forceinline__ void load_single_rows(const Source* sources, const Bag* bags, int count,
                                                 unsigned char* to, int bytes) {
  constexpr int packs = kD / kVec;
  const int all = count * kF * packs;
  for (int from = threadIdx.x; from < all; from += kInFlight * RECAST_BLOCK) {
    [[maybe_unused]] recast::Pack<Table, kVec> read[kInFlight];
    if constexpr (!kCopies) {
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int w = from + k * RECAST_BLOCK;
        const Table* const row = w < all ? bags[w / packs].row : nullptr;
        const bool valid = row != nullptr;
        read[k] = valid ? recast::load<kVec>(row + w % packs * kVec) : recast::zeros<kVec, Table>();
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
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
