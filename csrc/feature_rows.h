// The feature vectors of a batch, read where they are: a list of (B, D) and (B, f, D) tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "tensor.h"

namespace recast {

// Whether the last dimension is contiguous.
inline bool unit_stride(const TensorView& view) {
  const int last = view.dims - 1;
  return view.size[last] <= 1 || view.stride[last] == 1 || view.numel() == 0;
}

// A (batch, columns) tensor of float32 with contiguous rows; false for any other.
inline bool read_rows(const pybind11::handle& tensor, int64_t batch, TensorView& view) {
  return TensorReader::get().read(tensor.ptr(), view) && view.dtype == Dtype::float32 &&
         view.dims == 2 && view.size[0] == batch && unit_stride(view);
}

class FeatureRows {
 public:
  // False when the kernels do not take these tensors.
  bool read(const pybind11::list& tensors) {
    const TensorReader& reader = TensorReader::get();
    for (size_t k = 0; k < tensors.size(); ++k) {
      TensorView view;
      if (!reader.read(tensors[k].ptr(), view) || view.dtype != Dtype::float32) return false;
      if (view.dims != 2 && view.dims != 3) return false;
      const int last = view.dims - 1;
      if (k == 0) {
        batch_ = view.size[0];
        dim_ = view.size[last];
      }
      if (view.size[0] != batch_ || view.size[last] != dim_ || !unit_stride(view)) return false;
      const int64_t count = view.dims == 3 ? view.size[1] : 1;
      blocks_.push_back({view.data, count, view.stride[0], view.dims == 3 ? view.stride[1] : 0});
      count_ += count;
    }
    return count_ > 0;
  }

  bool fits(const FeatureRows& other) const {
    return batch_ == other.batch_ && dim_ == other.dim_ && count_ == other.count_;
  }

  int64_t batch() const { return batch_; }
  int64_t dim() const { return dim_; }
  int64_t count() const { return count_; }

  // rows[f] = where vector f of sample b starts, f < count().
  template <class Pointer>
  void point(int64_t b, Pointer* rows) const {
    for (const Block& block : blocks_) {
      auto* row = reinterpret_cast<float*>(block.data) + b * block.batch_stride;
      for (int64_t f = 0; f < block.count; ++f) *rows++ = row + f * block.feature_stride;
    }
  }

 private:
  struct Block {
    char* data;
    int64_t count;  // vectors of this tensor
    int64_t batch_stride, feature_stride;
  };

  int64_t batch_ = 0, dim_ = 0, count_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace recast
