// The heads of an attention, (N, H, rows, elements), as both of its kernels read them.

#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "tensor.h"

namespace recast::heads {

// The vectors of one head: row j starts at data + j * step.
struct Rows {
  float* data;
  int64_t step;
};

// `n` rounded up to whole registers.
inline int64_t padded(int64_t n) {
  const int64_t lanes = isa() == Isa::avx512 ? 16 : isa() == Isa::avx2 ? 8 : 4;
  return (n + lanes - 1) / lanes * lanes;
}

// (N, H, rows, elements) of float32 with contiguous vectors.
inline bool reads(const pybind11::handle& tensor, TensorView& view) {
  return TensorReader::get().read(tensor.ptr(), view) && view.dtype == Dtype::float32 &&
         view.dims == 4 && (view.size[3] <= 1 || view.stride[3] == 1 || view.numel() == 0);
}

inline bool like(const TensorView& a, const TensorView& b, int dims) {
  for (int d = 0; d < dims; ++d)
    if (a.size[d] != b.size[d]) return false;
  return true;
}

// The rows of one head; null where `view` is.
inline Rows rows(const TensorView& view, int64_t n, int64_t head) {
  if (!view.data) return {nullptr, 0};
  auto* const start = reinterpret_cast<float*>(view.data);
  return {start + n * view.stride[0] + head * view.stride[1], view.stride[2]};
}

// How many queries are done together: their scores with `keys` stay in L1, which saves up to a
// quarter of the time for 256 places. Fewer than 16 would make small products.
inline int64_t block_of(int64_t keys) { return std::max<int64_t>(16, 8192 / keys); }

// Calls run(first, last) for parts of the heads, on several threads if `work`, the multiply-adds of
// all of them, is worth it.
template <class Function>
void in_parts(int threads, int64_t count, int64_t work, const Function& run) {
  constexpr int64_t kWorthThreads = 1 << 16;  // for less a second thread costs more than it saves
  if (threads <= 1 || count <= 1 || work < kWorthThreads) return run(0, count);
  const int64_t pieces = std::min<int64_t>(count, int64_t{threads} * 4);
  parallel_dynamic(threads, pieces,
                   [&](int64_t i, int) { run(count * i / pieces, count * (i + 1) / pieces); });
}

// into[i] is a part of `memory` of sizes[i] zeros.
template <int kParts>
void divide(std::vector<float>& memory, const int64_t (&sizes)[kParts], float* (&into)[kParts]) {
  constexpr int64_t kLine = 64;  // a register read across two lines costs two reads
  int64_t whole = 0;
  for (const int64_t size : sizes) whole += size;
  memory.assign(static_cast<size_t>(whole) + kLine / sizeof(float), 0.0f);
  const auto first = reinterpret_cast<uintptr_t>(memory.data());
  float* next = reinterpret_cast<float*>((first + kLine - 1) / kLine * kLine);
  for (int i = 0; i < kParts; ++i) into[i] = next, next += sizes[i];
}

}  // namespace recast::heads
