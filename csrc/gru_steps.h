// Which sequences take part in each step of a recurrent unit, and where their rows lie.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "tensor.h"

namespace recast::gru {

constexpr int64_t kSequences = 4;  // processed together: they share each load of the weight
constexpr int64_t kWorthThreads = 1 << 12;  // numbers of h from which a second thread pays

// Sequences are taken longest first, so those that take part in a step come before the others.
// Gates and what else is computed for each step lie in `row`s, without padding; states and scores
// lie in `home`s, as the caller has them.
struct Call {
  int64_t sequences, steps, size, width;  // `width`: size, padded to whole registers
  bool keeps, pads;
  float padding;                 // for the states beyond a length, if it `pads`
  const int64_t *who, *lengths;  // of each sequence: which one it is for the caller, its steps
  const int64_t *step_rows, *sequence_rows, *step_homes, *sequence_homes;
  const float *weight, *bias;           // padded
  const float *start, *scores, *zeros;  // null: zeros, ones
  float *gates, *kept, *out, *last;
  const float *of_out, *of_last;
  float *of_gates, *of_inner, *before, *of_scores, *of_start;

  int64_t active(int64_t t, int64_t first) const {
    int64_t n = 0;
    while (n < kSequences && first + n < sequences && lengths[first + n] > t) ++n;
    return n;
  }
  int64_t row(int64_t t, int64_t sequence) const { return step_rows[t] + sequence_rows[sequence]; }
  int64_t home(int64_t t, int64_t sequence) const {
    return step_homes[t] + sequence_homes[sequence];
  }
  float score(int64_t home) const { return scores == nullptr ? 1.0f : scores[home]; }
};

// How a call's rows lie. `counts`: of packed sequences, how many take part in each step, falling;
// `lengths`: of padded ones, in any order, each in [1, steps]. With `rows_turned` and
// `homes_turned` step follows step in memory, else sequence follows sequence.
struct Layout {
  pybind11::object counts, lengths;
  int64_t sequences, steps;
  bool rows_turned, homes_turned;

  explicit Layout(const pybind11::tuple& given)
      : counts(given[0]),
        lengths(given[1]),
        sequences(given[2].cast<int64_t>()),
        steps(given[3].cast<int64_t>()),
        rows_turned(given[4].cast<bool>()),
        homes_turned(given[5].cast<bool>()) {}
};

class Steps {
 public:
  using Numbers = std::vector<int64_t>;

  Steps(const Layout& layout, int64_t size, int64_t width, bool keeps)
      : zeros_(static_cast<size_t>(size), 0.0f) {
    const auto sequences = static_cast<size_t>(layout.sequences);
    lengths_.assign(sequences, layout.steps);
    who_.resize(sequences);
    std::iota(who_.begin(), who_.end(), int64_t{0});
    homes = rows = layout.sequences * layout.steps;
    lay(layout, layout.rows_turned, step_rows_, sequence_rows_);
    lay(layout, layout.homes_turned, step_homes_, sequence_homes_);
    if (!layout.counts.is_none()) {
      packed(numbers(layout.counts, layout.steps));
      step_homes_ = step_rows_;
      sequence_homes_ = sequence_rows_ = who_;
    } else if (!layout.lengths.is_none()) {
      padded(numbers(layout.lengths, layout.sequences), layout.steps);
    }
    call = Call{};
    call.sequences = layout.sequences, call.steps = layout.steps;
    call.size = size, call.width = width, call.keeps = keeps;
    call.pads = !layout.lengths.is_none();
    call.who = who_.data(), call.lengths = lengths_.data(), call.zeros = zeros_.data();
    call.step_rows = step_rows_.data(), call.sequence_rows = sequence_rows_.data();
    call.step_homes = step_homes_.data(), call.sequence_homes = sequence_homes_.data();
  }

  // Each thread takes every n-th group, as the first are the longest.
  template <class Function>
  void each(int threads, const Function& function) const {
    const int64_t groups = (call.sequences + kSequences - 1) / kSequences;
    const size_t scratch = static_cast<size_t>(4 * kSequences * call.width);
    if (groups <= 1 || call.sequences * call.size < kWorthThreads) threads = 1;
    const int64_t parts = std::max(threads, 1);
    parallel_static(threads, parts, [&](int64_t part, int) {
      std::vector<float> own(scratch, 0.0f);
      for (int64_t i = part; i < groups; i += parts) function(i * kSequences, own.data());
    });
  }

  // What a tensor of `size` whole numbers holds.
  static Numbers numbers(const pybind11::handle& tensor, int64_t size) {
    TensorView view;
    const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dims == 1 &&
                      view.dtype == Dtype::int64 && view.size[0] == size;
    if (!read) throw pybind11::value_error("gru: the batch sizes or lengths do not fit");
    Numbers found(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i)
      found[static_cast<size_t>(i)] =
          reinterpret_cast<const int64_t*>(view.data)[i * view.stride[0]];
    return found;
  }

  Call call;
  int64_t rows, homes;

 private:
  static void lay(const Layout& layout, bool turned, Numbers& of_steps, Numbers& of_sequences) {
    for (int64_t t = 0; t < layout.steps; ++t)
      of_steps.push_back(turned ? t * layout.sequences : t);
    for (int64_t s = 0; s < layout.sequences; ++s)
      of_sequences.push_back(turned ? s : s * layout.steps);
  }

  void packed(const Numbers& counts) {
    rows = 0;
    std::fill(lengths_.begin(), lengths_.end(), int64_t{0});
    for (size_t t = 0; t < counts.size(); ++t) {
      const int64_t here = counts[t];
      const auto most = t == 0 ? static_cast<int64_t>(who_.size()) : counts[t - 1];
      if (here < 0 || here > most || (t == 0 && here != most))
        throw pybind11::value_error("gru: the batch sizes do not fall");
      step_rows_[t] = rows;
      rows += here;
      for (int64_t s = 0; s < here; ++s) ++lengths_[static_cast<size_t>(s)];
    }
    homes = rows;
  }

  void padded(const Numbers& lengths, int64_t steps) {
    Numbers places(static_cast<size_t>(steps) + 2, 0), first, homes_of = sequence_homes_;
    rows = 0;
    for (const int64_t length : lengths) {
      if (length < 1 || length > steps) throw pybind11::value_error("gru: a length does not fit");
      first.push_back(rows);
      rows += length;
      ++places[static_cast<size_t>(steps - length) + 1];
    }
    std::partial_sum(places.begin(), places.end(), places.begin());
    for (size_t s = 0; s < lengths.size(); ++s) {
      const auto at = static_cast<size_t>(places[static_cast<size_t>(steps - lengths[s])]++);
      who_[at] = static_cast<int64_t>(s);
      lengths_[at] = lengths[s];
      sequence_rows_[at] = first[s];
      sequence_homes_[at] = homes_of[s];
    }
    std::iota(step_rows_.begin(), step_rows_.end(), int64_t{0});
  }

  std::vector<float> zeros_;
  Numbers who_, lengths_, step_rows_, sequence_rows_, step_homes_, sequence_homes_;
};

}  // namespace recast::gru
