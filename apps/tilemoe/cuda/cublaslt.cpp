#include "cuda/cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

namespace tilemoe::app {
namespace {

constexpr int kAlgorithms = 8;
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

void check_lt(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(what) + ": status " + std::to_string(status));
}

// The library's functions that are used here, and a handle.
struct Lt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtMatmulDescCreate) create_operation;
  decltype(&cublasLtMatmulDescDestroy) destroy_operation;
  decltype(&cublasLtMatmulDescSetAttribute) set_operation;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristics;
  decltype(&cublasLtMatmul) multiply;
  cublasLtHandle_t handle = nullptr;
  DeviceBuffer workspace;

  Lt() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* library = nullptr;
    for (const std::string& path : {name, "/usr/local/cuda/lib64/" + name})
      if (!library) library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library)
      throw std::runtime_error("dense GEMMs on a GPU require " + name +
                               ", which is neither on the library path nor in /usr/local/cuda");
    const auto find = [&](auto& function, const char* symbol) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (!function) throw std::runtime_error(name + " has no " + symbol);
    };
    find(create, "cublasLtCreate");
    find(version, "cublasLtGetVersion");
    find(create_operation, "cublasLtMatmulDescCreate");
    find(destroy_operation, "cublasLtMatmulDescDestroy");
    find(set_operation, "cublasLtMatmulDescSetAttribute");
    find(create_layout, "cublasLtMatrixLayoutCreate");
    find(destroy_layout, "cublasLtMatrixLayoutDestroy");
    find(create_preference, "cublasLtMatmulPreferenceCreate");
    find(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristics, "cublasLtMatmulAlgoGetHeuristic");
    find(multiply, "cublasLtMatmul");
    check_lt(create(&handle), "cublasLtCreate");
    workspace = DeviceBuffer(kWorkspaceBytes);
  }
};

// Loaded once; the program keeps it.
const Lt& lt() {
  static const Lt library;
  return library;
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return CUDA_R_32F;
    case DType::kBFloat16: return CUDA_R_16BF;
    case DType::kFloat16: return CUDA_R_16F;
    case DType::kInt32:
    case DType::kInt64: break;
  }
  throw std::runtime_error("a dense GEMM requires floating types");
}

// A row-major (rows, columns) matrix, whose rows are cuBLASLt's columns; or its transpose.
cublasLtMatrixLayout_t row_major(DType dtype, int64_t rows, int64_t columns, bool transposed) {
  if (transposed) std::swap(rows, columns);
  cublasLtMatrixLayout_t layout = nullptr;
  check_lt(lt().create_layout(&layout, type_of(dtype), static_cast<uint64_t>(columns),
                              static_cast<uint64_t>(rows), columns),
           "cublasLtMatrixLayoutCreate");
  return layout;
}

}  // namespace

// cuBLASLt counts by columns: C^T (N, M) = B^T A^T, where our rows are its columns.
struct LtGemm::State {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t A = nullptr, B = nullptr, C = nullptr;
  std::array<cublasLtMatmulHeuristicResult_t, kAlgorithms> algorithms{};
  int found = 0, chosen = 0;
  float beta = 0;

  explicit State(const DenseShape& shape) : beta(shape.accumulate ? 1.f : 0.f) {
    check_lt(lt().create_operation(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
             "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, shape.B_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, shape.A_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    B = row_major(shape.operands, shape.K, shape.N, shape.B_transposed);
    A = row_major(shape.operands, shape.M, shape.K, shape.A_transposed);
    C = row_major(shape.result, shape.M, shape.N, false);
    cublasLtMatmulPreference_t preference = nullptr;
    check_lt(lt().create_preference(&preference), "cublasLtMatmulPreferenceCreate");
    check_lt(lt().set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                 &kWorkspaceBytes, sizeof kWorkspaceBytes),
             "cublasLtMatmulPreferenceSetAttribute");
    const cublasStatus_t status = lt().heuristics(lt().handle, operation, B, A, C, C, preference,
                                                  kAlgorithms, algorithms.data(), &found);
    lt().destroy_preference(preference);
    check_lt(status, "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0) throw std::runtime_error("cuBLASLt has no algorithm for a dense GEMM");
  }
  ~State() {
    for (cublasLtMatrixLayout_t layout : {A, B, C})
      if (layout) lt().destroy_layout(layout);
    if (operation) lt().destroy_operation(operation);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

 private:
  void set(cublasLtMatmulDescAttributes_t attribute, cublasOperation_t value) {
    check_lt(lt().set_operation(operation, attribute, &value, sizeof value),
             "cublasLtMatmulDescSetAttribute");
  }
};

LtGemm::LtGemm(const DenseShape& shape) : state_(std::make_unique<State>(shape)) {}
LtGemm::~LtGemm() = default;

void LtGemm::choose(const void* left, const void* right, void* result,
                    const DeviceCacheFlush& flush) {
  constexpr int kTrials = 5;
  double best = std::numeric_limits<double>::infinity();
  int fastest = 0;
  for (int i = 0; i < state_->found; ++i) {
    state_->chosen = i;
    run(left, right, result);
    std::array<double, kTrials> ms{};
    for (double& trial : ms) {
      flush();
      trial = device_ms([&] { run(left, right, result); });
    }
    std::sort(ms.begin(), ms.end());
    if (ms[kTrials / 2] >= best) continue;
    best = ms[kTrials / 2];
    fastest = i;
  }
  state_->chosen = fastest;
}

void LtGemm::run(const void* left, const void* right, void* result) {
  constexpr float kOne = 1;
  State& s = *state_;
  check_lt(lt().multiply(lt().handle, s.operation, &kOne, right, s.B, left, s.A, &s.beta, result,
                         s.C, result, s.C, &s.algorithms[static_cast<size_t>(s.chosen)].algo,
                         lt().workspace.data(), kWorkspaceBytes, nullptr),
           "cublasLtMatmul");
}

std::string cublaslt_version() {
  const size_t version = lt().version();
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace tilemoe::app
