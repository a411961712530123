// `moe` with the router's GEMM in it. Backward computes ds first, then the logits' gradient, and then
// dX, to which the combine adds the router's part: one kernel less than a sum of two tensors, and one
// rounding less.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "layer_call.h"
#include "router.h"
#include "routing.h"

namespace tilemoe_torch {
namespace {

// Bits of `wanted`: those of experts_backward, with another meaning of ds's, and one more.
constexpr int64_t kRouterWeight = bit(kDs), kRouterBias = bit(kGradients);
constexpr int64_t kOfRouter = kRouterWeight | kRouterBias;
// From dH alone.
constexpr int64_t kOfW1 =
    TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP | TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP;

void check_router(const Tensor& X, const Tensor& weight, const MaybeTensor& bias) {
  check_dims("X", X, 2, "(T, d)");
  check_dims("router_weight", weight, 2, "(E, d)");
  if (weight.size(1) != X.size(1))
    refuse("router_weight has shape " + describe_shape(weight) + ", expected (E, " +
           std::to_string(X.size(1)) + ")");
  if (bias && (bias->dim() != 1 || bias->size(0) != weight.size(0)))
    refuse("router_bias has shape " + describe_shape(*bias) + ", expected (" +
           std::to_string(weight.size(0)) + ")");
  if (weight.scalar_type() != X.scalar_type() || (bias && bias->scalar_type() != X.scalar_type()))
    refuse("router_weight or router_bias has another dtype than X, expected the same");
}

class Backward {
 public:
  Backward(const Tensor& dO, const MaybeTensor& dlogits, const Tensor& X, const Tensor& H,
           const Tensor& routing, const Tensor& router_weight, const Tensors& weight_list,
           const MaybeTensor& logits, const std::vector<int64_t>& numbers,
           const std::vector<double>& reals, int64_t wanted)
      : call_({{"dO", dO},
               {"dlogits", dlogits},
               {"X", X},
               {"H", H},
               {"routing", routing},
               {"router_weight", router_weight},
               {"weights", kWeightNames, weight_list},
               {"logits", logits}}),
        dO_(dO),
        given_(dlogits),
        X_(X),
        H_(H),
        routing_(routing),
        router_weight_(router_weight),
        logits_(logits),
        weights_(call_, weight_list),
        config_(numbers, reals),
        wanted_(wanted),
        before_(wanted & (TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_B2)),
        of_dX_(wanted & bit(kDX)),
        of_W1_(wanted & kOfW1) {
    check_router(X, router_weight, std::nullopt);
    if (config_.numbers.rule.scoring < 0) refuse("scoring must be a rule, got given scores");
    if (needs_logits()) before_ |= bit(kDs);
  }

  std::vector<Tensor> whole() {
    allocate_all(before_ | of_dX_ | of_W1_);
    const tilemoe_experts experts = experts_of(call_, X_, weights_, config_);
    const Tensor workspace =
        workspace_of(experts, TILEMOE_BACKWARD_FIRST, before_ | of_dX_ | of_W1_);
    run(TILEMOE_BACKWARD_FIRST, dO_, before_, workspace, true);
    router(workspace, bytes_of_dH());  // dH comes first in the workspace
    if (of_dX_ | of_W1_) run(TILEMOE_BACKWARD_REST, std::nullopt, of_dX_ | of_W1_, workspace, true);
    return made(wanted_);
  }

  // Memory as in experts_backward_over_H: one workspace until dX is computed, which is freed before
  // the gradients of W1 are allocated.
  std::tuple<std::vector<Tensor>, bool> over_H() {
    allocate_all(before_ | of_dX_);
    if (before_ | of_dX_ | of_W1_) {
      const tilemoe_experts experts = experts_of(call_, X_, weights_, config_);
      const Tensor workspace = workspace_of(experts, TILEMOE_BACKWARD_OVER_H, before_ | of_dX_);
      run(TILEMOE_BACKWARD_OVER_H, dO_, before_, workspace, false);
      try {
        router(workspace, 0);
        if (of_dX_) run(TILEMOE_BACKWARD_REST, std::nullopt, of_dX_, workspace, false);
      } catch (const std::exception& error) {
        refuse_after(error);
      }
    }
    try {
      if (of_W1_) {
        allocate(call_, of_W1_, X_, H_, weights_, config_.numbers, false, gradients_);
        backward(call_, std::nullopt, X_, H_, TILEMOE_BACKWARD_REST, routing_, weights_, config_,
                 select(of_W1_), false);
      }
    } catch (const OutOfMemory&) {
      return {made(wanted_ & ~kOfW1), false};
    } catch (const std::exception& error) {
      refuse_after(error);
    }
    return {made(wanted_), true};
  }

 private:
  bool needs_logits() const { return (wanted_ & (bit(kDX) | kOfRouter)) != 0; }

  [[noreturn]] static void refuse_after(const std::exception& error) {
    throw std::runtime_error("H was overwritten with dH, then: " + std::string(error.what()));
  }

  void allocate_all(int64_t of_layer) {
    allocate(call_, of_layer, X_, H_, weights_, config_.numbers, false, gradients_);
    if (wanted_ & kRouterWeight)
      router_gradient_ =
          call_.empty({router_weight_.size(0), X_.size(1)}, router_weight_.scalar_type());
  }

  Gradients select(int64_t bits) const {
    Gradients selected(kGradients);
    for (size_t i = 0; i < kGradients; ++i)
      if (bits & bit(i)) selected[i] = gradients_[i];
    return selected;
  }

