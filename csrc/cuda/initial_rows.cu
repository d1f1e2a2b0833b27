// The initial values of embedding rows, uniform or normal, each a function of (key, id, column)
// only: the same bits as runtime/ranks/initial_rows.py, which explains the method. A thread writes
// four columns from one Philox call.
//
// Macros:
//   RECAST_TABLE  dtype of the rows, as pack.cuh numbers them
#include "intrinsics.cuh"
#include "philox.cuh"

namespace {

using recast::Index;
using recast::UInt64;
using Element = recast::Dtype<RECAST_TABLE>::type;

constexpr int kThreads = 256;

// Explicit roundings: a contracted fused multiply-add would round once where torch rounds twice.
#if defined(__CUDACC__)
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double sum(double a, double b) { return __dadd_rn(a, b); }
#else
inline double product(double a, double b) { return a * b; }
inline double sum(double a, double b) { return a + b; }
#endif

__constant__ double kA[8] = {2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
                             45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
                             133.14166789178437745, 3.387132872796366608};
__constant__ double kB[8] = {
    5226.495278852854561,  28729.085735721942674, 39307.89580009271061,  21213.794301586595867,
    5394.1960214247511077, 687.1870074920579083,  42.313330701600911252, 1.0};
__constant__ double kC[8] = {7.7454501427834140764e-4, 0.0227238449892691845833,
                             0.24178072517745061177,   1.27045825245236838258,
                             3.64784832476320460504,   5.7694972214606914055,
                             4.6303378461565452959,    1.42343711074968357734};
__constant__ double kD[8] = {1.05075007164441684324e-9, 5.475938084995344946e-4,
                             0.0151986665636164571966,  0.14810397642748007459,
                             0.68976733498510000455,    1.6763848301838038494,
                             2.05319162663775882187,    1.0};
__constant__ double kOdd[12] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};

__device__ __forceinline__ double polynomial(const double* coefficients, int n, double x) {
  double value = sum(product(x, coefficients[0]), coefficients[1]);
  for (int k = 2; k < n; ++k) value = sum(product(value, x), coefficients[k]);
  return value;
}

// log(x) for x in [2^-1022, 2), from x = m 2^e with m in [1/2, 1).
__device__ __forceinline__ double logarithm(double x) {
  const long long bits = __double_as_longlong(x);
  double e = static_cast<double>(static_cast<int>(bits >> 52 & 2047) - 1022);
  double m = __longlong_as_double((bits & ((1ll << 52) - 1)) | 1022ll << 52);
  if (m < 0.7071067811865476) m = product(m, 2.0), e = sum(e, -1.0);
  const double s = sum(m, -1.0) / sum(m, 1.0);
  const double odd = polynomial(kOdd, 12, product(s, s));
  return sum(product(e, 0.6931471805599453), product(product(2.0, s), odd));
}

// The quantile of the normal distribution (Wichura, algorithm AS 241).
__device__ __forceinline__ double normal(double p) {
  const double q = sum(p, -0.5), r = sum(0.180625, -product(q, q));
  if (!(r < 0)) return product(q, polynomial(kA, 8, r) / polynomial(kB, 8, r));
  const double t = sum(sqrt(-logarithm(sum(0.5, -fabs(q)))), -1.6);
  const double z = polynomial(kC, 8, t) / polynomial(kD, 8, t);
  return q > 0 ? z : -z;
}

}  // namespace

// Writes row rows[i] of the slab for id ids[i], where bit 0 of what[i] is set; n of them. `stride`:
// elements from one row to the next. Grid: ceil(n ceil(dim / 4) / 256); a thread a group of four
// columns.
extern "C" __global__ void __launch_bounds__(kThreads)
    initial_rows(const Index* ids, const Index* rows, const int* what, int n, int dim, UInt64 key,
                 int uniform, double a, double b, Element* slab, Index stride) {
  const int groups = (dim + 3) / 4;
  const Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  const Index entry = at / groups;
  if (entry >= n || !(what[entry] & 1)) return;
  const int group = static_cast<int>(at % groups);
  const auto id = static_cast<UInt64>(ids[entry]);
  const recast::RandomWords words =
      recast::philox(key, static_cast<unsigned>(id), static_cast<unsigned>(id >> 32),
                     static_cast<unsigned>(group), 0);
  Element* to = slab + rows[entry] * stride + 4 * group;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (4 * group + k >= dim) break;
    const double p = product(sum(static_cast<double>(words.at[k]), 0.5), 0x1p-32);
    const double value = uniform ? sum(a, product(sum(b, -a), p)) : sum(a, product(b, normal(p)));
    recast::narrow(static_cast<float>(value), to[k]);
  }
}
RECAST_KERNEL(initial_rows)
