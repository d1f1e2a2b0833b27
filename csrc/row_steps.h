// The steps of optimizers with moments, on one vector of a row. Included by kernel headers, inside
// their namespace.

// From the weights w of the last step to those of this one, whose gradient is g; likewise the
// moments, from what is left of those by now: but the first of adam, and the second unless the
// table is stepped whole, from those of the last step.
template <Action action, bool whole, class V>
static inline void take_step(const Target& to, V g, V& w, V& one, V& two) {
  if (to.l2 != 0.0f) g = g + w * to.l2;
  if (action == Action::adam) {
    if (to.decay != 0.0f) w = w - w * to.decay;
    one = (g - one) * to.share + one;
    two = whole ? two + g * g * to.second_share : (g * g - two) * to.second_share + two;
    w = w + one / (root(two) + to.eps) * -to.lr;
  } else if (action == Action::adagrad) {
    one = one + g * g;
    w = w + g * -to.lr / (root(one) + to.eps);
  } else if (action == Action::momentum) {
    one = one + g * to.share;
    w = w + (to.ahead == 0.0f ? one : one * to.ahead + g) * -to.lr;
  } else {
    one = one + g * g * to.share;
    const V below = root(one) + to.eps;
    if (to.second.data != nullptr) two = two + g / below;
    w = to.second.data == nullptr ? w + g * -to.lr / below : w + two * -to.lr;
  }
}
