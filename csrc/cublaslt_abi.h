// The part of cublasLt 12 and 13 that is called here, declared by hand: the library is opened at
// run time, and a build cannot count on its header. The comment beside each name gives NVIDIA's
// name; a test compares values and layouts with NVIDIA's own cublasLt.h where it is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace recast::lt {

// cublasStatus_t; cublasLtGetStatusName names the others.
enum Status : int {
  kSuccess = 0,           // CUBLAS_STATUS_SUCCESS
  kInvalidValue = 7,      // CUBLAS_STATUS_INVALID_VALUE
  kExecutionFailed = 13,  // CUBLAS_STATUS_EXECUTION_FAILED
  kNotSupported = 15,     // CUBLAS_STATUS_NOT_SUPPORTED
};

// cudaDataType_t
enum Type : int {
  kFloat32 = 0,    // CUDA_R_32F
  kFloat16 = 2,    // CUDA_R_16F
  kBfloat16 = 14,  // CUDA_R_16BF
};

// cublasComputeType_t
enum Compute : int {
  kCompute32F = 68,   // CUBLAS_COMPUTE_32F
  kComputeTf32 = 77,  // CUBLAS_COMPUTE_32F_FAST_TF32
};

// cublasOperation_t
enum Operation : int32_t {
  kAsItIs = 0,      // CUBLAS_OP_N
  kTransposed = 1,  // CUBLAS_OP_T
};

// cublasLtEpilogue_t
enum Epilogue : uint32_t {
  kDefault = 1,        // CUBLASLT_EPILOGUE_DEFAULT
  kRelu = 2,           // CUBLASLT_EPILOGUE_RELU
  kBias = 4,           // CUBLASLT_EPILOGUE_BIAS
  kReluBias = 6,       // CUBLASLT_EPILOGUE_RELU_BIAS
  kReluAux = 130,      // CUBLASLT_EPILOGUE_RELU_AUX
  kReluAuxBias = 134,  // CUBLASLT_EPILOGUE_RELU_AUX_BIAS
  kDrelu = 136,        // CUBLASLT_EPILOGUE_DRELU
  kDreluBgrad = 152,   // CUBLASLT_EPILOGUE_DRELU_BGRAD
  kBgradB = 512,       // CUBLASLT_EPILOGUE_BGRADB
};

// cublasLtMatmulDescAttributes_t
enum DescAttribute : int {
  kTransA = 3,       // CUBLASLT_MATMUL_DESC_TRANSA, int32_t
  kTransB = 4,       // CUBLASLT_MATMUL_DESC_TRANSB, int32_t
  kEpilogue = 7,     // CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t
  kBiasPointer = 8,  // CUBLASLT_MATMUL_DESC_BIAS_POINTER, void*
  kAuxPointer = 11,  // CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, void*
  kAuxLd = 12,       // CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t
  kBiasType = 26,    // CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t
};

// cublasLtMatmulPreferenceAttributes_t
enum PreferenceAttribute : int {
  kMaxWorkspace = 1,   // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t
  kReductions = 3,     // CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t
  kMinAlignmentA = 5,  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t
  kMinAlignmentB = 6,  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t
  kMinAlignmentC = 7,  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t
  kMinAlignmentD = 8,  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t
};

// cublasLtReductionScheme_t
enum ReductionScheme : uint32_t {
  kReduceComputeType = 2,  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
  kReduceAny = 7,          // CUBLASLT_REDUCTION_SCHEME_MASK
};

// cublasLtMatmulAlgo_t
struct Algo {
  uint64_t data[8];
};

// cublasLtMatmulHeuristicResult_t
struct HeuristicResult {
  Algo algo;
  size_t workspaceSize;
  Status state;
  float wavesCount;
  int reserved[4];
};

// cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t,
// cudaStream_t: opaque pointers.
using Handle = void*;
using Desc = void*;
using Layout = void*;
using Preference = void*;
using Stream = void*;

// The functions, each named without its prefix `cublasLt`.
struct Functions {
  size_t (*GetVersion)();
  const char* (*GetStatusName)(Status);
  Status (*Create)(Handle*);
  Status (*MatmulDescCreate)(Desc*, Compute, Type scale);
  Status (*MatmulDescDestroy)(Desc);
  Status (*MatmulDescSetAttribute)(Desc, DescAttribute, const void*, size_t);
  Status (*MatrixLayoutCreate)(Layout*, Type, uint64_t rows, uint64_t columns, int64_t ld);
  Status (*MatrixLayoutDestroy)(Layout);
  Status (*MatmulPreferenceCreate)(Preference*);
  Status (*MatmulPreferenceDestroy)(Preference);
  Status (*MatmulPreferenceSetAttribute)(Preference, PreferenceAttribute, const void*, size_t);
  Status (*MatmulAlgoGetHeuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference,
                                   int wanted, HeuristicResult*, int* found);
  Status (*Matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout,
                   const void* beta, const void* c, Layout, void* d, Layout, const Algo*,
                   void* workspace, size_t, Stream);
};

}  // namespace recast::lt
