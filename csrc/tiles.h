// Tiles of a product, whose sums stay in registers: kTileRows rows by two registers. Included
// inside the namespace of a kernel, once per instruction set: see each_isa.h.

constexpr int kLanes = RECAST_LANES;
typedef float Vector __attribute__((vector_size(RECAST_LANES * 4), aligned(4), may_alias));
constexpr int kTileRows = kLanes == 16 ? 12 : 6;
constexpr int kPanel = 2 * kLanes;

static inline const Vector& at(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline Vector& at(float* p) { return *reinterpret_cast<Vector*>(p); }

// The height of the next tile when `left` rows remain: if possible, enough rows that sums do not
// wait for each other.
static inline int height(int64_t left) {
#if RECAST_LANES == 16
  if (left >= 12 && left != 13) return 12;
  if (left >= 8) return 8;
  if (left == 7) return 4;
  return static_cast<int>(left);
#else
  if (left == 8 || left == 7) return 4;
  return static_cast<int>(left < 6 ? left : 6);
#endif
}
