// Operators of the package's signatures that allocate their results and do nothing: what is left is
// the host's part of a call, which benchmarks/host_time.py times. Schemas come from Python, copied
// from the package's own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "operators.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe_torch {
namespace {

Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, {shape.begin(), shape.size()}, dtype);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe(
    Tensor X, Tensor logits, MaybeTensor /*selection_bias*/, Tensor W1, MaybeTensor /*W1_up*/,
    Tensor /*W2*/, MaybeTensor /*b1*/, MaybeTensor /*b1_up*/, MaybeTensor /*b2*/,
    MaybeTensor /*addend*/, int64_t K, int64_t /*scoring*/, int64_t /*activation*/,
    int64_t /*gate_layout*/, double /*clamp*/, double /*alpha*/, double /*up_shift*/,
    int64_t /*column_blocks*/, bool keep_H, bool /*overwrite_H*/) {
  // Large enough for three numbers a pair and the experts' offsets; nobody reads it.
  const int64_t pairs = X.size(0) * K, E = W1.size(0);
  return {torch::stable::empty_like(X),
          keep_H ? empty(X, {pairs, W1.size(1)}, X.scalar_type()) : empty(X, {0}, X.scalar_type()),
          empty(logits, {3 * pairs + E + 16}, ScalarType::Int),
          empty(logits, {E}, ScalarType::Int)};
}

std::tuple<std::vector<Tensor>, bool> experts_backward_over_H(
    MaybeTensor /*dO*/, Tensor X, Tensor /*H*/, Tensor /*routing*/, Tensor W1,
    MaybeTensor /*W1_up*/, Tensor W2, MaybeTensor /*b1*/, MaybeTensor /*b1_up*/, MaybeTensor /*b2*/,
    MaybeTensor /*logits*/, MaybeTensor /*dW1*/, MaybeTensor /*dW1_up*/, MaybeTensor /*dW2*/,
    MaybeTensor /*db1*/, MaybeTensor /*db1_up*/, MaybeTensor /*db2*/, int64_t /*kind*/,
    int64_t /*K*/, int64_t /*scoring*/, ScalarType router_dtype, int64_t /*activation*/,
    int64_t /*gate_layout*/, double /*clamp*/, double /*alpha*/, double /*up_shift*/,
    int64_t /*column_blocks*/, int64_t wanted, bool /*accumulate*/) {
  std::vector<Tensor> made;
  if (wanted & TILEMOE_GRADIENT_X) made.push_back(torch::stable::empty_like(X));
  if (wanted & TILEMOE_GRADIENT_S) made.push_back(empty(X, {X.size(0), W2.size(0)}, router_dtype));
  if (wanted & TILEMOE_GRADIENT_W1) made.push_back(torch::stable::empty_like(W1));
  if (wanted & TILEMOE_GRADIENT_W2) made.push_back(torch::stable::empty_like(W2));
  return {made, true};
}

namespace {

void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("moe", TORCH_BOX(&moe));
  m.impl("experts_backward_over_H", TORCH_BOX(&experts_backward_over_H));
}

}  // namespace
}  // namespace tilemoe_torch

STABLE_TORCH_LIBRARY_IMPL(tilemoe_noop, CPU, m) {
  tilemoe_torch::register_operators(m);
}

STABLE_TORCH_LIBRARY_IMPL(tilemoe_noop, CUDA, m) {
  tilemoe_torch::register_operators(m);
}
