// Operators of the package's signatures that allocate their results and do nothing: what is left is
// the host's part of a call, which benchmarks/host_time.py times. Schemas come from Python, copied
// from the package's own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "operators.h"
#include "wanted.h"

namespace tilemoe_torch {
namespace {

Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, {shape.begin(), shape.size()}, dtype);
}

}  // namespace

std::tuple<Tensor, Tensor> route_logits(Tensor logits, MaybeTensor /*selection_bias*/, int64_t K,
                                        int64_t /*scoring*/) {
  // Large enough for three numbers a pair and the experts' offsets; nobody reads it.
  const int64_t T = logits.size(0), E = logits.size(1);
  return {empty(logits, {3 * T * K + E + 16}, ScalarType::Int),
          empty(logits, {E}, ScalarType::Int)};
}

std::tuple<Tensor, Tensor> experts(Tensor X, MaybeTensor /*router*/, Tensor /*routing*/, Tensor W1,
                                   MaybeTensor /*W1_up*/, Tensor /*W2*/, MaybeTensor /*b1*/,
                                   MaybeTensor /*b1_up*/, MaybeTensor /*b2*/,
                                   MaybeTensor /*addend*/, int64_t /*kind*/, int64_t /*K*/,
                                   int64_t capacity, int64_t /*scoring*/, int64_t /*activation*/,
                                   int64_t /*gate_layout*/, double /*clamp*/, double /*alpha*/,
                                   double /*up_shift*/, bool keep_H, bool /*overwrite_H*/) {
  const ScalarType dtype = X.scalar_type();
  return {torch::stable::empty_like(X),
          keep_H ? empty(X, {capacity, W1.size(1)}, dtype) : empty(X, {0}, dtype)};
}

std::vector<Tensor> experts_backward(Tensor /*dO*/, Tensor X, Tensor /*H*/, Tensor /*routing*/,
                                     Tensor W1, MaybeTensor /*W1_up*/, Tensor W2,
                                     MaybeTensor /*b1*/, MaybeTensor /*b1_up*/, MaybeTensor /*b2*/,
                                     MaybeTensor /*logits*/, int64_t /*kind*/, int64_t /*K*/,
                                     int64_t /*scoring*/, ScalarType router_dtype,
                                     int64_t /*activation*/, int64_t /*gate_layout*/,
                                     double /*clamp*/, double /*alpha*/, double /*up_shift*/,
                                     int64_t wanted) {
  std::vector<Tensor> made;
  if (wanted & kWantedX) made.push_back(torch::stable::empty_like(X));
  if (wanted & kWantedS) made.push_back(empty(X, {X.size(0), W2.size(0)}, router_dtype));
  if (wanted & kWantedW1) made.push_back(torch::stable::empty_like(W1));
  if (wanted & kWantedW2) made.push_back(torch::stable::empty_like(W2));
  return made;
}

namespace {

void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("route_logits", TORCH_BOX(&route_logits));
  m.impl("experts", TORCH_BOX(&experts));
  m.impl("experts_backward", TORCH_BOX(&experts_backward));
}

}  // namespace
}  // namespace tilemoe_torch

STABLE_TORCH_LIBRARY_IMPL(tilemoe_noop, CPU, m) {
  tilemoe_torch::register_operators(m);
}

STABLE_TORCH_LIBRARY_IMPL(tilemoe_noop, CUDA, m) {
  tilemoe_torch::register_operators(m);
}