  // At least what each stage needs: a query of no gradients would be one of all.
  Tensor workspace_of(const tilemoe_experts& experts, tilemoe_backward_mode mode,
                      int64_t bits) const {
    const tilemoe_routing_spec spec = spec_of(call_, X_, experts, config_.numbers, H_.size(0));
    const auto all = static_cast<uint32_t>(bits ? bits : int64_t{TILEMOE_GRADIENT_W1});
    return call_.bytes(workspace_size(experts, spec, TILEMOE_PASS_BACKWARD, mode, all));
  }

  void run(tilemoe_backward_mode mode, const MaybeTensor& dO, int64_t bits, const Tensor& workspace,
           bool dH_in_workspace) const {
    backward(call_, dO, X_, H_, mode, routing_, weights_, config_, select(bits), false, nullptr,
             &workspace, {}, dH_in_workspace, (bits & bit(kDX)) != 0);
  }

  size_t bytes_of_dH() const {
    constexpr size_t kAlignment = 256;
    const size_t bytes = static_cast<size_t>(H_.numel()) * static_cast<size_t>(H_.element_size());
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // From ds to the logits' gradient, the gradients of the router, and its part of dX, in dX. Between
  // the stages nothing else is in the workspace from `offset` on, so the logits' gradient is there.
  void router(const Tensor& workspace, size_t offset) {
    if (!needs_logits()) return;
    const Rule& rule = config_.numbers.rule;
    const tilemoe_routing_spec spec =
        routing_spec(call_, TILEMOE_ROUTING_TOP_K, X_.size(0), weights_.W2().size(0), rule.K,
                     gradients_[kDs]->numel());
    Tensor dlogits = logits_gradient(call_, bind_routing(call_, spec, routing_), *gradients_[kDs],
                                     logits_, rule.scoring, config_.reals.routed_scaling_factor,
                                     router_weight_.scalar_type(), &workspace, offset);
    if (given_) dlogits = call_.add(dlogits, *given_);
    if (of_dX_) call_.mm(*gradients_[kDX], dlogits, router_weight_, std::nullopt);
    if (router_gradient_) call_.mm(*router_gradient_, transposed(dlogits), X_, std::nullopt);
    if (wanted_ & kRouterBias) {
      constexpr std::array<int64_t, 1> kTokens = {0};
      router_bias_gradient_ = torch::stable::sum(
          dlogits, torch::headeronly::IntHeaderOnlyArrayRef(kTokens.data(), kTokens.size()));
    }
  }

  std::vector<Tensor> made(int64_t wanted) const {
    std::vector<Tensor> all;
    for (size_t i = 0; i < kGradients; ++i)
      if (wanted & bit(i)) all.push_back(i == kDs ? *router_gradient_ : *gradients_[i]);
    if (wanted & kRouterBias) all.push_back(*router_bias_gradient_);
    return all;
  }

  const Call call_;
  const Tensor& dO_;
  const MaybeTensor& given_;
  const Tensor &X_, &H_, &routing_, &router_weight_;
  const MaybeTensor& logits_;
  const Weights weights_;
  const Config config_;
  const int64_t wanted_;
  int64_t before_;  // gradients that are computed before the router's: ds, dW2, db2
  const int64_t of_dX_, of_W1_;
  Gradients gradients_ = Gradients(kGradients);
  MaybeTensor router_gradient_, router_bias_gradient_;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> moe_with_router(
    const Tensor& X, const Tensor& router_weight, const MaybeTensor& router_bias,
    const MaybeTensor& selection_bias, const Tensors& weight_list, const MaybeTensor& addend,
    const std::vector<int64_t>& numbers, const std::vector<double>& reals, bool keep_H,
    bool /*overwrite_H*/) {
  const Call call({{"X", X},
                   {"router_weight", router_weight},
                   {"router_bias", router_bias},
                   {"selection_bias", selection_bias},
                   {"weights", kWeightNames, weight_list},
                   {"addend", addend}});
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  check_router(X, router_weight, router_bias);
  const Tensor logits = call.empty({X.size(0), router_weight.size(0)}, X.scalar_type());
  call.mm(logits, X, transposed(router_weight), router_bias);
  const auto [O, H, routing, expert_counts] =
      routed_forward(call, X, logits, selection_bias, weights, addend, config, keep_H);
  return {O, H, routing, expert_counts, logits};
}

std::vector<Tensor> moe_with_router_backward(const Tensor& dO, const MaybeTensor& dlogits,
                                             const Tensor& X, const Tensor& H,
                                             const Tensor& routing, const Tensor& router_weight,
                                             const Tensors& weights, const MaybeTensor& logits,
                                             const std::vector<int64_t>& numbers,
                                             const std::vector<double>& reals, int64_t wanted) {
  return Backward(dO, dlogits, X, H, routing, router_weight, weights, logits, numbers, reals,
                  wanted)
      .whole();
}

std::tuple<std::vector<Tensor>, bool> moe_with_router_backward_over_H(
    const Tensor& dO, const MaybeTensor& dlogits, const Tensor& X, const Tensor& H,
    const Tensor& routing, const Tensor& router_weight, const Tensors& weights,
    const MaybeTensor& logits, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, int64_t wanted) {
  return Backward(dO, dlogits, X, H, routing, router_weight, weights, logits, numbers, reals,
                  wanted)
      .over_H();
}

}  // namespace tilemoe_torch
