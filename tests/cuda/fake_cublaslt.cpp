// A stand-in for cublasLt on host memory. It checks what NVIDIA's documentation asks of descriptors
// and pointers, computes in double, and does its worst where that documentation promises nothing:
// the bits of a mask behind the last row are ones, and so is all of the workspace.
//
// Also for tests: fake_set("zero_bit", 1) lets the bit of a mask be 1 where the sum is exactly 0,
// fake_set("no_nan", 1) lets relu of NaN be 0, fake_set("refuse", e) lets no algorithm have
// epilogue e, fake_set("fail", s) lets products end with status s, fake_set("no_transpose", 1)
// forgets opA, fake_set("roomless", 1) has algorithms that need no workspace where none may be
// asked for; fake_log() names the epilogues so far.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cublaslt_abi.h"

using namespace recast::lt;

namespace {

struct FakeDesc {
  Compute compute;
  int32_t trans_a = 0, trans_b = 0, bias_type = -1;
  uint32_t epilogue = kDefault;
  void *bias = nullptr, *aux = nullptr;
  int64_t aux_ld = 0;
};

struct FakeLayout {
  Type type;
  int64_t rows, columns, ld;
};

struct FakePreference {
  uint64_t workspace = 0;
  uint32_t reductions = kReduceAny;
  uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};

// What an Algo of this library holds.
struct Promise {
  uint32_t magic, epilogue;
  uint32_t alignment[4];
  int64_t m, n, k;
  uint32_t bias_alignment, aux_alignment;
  uint64_t workspace;
};
static_assert(sizeof(Promise) <= sizeof(Algo));

constexpr uint32_t kMagic = 0xFA4E;
constexpr size_t kWorkspace = 1024;
constexpr int kAlgorithms = 2;  // for everything; they do the same

std::map<std::string, long> settings;
std::string journal;

long setting(const char* name) {
  const auto found = settings.find(name);
  return found == settings.end() ? 0 : found->second;
}

uint32_t alignment(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  const uintptr_t lowest = bits & -bits;
  return lowest == 0 || lowest > 256 ? 256 : static_cast<uint32_t>(lowest);
}

size_t bytes(Type type) { return type == kFloat32 ? 4 : 2; }

double tf32(double x) {
  float value = static_cast<float>(x);
  uint32_t word;
  std::memcpy(&word, &value, 4);
  word = (word + 0x1000u) & ~0x1fffu;
  std::memcpy(&value, &word, 4);
  return value;
}

double get(const void* from, Type type, int64_t at) {
  if (type == kFloat32) return static_cast<const float*>(from)[at];
  if (type == kFloat16) return __half2float(static_cast<const __half*>(from)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
}

void put(void* to, Type type, int64_t at, double value) {
  const float narrow = static_cast<float>(value);
  if (type == kFloat32)
    static_cast<float*>(to)[at] = narrow;
  else if (type == kFloat16)
    static_cast<__half*>(to)[at] = __float2half_rn(narrow);
  else
    static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(narrow);
}

bool reads_mask(uint32_t e) { return e == kDrelu || e == kDreluBgrad; }
bool has_mask(uint32_t e) { return reads_mask(e) || e == kReluAux || e == kReluAuxBias; }
bool adds_bias(uint32_t e) { return e == kBias || e == kReluBias || e == kReluAuxBias; }
bool has_bias(uint32_t e) { return adds_bias(e) || e == kDreluBgrad || e == kBgradB; }

// Whether the parts fit together, as both the heuristics and the product ask.
Status sane(const FakeDesc& desc, const FakeLayout& a, const FakeLayout& b, const FakeLayout& c,
            const FakeLayout& d, int64_t& k) {
  k = desc.trans_a ? a.rows : a.columns;
  const int64_t m = desc.trans_a ? a.columns : a.rows;
  const int64_t n = desc.trans_b ? b.rows : b.columns;
  const uint32_t e = desc.epilogue;
  if (m != d.rows || n != d.columns || k != (desc.trans_b ? b.columns : b.rows))
    return kInvalidValue;
  if (c.rows != d.rows || c.columns != d.columns || c.ld != d.ld || c.type != d.type)
    return kInvalidValue;
  for (const FakeLayout* each : {&a, &b, &d})
    if (each->rows < 1 || each->columns < 1 || each->ld < each->rows) return kInvalidValue;
  if (has_mask(e) && (desc.aux == nullptr || desc.aux_ld % 128 != 0 || desc.aux_ld < m))
    return kInvalidValue;
  if (has_mask(e) && alignment(desc.aux) < 16) return kInvalidValue;
  if (has_bias(e) && (desc.bias == nullptr || alignment(desc.bias) < bytes(d.type)))
    return kInvalidValue;
  if (desc.bias_type != -1 && desc.bias_type != d.type) return kNotSupported;
  if (a.type != b.type || (d.type != a.type && d.type != kFloat32)) return kNotSupported;
  if (desc.compute == kComputeTf32 && a.type != kFloat32) return kNotSupported;
  return setting("refuse") == static_cast<long>(e) ? kNotSupported : kSuccess;
}

}  // namespace

extern "C" {

void fake_set(const char* name, long value) { settings[name] = value; }

// Valid until the next call; empties the log.
const char* fake_log() {
  static std::string shown;
  shown.swap(journal);
  journal.clear();
  return shown.c_str();
}

size_t cublasLtGetVersion() { return 130000; }

const char* cublasLtGetStatusName(Status status) {
  switch (static_cast<int>(status)) {
    case kInvalidValue:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case kNotSupported:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case kExecutionFailed:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    default:
      return "another status";
  }
}

Status cublasLtCreate(Handle* handle) {
  *handle = new int(7);
  return kSuccess;
}

Status cublasLtMatmulDescCreate(Desc* desc, Compute compute, Type scale) {
  if (scale != kFloat32 || (compute != kCompute32F && compute != kComputeTf32))
    return kInvalidValue;
  *desc = new FakeDesc{compute};
  return kSuccess;
}

Status cublasLtMatmulDescDestroy(Desc desc) {
  delete static_cast<FakeDesc*>(desc);
  return kSuccess;
}

Status cublasLtMatmulDescSetAttribute(Desc to, DescAttribute attribute, const void* value,
                                      size_t size) {
  auto* desc = static_cast<FakeDesc*>(to);
  const auto set = [&](auto& field) {
    if (size != sizeof field) return kInvalidValue;
    std::memcpy(&field, value, size);
    return kSuccess;
  };
  switch (static_cast<int>(attribute)) {
    case kTransA:
      return set(desc->trans_a);
    case kTransB:
      return set(desc->trans_b);
    case kEpilogue:
      return set(desc->epilogue);
    case kBiasPointer:
      return set(desc->bias);
    case kAuxPointer:
      return set(desc->aux);
    case kAuxLd:
      return set(desc->aux_ld);
    case kBiasType:
      return set(desc->bias_type);
    default:
      return kInvalidValue;
  }
}

Status cublasLtMatrixLayoutCreate(Layout* layout, Type type, uint64_t rows, uint64_t columns,
                                  int64_t ld) {
  *layout = new FakeLayout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld};
  return kSuccess;
}

Status cublasLtMatrixLayoutDestroy(Layout layout) {
  delete static_cast<FakeLayout*>(layout);
  return kSuccess;
}

Status cublasLtMatmulPreferenceCreate(Preference* preference) {
  *preference = new FakePreference;
  return kSuccess;
}

Status cublasLtMatmulPreferenceDestroy(Preference preference) {
  delete static_cast<FakePreference*>(preference);
  return kSuccess;
}

Status cublasLtMatmulPreferenceSetAttribute(Preference to, PreferenceAttribute attribute,
                                            const void* value, size_t size) {
  auto* preference = static_cast<FakePreference*>(to);
  const auto set = [&](auto& field) {
    if (size != sizeof field) return kInvalidValue;
    std::memcpy(&field, value, size);
    return kSuccess;
  };
  if (attribute == kMaxWorkspace) return set(preference->workspace);
  if (attribute == kReductions) return set(preference->reductions);
  if (attribute < kMinAlignmentA || attribute > kMinAlignmentD) return kInvalidValue;
  return set(preference->alignment[attribute - kMinAlignmentA]);
}

Status cublasLtMatmulAlgoGetHeuristic(Handle, Desc of, Layout a, Layout b, Layout c, Layout d,
                                      Preference wishes, int wanted, HeuristicResult* results,
                                      int* found) {
  const auto& desc = *static_cast<FakeDesc*>(of);
  const auto& preference = *static_cast<FakePreference*>(wishes);
  const auto& out = *static_cast<FakeLayout*>(d);
  int64_t k = 0;
  const Status status = sane(desc, *static_cast<FakeLayout*>(a), *static_cast<FakeLayout*>(b),
                             *static_cast<FakeLayout*>(c), out, k);
  *found = 0;
  if (status != kSuccess) return status;
  const size_t workspace = preference.workspace < kWorkspace ? 0 : kWorkspace;
  if (wanted < 1 || (workspace == 0 && setting("roomless") == 0)) return kNotSupported;
  Promise promise{kMagic, desc.epilogue, {}, out.rows, out.columns, k, 0, 0, workspace};
  // Its algorithms make no use of more.
  const auto needed = [](uint32_t given) { return std::min(given, 16u); };
  for (int i = 0; i < 4; ++i) promise.alignment[i] = needed(preference.alignment[i]);
  promise.bias_alignment = needed(alignment(desc.bias));
  promise.aux_alignment = needed(alignment(desc.aux));
  for (; *found < std::min(wanted, kAlgorithms); ++*found) {
    promise.magic = kMagic + *found;
    results[*found] = {{}, workspace, kSuccess, 1.0f, {}};
    std::memcpy(&results[*found].algo, &promise, sizeof promise);
  }
  return kSuccess;
}

Status cublasLtMatmul(Handle, Desc of, const void* alpha, const void* a, Layout a_layout,
                      const void* b, Layout b_layout, const void* beta, const void* c,
                      Layout c_layout, void* d, Layout d_layout, const Algo* algo, void* workspace,
                      size_t workspace_bytes, Stream) {
  const auto& desc = *static_cast<FakeDesc*>(of);
  const auto& left = *static_cast<FakeLayout*>(a_layout);
  const auto& right = *static_cast<FakeLayout*>(b_layout);
  const auto& out = *static_cast<FakeLayout*>(d_layout);
  const uint32_t e = desc.epilogue;
  int64_t k = 0;
  const Status status = sane(desc, left, right, *static_cast<FakeLayout*>(c_layout), out, k);
  if (status != kSuccess) return status;
  if (setting("fail") != 0) return static_cast<Status>(setting("fail"));
  const int64_t m = out.rows, n = out.columns;
  Promise promise;
  std::memcpy(&promise, algo, sizeof promise);
  const void* const pointers[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    if (alignment(pointers[i]) < promise.alignment[i]) return kInvalidValue;
  if (promise.magic - kMagic >= kAlgorithms || promise.epilogue != e || promise.m != m ||
      promise.n != n || promise.k != k || workspace_bytes < promise.workspace ||
      (promise.workspace != 0 && workspace == nullptr) ||
      *static_cast<const float*>(beta) != 0.0f ||
      (has_bias(e) && alignment(desc.bias) < promise.bias_alignment) ||
      (has_mask(e) && alignment(desc.aux) < promise.aux_alignment))
    return kInvalidValue;
  if (workspace != nullptr) std::memset(workspace, 0xff, workspace_bytes);
  journal += std::to_string(e) + " ";

  const double factor = *static_cast<const float*>(alpha);
  const bool round = desc.compute == kComputeTf32;
  const bool trans_a = desc.trans_a && setting("no_transpose") == 0;
  std::vector<double> of_a(m * k), of_b(n * k), bias(m, 0.0), sums(m, 0.0);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t p = 0; p < k; ++p) {
      const double x = get(
          a, left.type, trans_a ? i * left.ld + p : (p * left.ld + i) % (left.ld * left.columns));
      of_a[i * k + p] = round ? tf32(x) : x;
    }
  for (int64_t j = 0; j < n; ++j)
    for (int64_t p = 0; p < k; ++p) {
      const double x = get(b, right.type, desc.trans_b ? p * right.ld + j : j * right.ld + p);
      of_b[j * k + p] = round ? tf32(x) : x;
    }
  for (int64_t i = 0; adds_bias(e) && i < m; ++i) bias[i] = get(desc.bias, out.type, i);
  const bool rectified = e == kRelu || e == kReluBias || e == kReluAux || e == kReluAuxBias;
  for (int64_t j = 0; j < n; ++j) {
    auto* const column = static_cast<unsigned char*>(desc.aux) + j * desc.aux_ld / 8;
    if (has_mask(e) && !reads_mask(e)) std::memset(column, 0xff, desc.aux_ld / 8);
    for (int64_t i = 0; i < m; ++i) {
      double value = 0.0;
      for (int64_t p = 0; p < k; ++p) value += of_a[i * k + p] * of_b[j * k + p];
      value = factor * value + bias[i];
      const auto bit = static_cast<unsigned char>(1u << i % 8);
      if (reads_mask(e) && (column[i / 8] & bit) == 0) value = 0.0;
      if (has_mask(e) && !reads_mask(e) && !(value > 0.0 || (value == 0.0 && setting("zero_bit"))))
        column[i / 8] &= static_cast<unsigned char>(~bit);
      if (rectified && (value < 0.0 || (value != value && setting("no_nan")))) value = 0.0;
      sums[i] += value;
      put(d, out.type, j * out.ld + i, value);
    }
  }
  for (int64_t i = 0; e == kDreluBgrad && i < m; ++i) put(desc.bias, out.type, i, sums[i]);
  for (int64_t j = 0; e == kBgradB && j < n; ++j) {
    double sum = 0.0;
    for (int64_t p = 0; p < k; ++p) sum += of_b[j * k + p];
    put(desc.bias, out.type, j, sum);
  }
  return kSuccess;
}

}  // extern "C"
