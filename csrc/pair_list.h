// Pairs of feature vectors of a batch: which vectors, and where those of one sample are.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "feature_rows.h"
#include "parallel.h"

namespace recast::pairs {

struct List {
  int64_t count, dim;      // pairs, and the length of a vector
  const int64_t *li, *lj;  // of pair p: its vector on the left and on the right
};

// One sample, as the kernels see it.
struct Sample {
  List list;
  const float* const* left;
  const float* const* right;
  float **into_left, **into_right;  // pointed by Gradients
  float* columns;                   // room for one vector
};

// Vector elements below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

class Vectors {
 public:
  // False when the kernels do not take these tensors; `right` empty: the same vectors.
  bool read(const pybind11::list& left, const pybind11::list& right, const pybind11::handle& li,
            const pybind11::handle& lj) {
    if (!left_.read(left)) return false;
    same_ = right.size() == 0;
    if (!same_ && (!right_.read(right) || right_.batch() != batch() || right_.dim() != dim()))
      return false;
    return index(li, left_.count(), li_) && index(lj, rights().count(), lj_) &&
           li_.size() == lj_.size();
  }

  bool same() const { return same_; }
  int64_t batch() const { return left_.batch(); }
  int64_t dim() const { return left_.dim(); }
  int64_t count() const { return static_cast<int64_t>(li_.size()); }
  const FeatureRows& lefts() const { return left_; }
  const FeatureRows& rights() const { return same_ ? left_ : right_; }

  // function(b, sample) for each sample; samples are independent of each other.
  template <class Function>
  void each_sample(int threads, const Function& function) const {
    const auto run = [&](int64_t first, int64_t last) {
      static thread_local std::vector<const float*> rows;
      static thread_local std::vector<float*> into;
      static thread_local std::vector<float> columns;
      const auto lefts = static_cast<size_t>(left_.count());
      const auto all = lefts + (same_ ? 0 : static_cast<size_t>(right_.count()));
      rows.resize(all);
      into.resize(all);
      columns.resize(static_cast<size_t>(dim()));
      const size_t at = same_ ? 0 : lefts;
      const Sample sample{{count(), dim(), li_.data(), lj_.data()},
                          rows.data(),
                          rows.data() + at,
                          into.data(),
                          into.data() + at,
                          columns.data()};
      for (int64_t b = first; b < last; ++b) {
        left_.point(b, rows.data());
        if (!same_) right_.point(b, rows.data() + at);
        function(b, sample);
      }
    };
    const int64_t work = batch() * count() * dim();
    if (threads <= 1 || batch() <= 1 || work < kWorthThreads) return run(0, batch());
    const int64_t pieces = std::min<int64_t>(batch(), int64_t{threads} * 4);
    parallel_dynamic(threads, pieces, [&](int64_t i, int) {
      run(batch() * i / pieces, batch() * (i + 1) / pieces);
    });
  }

 private:
  // False when it names a vector that does not exist: plain torch reports that best.
  static bool index(const pybind11::handle& tensor, int64_t count, std::vector<int64_t>& into) {
    TensorView view;
    if (!TensorReader::get().read(tensor.ptr(), view)) return false;
    if (view.dtype != Dtype::int64 || view.dims != 1) return false;
    into.resize(static_cast<size_t>(view.size[0]));
    for (int64_t p = 0; p < view.size[0]; ++p) {
      int64_t k = reinterpret_cast<const int64_t*>(view.data)[p * view.stride[0]];
      k = k < 0 ? k + count : k;
      if (k < 0 || k >= count) return false;
      into[static_cast<size_t>(p)] = k;
    }
    return true;
  }

  FeatureRows left_, right_;
  bool same_ = true;
  std::vector<int64_t> li_, lj_;
};

// Where the gradients of the vectors go.
class Gradients {
 public:
  // `right` is empty when both sides are the same vectors. Throws when they do not fit.
  Gradients(const Vectors& of, const pybind11::list& left, const pybind11::list& right) : of_(of) {
    const bool good = left_.read(left) && left_.fits(of.lefts()) &&
                      (of.same() || (right_.read(right) && right_.fits(of.rights())));
    if (!good) throw pybind11::value_error("pairs: a gradient does not fit");
  }

  // Points `sample` to the gradients of sample b, and zeroes them.
  void start(int64_t b, const Sample& sample) const {
    zero(left_, b, sample.into_left);
    if (!of_.same()) zero(right_, b, sample.into_right);
  }

 private:
  static void zero(const FeatureRows& rows, int64_t b, float** into) {
    rows.point(b, into);
    for (int64_t f = 0; f < rows.count(); ++f) std::fill(into[f], into[f] + rows.dim(), 0.0f);
  }

  const Vectors& of_;
  FeatureRows left_, right_;
};

}  // namespace recast::pairs
