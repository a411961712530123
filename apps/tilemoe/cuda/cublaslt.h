// Dense products by cuBLASLt: those of a model around the experts, and the baseline of the bench.
// The library is looked for when the first product is made, so that the program runs where it is
// missing.
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
  bool A_transposed = false;  // A lies there as (K, M)
  bool B_transposed = false;  // B lies there as (N, K)
  DType operands = DType::kBFloat16;
  DType result = DType::kBFloat16;  // the operands' type, or float32
  bool accumulate = false;          // C is added to
};

class LtProduct {
 public:
  // Throws std::runtime_error where cuBLASLt is missing or has no algorithm for the shape. All
  // products share a workspace: their work is on the default stream.
  explicit LtProduct(const DenseShape& shape);
  ~LtProduct();

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
