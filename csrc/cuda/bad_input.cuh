// Counts of bad input that kernels skip: included by embedding_lookups.cuh, dot_source.cuh and
// piece_ids.cuh inside anonymous namespaces.

// Zeroed by the host: ids outside their tables, and offsets outside their ids. `first_*` is the
// first of them in the order of sources and places, as ~(source << 40 | place), so that an atomic
// maximum finds it.
struct Errors {
  UInt64 bad_ids, first_id, bad_offsets, first_offset;
};

__device__ __forceinline__ void report(UInt64* counter, UInt64* first, Index source, Index place) {
  atomicAdd(counter, 1ull);
  atomicMax(first, ~(static_cast<UInt64>(source) << 40 | static_cast<UInt64>(place)));
}
