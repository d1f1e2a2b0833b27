// Bernoulli numbers from the random stream of torch's CPU generator, some ten times as fast as
// torch draws them: the same numbers in the same order, and the generator is left where torch
// leaves it.

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::draws {

constexpr int kBlock = 624;  // numbers that the twister makes at a time
constexpr int kFar = 397;

struct Twister {
  uint32_t state[kBlock];
  int next;  // the number handed out next; kBlock: none left
};

}  // namespace recast::draws

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "torch_draws_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::draws {
namespace {

// The part of `torch.get_rng_state()` that is used here; the rest stays as it is.
struct State {
  uint64_t seed;
  int32_t left, seeded;
  uint64_t next;
  uint64_t state[kBlock];
};

TensorView contiguous(const py::handle& tensor, const char* what) {
  TensorView view;
  if (!TensorReader::get().read(tensor.ptr(), view)) throw py::value_error(what);
  int64_t stride = 1;
  for (int d = view.dims - 1; d >= 0; --d) {
    if (view.size[d] > 1 && view.stride[d] != stride) throw py::value_error(what);
    stride *= view.size[d];
  }
  return view;
}

// Draws one number per element, 1 with probability `p`: noise = value * number, x *= noise. Either
// tensor may be None; both are contiguous, of one size and dtype. `generator`: the bytes of
// torch.get_rng_state(), overwritten by the state after the draws. `before` and `after`: how many
// elements to skip first and last, which other ranks draw.
void bernoulli(const py::handle& generator, double p, double value, const py::handle& noise,
               const py::handle& x, int64_t before, int64_t after) {
  const TensorView held = contiguous(generator, "torch_draws: no generator state");
  if (held.dtype != Dtype::uint8 || held.numel() < static_cast<int64_t>(sizeof(State)))
    throw py::value_error("torch_draws: no generator state");
  const char* const wrong = "torch_draws: a tensor does not fit";
  const TensorView first = contiguous(noise.is_none() ? x : noise, wrong);
  const TensorView second = contiguous(x.is_none() ? noise : x, wrong);
  if (first.dtype != second.dtype || first.numel() != second.numel()) throw py::value_error(wrong);
  if (first.dtype != Dtype::float32 && first.dtype != Dtype::float64) throw py::value_error(wrong);

  State state;
  std::memcpy(&state, held.data, sizeof(State));
  Twister twister;
  for (int i = 0; i < kBlock; ++i) twister.state[i] = static_cast<uint32_t>(state.state[i]);
  // torch counts `left` down, and makes a new block when it would reach zero.
  twister.next = state.left == 1 ? kBlock : static_cast<int>(state.next);
  if (state.left < 1 || state.left > kBlock || twister.next > kBlock)
    throw py::value_error("torch_draws: no generator state");

  const auto limit = static_cast<int64_t>(std::ceil(std::ldexp(p, 53)));
  char* const to = noise.is_none() ? nullptr : first.data;
  char* const in = x.is_none() ? nullptr : second.data;
  RECAST_CHOOSE(skip)(twister, 2 * before);
  if (first.dtype == Dtype::float32) RECAST_CHOOSE(run_float)
  (twister, first.numel(), limit, value, reinterpret_cast<float*>(to),
   reinterpret_cast<float*>(in));
  else RECAST_CHOOSE(run_double)(twister, first.numel(), limit, value,
                                 reinterpret_cast<double*>(to), reinterpret_cast<double*>(in));
  RECAST_CHOOSE(skip)(twister, 2 * after);

  for (int i = 0; i < kBlock; ++i) state.state[i] = twister.state[i];
  state.next = static_cast<uint64_t>(twister.next);
  state.left = kBlock + 1 - twister.next;
  std::memcpy(held.data, &state, sizeof(State));
}

}  // namespace
}  // namespace recast::draws

void bind_torch_draws(py::module_& m) {
  m.def("bernoulli", &recast::draws::bernoulli, py::arg("generator"), py::arg("p"),
        py::arg("value"), py::arg("noise"), py::arg("x"), py::arg("before") = 0,
        py::arg("after") = 0);
}
