// The CPU backend: it runs on any machine, and is the reference in tests of other backends. It has
// one file per step, which defines the tasks of the step.
#pragma once

#include "core/backend.h"

namespace tilemoe::cpu {

// The backend. Throws Error(kUnsupported) in a build without it (cpu/absent.cpp).
Backend& backend();

class CpuBackend final : public Backend {
 public:
  // Starts the threads, so that no step does: a query of a size starts them.
  CpuBackend();

  std::string description() const override;
  void check_supported(const tilemoe_experts& experts) const override;

  size_t scratch_bytes(Step step, const tilemoe_experts& experts,
                       const ScratchSizes& sizes) const override;
  void up_projection(const UpProjection& step) override;
  void down_projection(const DownProjection& step) override;
  void combine(const Combine& step) override;
  void activation_gradient(const ActivationGradient& step) override;
  void score_gradient(const ScoreGradient& step) override;
  void weight_gradient_2(const WeightGradient2& step) override;
  void input_gradient(const InputGradient& step) override;
  void weight_gradient_1(const WeightGradient1& step) override;
  void bias_gradient(const BiasGradient& step) override;

  size_t routing_scratch_bytes(const tilemoe_routing_spec& spec) const override;
  size_t route_tokens_scratch_bytes(const tilemoe_routing_spec& spec, int64_t d) const override;
  size_t router_losses_scratch_bytes(int64_t T, int64_t E) const override;
  void top_k(const tilemoe_top_k_args& args) override;
  void top_k_scores(const tilemoe_top_k_scores_args& args) override;
  void route_top_k(tilemoe_routing& routing, const tilemoe_route_top_k_args& args) override;
  void route_tokens(tilemoe_routing& routing, const tilemoe_route_tokens_args& args) override;
  void route_general(tilemoe_routing& routing, const tilemoe_route_general_args& args) override;
  void route_rounded(tilemoe_routing& routing, const tilemoe_route_rounded_args& args) override;
  void route_grouped(tilemoe_routing& routing, const tilemoe_route_grouped_args& args) override;
  void router_backward(const tilemoe_router_backward_args& args) override;
  void router_losses(const tilemoe_router_losses_args& args) override;

  void sum_rows(const tilemoe_sum_rows_args& args) override;
};

}  // namespace tilemoe::cpu
