// Compiles where csrc/cublaslt_abi.h says what NVIDIA's own header says.
#include <cublasLt.h>

#include <cstddef>
#include <type_traits>

#include "cublaslt_abi.h"

namespace lt = recast::lt;

#define SAME(ours, theirs) static_assert(static_cast<long>(lt::ours) == static_cast<long>(theirs))
SAME(kSuccess, CUBLAS_STATUS_SUCCESS);
SAME(kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
SAME(kExecutionFailed, CUBLAS_STATUS_EXECUTION_FAILED);
SAME(kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
SAME(kFloat32, CUDA_R_32F);
SAME(kFloat16, CUDA_R_16F);
SAME(kBfloat16, CUDA_R_16BF);
SAME(kCompute32F, CUBLAS_COMPUTE_32F);
SAME(kComputeTf32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME(kAsItIs, CUBLAS_OP_N);
SAME(kTransposed, CUBLAS_OP_T);
SAME(kDefault, CUBLASLT_EPILOGUE_DEFAULT);
SAME(kRelu, CUBLASLT_EPILOGUE_RELU);
SAME(kBias, CUBLASLT_EPILOGUE_BIAS);
SAME(kReluBias, CUBLASLT_EPILOGUE_RELU_BIAS);
SAME(kReluAux, CUBLASLT_EPILOGUE_RELU_AUX);
SAME(kReluAuxBias, CUBLASLT_EPILOGUE_RELU_AUX_BIAS);
SAME(kDrelu, CUBLASLT_EPILOGUE_DRELU);
SAME(kDreluBgrad, CUBLASLT_EPILOGUE_DRELU_BGRAD);
SAME(kBgradB, CUBLASLT_EPILOGUE_BGRADB);
SAME(kTransA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(kTransB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(kAuxPointer, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
SAME(kAuxLd, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
SAME(kBiasType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
SAME(kMaxWorkspace, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(kReductions, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(kMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(kMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(kMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(kMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(kReduceComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME(kReduceAny, CUBLASLT_REDUCTION_SCHEME_MASK);

static_assert(sizeof(lt::Algo) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(lt::HeuristicResult) == sizeof(cublasLtMatmulHeuristicResult_t));
#define SAME_PLACE(field)                               \
  static_assert(offsetof(lt::HeuristicResult, field) == \
                offsetof(cublasLtMatmulHeuristicResult_t, field))
SAME_PLACE(algo);
SAME_PLACE(workspaceSize);
SAME_PLACE(state);
SAME_PLACE(wavesCount);

// A call through our types passes what theirs passes: as many parameters, each as large.
template <class Ours, class Theirs>
struct SameCall;
template <class R, class... Ours, class S, class... Theirs>
struct SameCall<R (*)(Ours...), S (*)(Theirs...)> {
  static constexpr bool value = sizeof(R) == sizeof(S) && sizeof...(Ours) == sizeof...(Theirs) &&
                                ((sizeof(Ours) == sizeof(Theirs)) && ...) &&
                                ((std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>) && ...);
};
#define SAME_CALL(name) \
  static_assert(SameCall<decltype(lt::Functions::name), decltype(&cublasLt##name)>::value)
SAME_CALL(GetVersion);
SAME_CALL(GetStatusName);
SAME_CALL(Create);
SAME_CALL(MatmulDescCreate);
SAME_CALL(MatmulDescDestroy);
SAME_CALL(MatmulDescSetAttribute);
SAME_CALL(MatrixLayoutCreate);
SAME_CALL(MatrixLayoutDestroy);
SAME_CALL(MatmulPreferenceCreate);
SAME_CALL(MatmulPreferenceDestroy);
SAME_CALL(MatmulPreferenceSetAttribute);
SAME_CALL(MatmulAlgoGetHeuristic);
SAME_CALL(Matmul);
