// The inner loop of steps on whole tables. Included once per instruction set: see each_isa.h, and
// row_update_kernel.h for what must not be included here.

namespace recast::rows::RECAST_ISA {

#include "row_lanes.h"
#include "row_steps.h"

// Steps the numbers [first, first + count) of a table, whose gradient is `gradient`.
template <Action action>
static void step_as(const Target& target, const float* gradient, int64_t first, int64_t count) {
  const Target to = target;  // no store can alias it
  const bool alone = to.state.data == nullptr, paired = to.second.data != nullptr;
  auto* const weight = reinterpret_cast<float*>(to.weight) + first;
  auto* const one = alone ? nullptr : reinterpret_cast<float*>(to.state.data) + first;
  auto* const two = paired ? reinterpret_cast<float*>(to.second.data) + first : nullptr;
  each_column(count, [&](auto like, int64_t c) {
    using V = decltype(like);
    V w = load<V>(weight + c), m{}, v{};
    if (!alone) m = load<V>(one + c) * to.keep[0];
    if (paired) v = load<V>(two + c) * to.keep[1];
    take_step<action, true>(to, load<V>(gradient + c), w, m, v);
    store<V>(weight + c, w);
    if (!alone) store<V>(one + c, m);
    if (paired) store<V>(two + c, v);
  });
}

static void step_numbers(const Target& to, const float* gradient, int64_t first, int64_t count) {
  if (to.action == Action::adam) return step_as<Action::adam>(to, gradient, first, count);
  if (to.action == Action::adagrad) return step_as<Action::adagrad>(to, gradient, first, count);
  if (to.action == Action::momentum) return step_as<Action::momentum>(to, gradient, first, count);
  step_as<Action::rmsprop>(to, gradient, first, count);
}

}  // namespace recast::rows::RECAST_ISA
