// Linear layers on panels of samples on the CPU: a panel holds a few samples as columns.
#pragma once

#include <cstdint>

namespace recast::panels {

// y = relu((W x + bias) scale + shift), or without the relu; `w` (width, depth), others (width).
struct Weights {
  const float* w;
  const float* bias;   // may be null
  const float* scale;  // null: neither this nor the shift
  const float* shift;
  int64_t width, depth;
  bool relu;
};

// Samples in a panel, by the instruction set in force.
int64_t samples();

// Packs a contiguous (rows, depth) matrix into panels, the last one padded with zeros.
void pack(const float* x, int64_t rows, int64_t depth, float* into);

// The inverse.
void unpack(const float* x, int64_t rows, int64_t width, float* into);

// The same bits for any number of panels.
void layer(const Weights& weights, const float* x, int64_t panels, float* y);

}  // namespace recast::panels
