// Dense GEMMs by cuBLASLt: those of a model around the experts, and the baseline of
// tilemoe_kernels. The library is loaded when the first GEMM is made, so that the program runs
// without it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/device.h"
#include "tilemoe/tensor.h"

namespace tilemoe::app {

// C (M, N) = A (M, K) B (K, N); row-major, sums in float32.
struct DenseShape {
  int64_t M, N, K;
  bool A_transposed = false;  // A is stored as (K, M)
  bool B_transposed = false;  // B is stored as (N, K)
  DType operands = DType::kBFloat16;
  DType result = DType::kBFloat16;  // the operands' type, or float32
  bool accumulate = false;          // C is added to
};

class LtGemm {
 public:
  // Throws std::runtime_error if cuBLASLt is missing or has no algorithm for the shape. All
  // GEMMs share a workspace: their work is on the default stream.
  explicit LtGemm(const DenseShape& shape);
  ~LtGemm();

  // Keeps the fastest of the at most 8 algorithms that cuBLASLt's heuristics name, on these
  // operands and with a cold cache; writes C. Without it, the heuristics' first.
  void choose(const void* A, const void* B, void* C, const DeviceCacheFlush& flush);
  // On the default stream.
  void run(const void* A, const void* B, void* C);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "13.1.0" of the library that was found.
std::string cublaslt_version();

}  // namespace tilemoe::app
