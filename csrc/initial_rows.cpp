// The initial values of rows, bit for bit those of runtime/ranks/initial_rows.py, which explains
// them.
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "parallel.h"
#include "tensor.h"

// A product and a sum in one instruction would round once where torch rounds twice.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

namespace py = pybind11;
using recast::Dtype;
using recast::TensorReader;
using recast::TensorView;

namespace {

constexpr int64_t kWorthThreads = 1 << 12;  // values
constexpr double kLn2 = 0.6931471805599453;

constexpr double kA[8] = {2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
                          45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
                          133.14166789178437745, 3.387132872796366608};
constexpr double kB[8] = {
    5226.495278852854561,  28729.085735721942674, 39307.89580009271061,  21213.794301586595867,
    5394.1960214247511077, 687.1870074920579083,  42.313330701600911252, 1.0};
constexpr double kC[8] = {7.7454501427834140764e-4, 0.0227238449892691845833,
                          0.24178072517745061177,   1.27045825245236838258,
                          3.64784832476320460504,   5.7694972214606914055,
                          4.6303378461565452959,    1.42343711074968357734};
constexpr double kD[8] = {1.05075007164441684324e-9, 5.475938084995344946e-4,
                          0.0151986665636164571966,  0.14810397642748007459,
                          0.68976733498510000455,    1.6763848301838038494,
                          2.05319162663775882187,    1.0};

template <int N>
double polynomial(const double (&coefficients)[N], double x) {
  double value = x * coefficients[0] + coefficients[1];
  for (int k = 2; k < N; ++k) {
    value = value * x;
    value = value + coefficients[k];
  }
  return value;
}

double logarithm(double x) {
  static const double kOdd[12] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                  1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
  int exponent;
  double m = std::frexp(x, &exponent);
  const bool small = m < 0.7071067811865476;
  if (small) m = m * 2.0;
  const double e = static_cast<double>(exponent) - (small ? 1.0 : 0.0);
  const double s = (m - 1.0) / (m + 1.0);
  return e * kLn2 + 2.0 * s * polynomial(kOdd, s * s);
}

double normal(double p) {
  const double q = p - 0.5;
  double r = 0.180625 - q * q;
  if (!(r < 0)) return q * (polynomial(kA, r) / polynomial(kB, r));
  r = std::sqrt(-logarithm(0.5 - std::fabs(q))) - 1.6;
  const double sign = q > 0 ? 1.0 : -1.0;
  return polynomial(kC, r) / polynomial(kD, r) * sign;
}

// Philox4x32-10.
void words(uint32_t (&c)[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53} * c[0], right = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(right >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(right),
        static_cast<uint32_t>(left >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(left)};
    std::memcpy(c, next, sizeof(c));
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

struct Draw {
  uint32_t k0, k1;
  bool uniform;
  double a, b;

  void row(int64_t id, int64_t dim, float* out) const {
    const auto bits = static_cast<uint64_t>(id);
    for (int64_t column = 0; column < dim; column += 4) {
      uint32_t c[4] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32),
                       static_cast<uint32_t>(column / 4), 0};
      words(c, k0, k1);
      for (int64_t k = column; k < dim && k < column + 4; ++k) {
        const double p = (static_cast<double>(c[k - column]) + 0.5) * 0x1p-32;
        out[k] = static_cast<float>(uniform ? a + (b - a) * p : a + b * normal(p));
      }
    }
  }
};

// Writes row `rows[i]` of `slab` for id `ids[i]`.
void initial_rows(const py::object& ids, const py::object& rows, const py::object& slab,
                  uint32_t k0, uint32_t k1, bool uniform, double a, double b, int threads) {
  TensorView id, row, to;
  const auto read = [](const py::object& tensor, TensorView& view, Dtype dtype, int dims) {
    return TensorReader::get().read(tensor.ptr(), view) && view.dtype == dtype &&
           view.dims == dims && (view.size[dims - 1] <= 1 || view.stride[dims - 1] == 1);
  };
  if (!read(ids, id, Dtype::int64, 1) || !read(rows, row, Dtype::int64, 1) ||
      !read(slab, to, Dtype::float32, 2) || id.size[0] != row.size[0])
    throw py::value_error("flat int64 ids and rows, and a float32 matrix of contiguous rows");
  const auto* from = reinterpret_cast<const int64_t*>(id.data);
  const auto* place = reinterpret_cast<const int64_t*>(row.data);
  auto* data = reinterpret_cast<float*>(to.data);
  const int64_t n = id.size[0], dim = to.size[1];
  for (int64_t i = 0; i < n; ++i)
    if (place[i] < 0 || place[i] >= to.size[0]) throw py::index_error("a row outside the matrix");
  const Draw draw{k0, k1, uniform, a, b};
  py::gil_scoped_release release;
  if (n * dim < kWorthThreads) threads = 1;
  recast::parallel_static(
      threads, n, [&](int64_t i, int) { draw.row(from[i], dim, data + place[i] * to.stride[0]); });
}

}  // namespace

void bind_initial_rows(py::module_& m) { m.def("initial_rows", &initial_rows); }

#if !defined(__clang__)
#pragma GCC pop_options
#endif
