// Dice of rows, forward and backward. Included once per instruction set: see each_isa.h.

namespace recast::dice::RECAST_ISA {

// out = x (p + alpha (1 - p)), `count` columns of one row; `step` is 0 for one alpha, else 1.
static void forward(const float* x, const float* p, const float* alpha, int64_t step, int64_t count,
                    float* out) {
  if (step == 0) {
    const float a = alpha[0];
    for (int64_t c = 0; c < count; ++c) out[c] = x[c] * (p[c] + a * (1.0f - p[c]));
    return;
  }
  for (int64_t c = 0; c < count; ++c) out[c] = x[c] * (p[c] + alpha[c] * (1.0f - p[c]));
}

// Writes the gradients of x and of the argument of the sigmoid p, and adds those of alpha, one per
// column, to `of_alpha`.
static void backward(const float* g, const float* x, const float* p, const float* alpha,
                     int64_t step, int64_t count, float* of_x, float* of_gate, float* of_alpha) {
  for (int64_t c = 0; c < count; ++c) {
    const float a = alpha[step == 0 ? 0 : c], rest = 1.0f - p[c], along = g[c] * x[c];
    of_x[c] = g[c] * (p[c] + a * rest);
    of_gate[c] = along * (1.0f - a) * p[c] * rest;
    of_alpha[c] += along * rest;
  }
}

}  // namespace recast::dice::RECAST_ISA
