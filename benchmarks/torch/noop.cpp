// Operators of the package's signatures that allocate their results and do nothing: what is left is
// the host's part of a call, which benchmarks/host_time.py times. Schemas come from Python, copied
// from the package's own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "operators.h"
#include "packing.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe_torch {

// call.cpp, which says it in the library's words, is not linked here.
void refuse_length(const char* name, size_t, size_t) {
  throw std::runtime_error(name);
}

namespace {

Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, {shape.begin(), shape.size()}, dtype);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe(
    const Tensor& X, const Tensor& logits, const MaybeTensor& /*selection_bias*/,
    const Tensors& weights, const MaybeTensor& /*addend*/, const std::vector<int64_t>& numbers,
    const std::vector<double>& /*reals*/, bool keep_H, bool /*overwrite_H*/) {
  // Large enough for three numbers a pair and the experts' offsets; nobody reads it.
  const Tensor& W1 = *weights[kW1];
  const int64_t pairs = X.size(0) * unpack<Numbers>("numbers", numbers).rule.K, E = W1.size(0);
  return {torch::stable::empty_like(X),
          keep_H ? empty(X, {pairs, W1.size(1)}, X.scalar_type()) : empty(X, {0}, X.scalar_type()),
          empty(logits, {3 * pairs + E + 16}, ScalarType::Int),
          empty(logits, {E}, ScalarType::Int)};
}

std::tuple<std::vector<Tensor>, bool> experts_backward_over_H(
    const MaybeTensor& /*dO*/, const Tensor& X, const Tensor& /*H*/, const Tensor& /*routing*/,
    const Tensors& weights, const MaybeTensor& /*logits*/, const std::vector<Tensor>& /*gradients*/,
    int64_t /*places*/, const std::vector<int64_t>& /*numbers*/,
    const std::vector<double>& /*reals*/, ScalarType router_dtype, int64_t wanted,
    bool /*accumulate*/) {
  std::vector<Tensor> made;
  const Tensor &W1 = *weights[kW1], &W2 = *weights[kW2];
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
