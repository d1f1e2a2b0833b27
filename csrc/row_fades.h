// How much a row's moments fade with its age. Included by kernel headers, inside their namespace.

// Steps from the row's last gradient to this one.
static inline int64_t age(const Ages& ages, int32_t step) {
  return ages.now - (step < 0 ? -static_cast<int64_t>(step) : step);
}

// beta^k of the first (0) or the second moment (1): not less than the smallest normal number, so
// that an infinite moment stays infinite.
static inline float fade(const Ages& ages, int which, int64_t k) {
  if (k < ages.known) return ages.fades[which * ages.known + k];
  if (ages.betas[which] == 0.0) return 0.0f;
  double power = 1.0, base = ages.betas[which];
  for (; k > 0; k >>= 1, base *= base)
    if ((k & 1) != 0) power *= base;
  return power < __FLT_MIN__ ? __FLT_MIN__ : static_cast<float>(power);
}
