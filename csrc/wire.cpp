// Rows as int8 for the wire: dim bytes, then amax as float32 (see runtime/ranks/wire.py).

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

#include "isa.h"
#include "parallel.h"
#include "tensor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace py = pybind11;

#define RECAST_KERNEL "wire_kernel.h"
#include "each_isa.h"

namespace recast::wire {
namespace {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

struct Views {
  TensorView rows, bytes;
  int64_t dim() const { return rows.size[1]; }
};

// False when the kernels do not take these tensors: rows (n, dim) of float32,
// bytes (n, dim + 4).
bool read(const py::handle& rows, const py::handle& bytes, Views& views) {
  const TensorReader& reader = TensorReader::get();
  TensorView &r = views.rows, &b = views.bytes;
  if (!reader.read(rows.ptr(), r) || !reader.read(bytes.ptr(), b)) return false;
  if (r.dtype != Dtype::float32 || b.dtype != Dtype::uint8 || r.dims != 2 || b.dims != 2)
    return false;
  if (b.size[0] != r.size[0] || b.size[1] != r.size[1] + int64_t{sizeof(float)}) return false;
  return (r.stride[1] == 1 || r.size[1] <= 1) && b.stride[1] == 1;
}

template <class Function>
void each_row(const Views& views, int threads, const Function& function) {
  const py::gil_scoped_release release;
  const int64_t count = views.rows.size[0];
  if (count * views.dim() < kWorthThreads) threads = 1;
  parallel_static(threads, count, [&](int64_t i, int) {
    function(reinterpret_cast<float*>(views.rows.data) + i * views.rows.stride[0],
             reinterpret_cast<int8_t*>(views.bytes.data) + i * views.bytes.stride[0]);
  });
}

bool encode(const py::handle& rows, const py::handle& bytes, int threads) {
  Views views;
  if (!read(rows, bytes, views)) return false;
  const int64_t dim = views.dim();
  each_row(views, threads, [&](const float* x, int8_t* q) {
    float amax;
    RECAST_CHOOSE(encode)(x, dim, q, &amax);
    std::memcpy(q + dim, &amax,
                sizeof(amax));  // unaligned: rows have any number of bytes
  });
  return true;
}

bool decode(const py::handle& bytes, const py::handle& rows, int threads) {
  Views views;
  if (!read(rows, bytes, views)) return false;
  const int64_t dim = views.dim();
  each_row(views, threads, [&](float* x, const int8_t* q) {
    float amax;
    std::memcpy(&amax, q + dim, sizeof(amax));
    RECAST_CHOOSE(decode)(q, dim, amax, x);
  });
  return true;
}

}  // namespace
}  // namespace recast::wire

void bind_wire(py::module_& m) {
  m.def("wire_encode", &recast::wire::encode);
  m.def("wire_decode", &recast::wire::decode);
}
