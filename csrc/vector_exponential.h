// Included inside the namespace of a kernel, after parts.h, once per instruction set: see
// each_isa.h.

// e^x for x <= 0, to 2 units in the last place; 0 below the smallest normal number, NaN for NaN.
static inline Vector exponential(const Vector& x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Vector shifted = x * 1.44269504088896341f + kMagic;
  const Vector n = shifted - kMagic;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector y = Vector{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Bits power = (*reinterpret_cast<const Bits*>(&shifted) - 0x4B400000 + 127) << 23;
  const Vector whole = y * *reinterpret_cast<const Vector*>(&power);
  const Vector zero = Vector{};
  return x < -87.0f ? zero : whole;
}
