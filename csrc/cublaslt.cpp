// Matrix products with fused epilogues by cublasLt, without CUDA's headers and without linking it:
// the library that torch has loaded is opened by name. A Plan is one product of given sizes, dtypes
// and epilogue, with one of the algorithms that cublasLt's heuristics propose; running it is one
// call.

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cublaslt_abi.h"

namespace py = pybind11;
namespace lt = recast::lt;

namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr size_t kOldest = 120000;

// The library that the process has loaded already, else the first one that opens.
void* open(const std::string& path) {
  if (!path.empty()) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    throw std::runtime_error(dlerror());
  }
  for (const int only_loaded : {RTLD_NOLOAD, 0})
    for (const char* name : kNames)
      if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | only_loaded)) return library;
  throw std::runtime_error("no libcublasLt.so.13 or .12 is loaded or found");
}

class Library {
 public:
  explicit Library(const std::string& path) : library_(open(path)) {
#define RECAST_FIND(name) find("cublasLt" #name, call.name)
    RECAST_FIND(GetVersion);
    RECAST_FIND(GetStatusName);
    RECAST_FIND(Create);
    RECAST_FIND(MatmulDescCreate);
    RECAST_FIND(MatmulDescDestroy);
    RECAST_FIND(MatmulDescSetAttribute);
    RECAST_FIND(MatrixLayoutCreate);
    RECAST_FIND(MatrixLayoutDestroy);
    RECAST_FIND(MatmulPreferenceCreate);
    RECAST_FIND(MatmulPreferenceDestroy);
    RECAST_FIND(MatmulPreferenceSetAttribute);
    RECAST_FIND(MatmulAlgoGetHeuristic);
    RECAST_FIND(Matmul);
#undef RECAST_FIND
    if (call.GetVersion() < kOldest)
      throw std::runtime_error("cublasLt " + std::to_string(call.GetVersion()) + " is too old");
  }

  // Created on the current device, which must be `device`. Never destroyed: when the process ends,
  // the driver may be gone already.
  lt::Handle handle(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lt::Handle& handle = handles_[device];
    if (handle == nullptr) check(call.Create(&handle), "cublasLtCreate");
    return handle;
  }

  void check(lt::Status status, const char* doing, const std::string& of = "") const {
    if (status == lt::kSuccess) return;
    const std::string what = doing + (of.empty() ? of : ", " + of);
    throw std::runtime_error(what + ": " + call.GetStatusName(status));
  }

  lt::Functions call = {};

 private:
  template <class F>
  void find(const char* name, F& to) {
    to = reinterpret_cast<F>(dlsym(library_, name));
    if (to == nullptr) throw std::runtime_error(std::string(name) + " is missing from cublasLt");
  }

  void* library_;
  std::mutex mutex_;
  std::map<int, lt::Handle> handles_;
};

// A descriptor with an owner, which destroys it.
using Owned = std::unique_ptr<void, lt::Status (*)(void*)>;

// D = epilogue(alpha op(A) op(B)), all column-major: D is m x n, op(A) m x k, op(B) k x n.
struct Problem {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  lt::Type in, out;
  bool tf32;
  int64_t lda, ldb, ldd;
  lt::Epilogue epilogue;
  int64_t aux_ld;                // bits from one column of the mask to the next; 0: no mask
  uintptr_t a, b, d, bias, aux;  // addresses with the alignment that all runs will have
  size_t workspace;              // bytes that an algorithm may ask for, at most
  bool any_reduction;            // partial sums may be kept in the output's dtype
  int rank;                      // the algorithm: 0 for the first choice of the heuristics

  std::string text() const {
    return "product of m " + std::to_string(m) + ", n " + std::to_string(n) + ", k " +
           std::to_string(k) + " with epilogue " + std::to_string(epilogue);
  }
};

uint32_t alignment(uintptr_t address) {
  const uintptr_t lowest = address & -address;
  return lowest == 0 || lowest > 256 ? 256 : static_cast<uint32_t>(lowest);
}

class Plan {
 public:
  Plan(std::shared_ptr<Library> library, int device, const Problem& of)
      : library_(std::move(library)),
        text_(of.text()),
        desc_(desc(of)),
        a_(layout(of.in, of.transpose_a ? of.k : of.m, of.transpose_a ? of.m : of.k, of.lda)),
        b_(layout(of.in, of.transpose_b ? of.n : of.k, of.transpose_b ? of.k : of.n, of.ldb)),
        d_(layout(of.out, of.m, of.n, of.ldd)) {
    const Owned wishes = preference(of);
    handle_ = library_->handle(device);
    std::vector<lt::HeuristicResult> results(of.rank + 1);
    int found = 0;
    const lt::Status status =
        call().MatmulAlgoGetHeuristic(handle_, desc_.get(), a_.get(), b_.get(), d_.get(), d_.get(),
                                      wishes.get(), of.rank + 1, results.data(), &found);
    if (status != lt::kNotSupported)
      library_->check(status, "cublasLtMatmulAlgoGetHeuristic", text_);
    algorithm_ = results[of.rank];
    exists_ = status == lt::kSuccess && found > of.rank && algorithm_.state == lt::kSuccess;
  }

  bool exists() const { return exists_; }
  size_t workspace() const { return algorithm_.workspaceSize; }
  py::bytes algorithm() const {
    return py::bytes(reinterpret_cast<const char*>(&algorithm_.algo), sizeof algorithm_.algo);
  }

  void run(uintptr_t a, uintptr_t b, uintptr_t d, uintptr_t bias, uintptr_t aux, float alpha,
           uintptr_t workspace, uintptr_t stream) {
    const float beta = 0.0f;
    void* const to = reinterpret_cast<void*>(d);
    // The descriptor holds two of the addresses: one thread at a time sets them and calls.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bias != 0) set(desc_.get(), lt::kBiasPointer, bias);
    if (aux != 0) set(desc_.get(), lt::kAuxPointer, aux);
    library_->check(
        call().Matmul(handle_, desc_.get(), &alpha, reinterpret_cast<const void*>(a), a_.get(),
                      reinterpret_cast<const void*>(b), b_.get(), &beta, to, d_.get(), to, d_.get(),
                      &algorithm_.algo, reinterpret_cast<void*>(workspace),
                      algorithm_.workspaceSize, reinterpret_cast<lt::Stream>(stream)),
        "cublasLtMatmul", text_);
  }

 private:
  const lt::Functions& call() const { return library_->call; }

  template <class T>
  void set(lt::Desc desc, lt::DescAttribute attribute, const T& value) const {
    library_->check(call().MatmulDescSetAttribute(desc, attribute, &value, sizeof value),
                    "cublasLtMatmulDescSetAttribute", text_);
  }

  Owned desc(const Problem& of) const {
    lt::Desc made = nullptr;
    const lt::Compute compute = of.tf32 ? lt::kComputeTf32 : lt::kCompute32F;
    library_->check(call().MatmulDescCreate(&made, compute, lt::kFloat32),
                    "cublasLtMatmulDescCreate");
    Owned owned(made, call().MatmulDescDestroy);
    set(made, lt::kTransA, of.transpose_a ? lt::kTransposed : lt::kAsItIs);
    set(made, lt::kTransB, of.transpose_b ? lt::kTransposed : lt::kAsItIs);
    set(made, lt::kEpilogue, of.epilogue);
    if (of.bias != 0) {
      set(made, lt::kBiasType, of.out);
      set(made, lt::kBiasPointer, of.bias);
    }
    if (of.aux != 0) {
      set(made, lt::kAuxLd, of.aux_ld);
      set(made, lt::kAuxPointer, of.aux);
    }
    return owned;
  }

  Owned layout(lt::Type type, int64_t rows, int64_t columns, int64_t ld) const {
    lt::Layout made = nullptr;
    library_->check(call().MatrixLayoutCreate(&made, type, rows, columns, ld),
                    "cublasLtMatrixLayoutCreate", text_);
    return Owned(made, call().MatrixLayoutDestroy);
  }

  Owned preference(const Problem& of) const {
    lt::Preference made = nullptr;
    library_->check(call().MatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
    Owned owned(made, call().MatmulPreferenceDestroy);
    const auto wish = [&](lt::PreferenceAttribute attribute, const auto& value) {
      library_->check(call().MatmulPreferenceSetAttribute(made, attribute, &value, sizeof value),
                      "cublasLtMatmulPreferenceSetAttribute", text_);
    };
    wish(lt::kMaxWorkspace, static_cast<uint64_t>(of.workspace));
    wish(lt::kReductions, of.any_reduction ? lt::kReduceAny : lt::kReduceComputeType);
    wish(lt::kMinAlignmentA, alignment(of.a));
    wish(lt::kMinAlignmentB, alignment(of.b));
    wish(lt::kMinAlignmentC, alignment(of.d));
    wish(lt::kMinAlignmentD, alignment(of.d));
    return owned;
  }

  std::shared_ptr<Library> library_;
  lt::Handle handle_ = nullptr;
  std::string text_;
  Owned desc_, a_, b_, d_;
  lt::HeuristicResult algorithm_ = {};
  bool exists_ = false;
  std::mutex mutex_;
};

}  // namespace

void bind_cublaslt(py::module_& m) {
  py::class_<Plan>(m, "CublasLtPlan")
      .def_property_readonly("workspace", &Plan::workspace)
      .def_property_readonly("algorithm", &Plan::algorithm)
      .def("run", &Plan::run, py::call_guard<py::gil_scoped_release>());
  py::class_<Library, std::shared_ptr<Library>>(m, "CublasLt")
      .def(py::init<const std::string&>(), py::arg("path") = "")
      .def(
          "plan",
          [](std::shared_ptr<Library> library, int device, int64_t m, int64_t n, int64_t k,
             bool transpose_a, bool transpose_b, int in, int out, bool tf32, int64_t lda,
             int64_t ldb, int64_t ldd, unsigned epilogue, int64_t aux_ld, uintptr_t a, uintptr_t b,
             uintptr_t d, uintptr_t bias, uintptr_t aux, size_t workspace, bool any_reduction,
             int rank) {
            auto plan = std::make_unique<Plan>(std::move(library), device,
                                               Problem{m,
                                                       n,
                                                       k,
                                                       transpose_a,
                                                       transpose_b,
                                                       static_cast<lt::Type>(in),
                                                       static_cast<lt::Type>(out),
                                                       tf32,
                                                       lda,
                                                       ldb,
                                                       ldd,
                                                       static_cast<lt::Epilogue>(epilogue),
                                                       aux_ld,
                                                       a,
                                                       b,
                                                       d,
                                                       bias,
                                                       aux,
                                                       workspace,
                                                       any_reduction,
                                                       rank});
            return plan->exists() ? std::move(plan) : nullptr;
          },
          "A Plan, or None where cublasLt has no algorithm for this.");
}
