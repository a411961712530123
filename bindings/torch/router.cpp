#include "router.h"

#include <torch/csrc/stable/ops.h>

#include "routing.h"

namespace tilemoe_torch {
namespace {

size_t round_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

Tensor logits_gradient(const Call& call, const tilemoe_routing& routing, const Tensor& ds,
                       const MaybeTensor& logits, int64_t scoring, double routed_scaling_factor,
                       ScalarType dtype, const Tensor* scratch, size_t offset) {
  const tilemoe_routing_spec& spec = routing.spec;
  const MaybeTensor rows = logits ? MaybeTensor(dense_rows(*logits)) : MaybeTensor();
  const Tensor dense_ds = dense(ds);
  size_t workspace_bytes = 0;
  check(tilemoe_routing_workspace_bytes(&spec, &workspace_bytes));
  constexpr size_t kAlignment = 256, kElement = sizeof(float);  // at most
  const size_t bytes = round_up(static_cast<size_t>(spec.T * spec.E) * kElement, kAlignment);
  const bool fits =
      scratch && offset + bytes + workspace_bytes <= static_cast<size_t>(scratch->numel());
  const Tensor dlogits = fits ? call.matrix_in(*scratch, offset, spec.T, spec.E, dtype)
                              : call.empty({spec.T, spec.E}, dtype);
  const Tensor own = call.bytes(fits ? 0 : workspace_bytes);
  tilemoe_router_backward_args args{};
  args.struct_size = sizeof args;
  args.scoring = narrowed<tilemoe_scoring>("scoring", scoring);
  args.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  args.routing = &routing;
  args.logits = call.view("logits", rows);
  args.ds = call.view("ds", dense_ds);
  args.dlogits = call.view("dlogits", dlogits);
  args.workspace = fits ? static_cast<char*>(scratch->data_ptr()) + offset + bytes : own.data_ptr();
  args.workspace_bytes = workspace_bytes;
  args.stream = call.stream();
  check(tilemoe_router_backward(&args));
  return dlogits;
}

namespace {

struct LossesArgs {
  Tensor logits, counts, workspace;  // the memory of the views
  tilemoe_router_losses_args args{};

  LossesArgs(const Call& call, const Tensor& logits_given, const Tensor& expert_counts)
      : logits(dense_rows(logits_given)),
        counts(dense(expert_counts)),
        workspace(workspace_for(call, logits_given)) {
    args.struct_size = sizeof args;
    args.device = call.device();
    args.logits = call.view("logits", logits);
    args.expert_counts = call.view("expert_counts", counts);
    args.workspace = workspace.data_ptr();
    args.workspace_bytes = static_cast<size_t>(workspace.numel());
    args.stream = call.stream();
  }

 private:
  static Tensor workspace_for(const Call& call, const Tensor& logits) {
    check_dims("logits", logits, 2, "(T, E)");
    size_t bytes = 0;
    check(tilemoe_router_losses_workspace_bytes(call.device(), logits.size(0), logits.size(1),
                                                &bytes));
    return call.bytes(bytes);
  }
};

}  // namespace

void choose_into(const Call& call, const Tensor& logits, const MaybeTensor& selection_bias,
                 const Rule& rule, double routed_scaling_factor, const tilemoe_tensor& scores,
                 const tilemoe_tensor& ids, const Tensor& expert_counts) {
  const Tensor rows = dense_rows(logits);
  tilemoe_top_k_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.scoring = narrowed<tilemoe_scoring>("scoring", rule.scoring);
  args.K = rule.K;
  args.logits = call.view("logits", rows);
  args.selection_bias = call.view("selection_bias", selection_bias);
  args.ids = ids;
  args.scores = scores;
  args.expert_counts = call.view("expert_counts", expert_counts);
  args.stream = call.stream();
  args.n_group = rule.n_group, args.topk_group = rule.topk_group;
  args.group_score = narrowed<tilemoe_group_score>("group_score", rule.group_score);
  args.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  check(tilemoe_top_k(&args));
}

void check_choice(const Tensor& logits, int64_t K) {
  check_dims("logits", logits, 2, "(T, E)");
  const int64_t E = logits.size(1);
  if (K < 1 || K > E)
    refuse("K must be in [1, " + std::to_string(E) + "] for E = " + std::to_string(E) + ", got " +
           std::to_string(K));
}

std::tuple<Tensor, Tensor, Tensor> top_k(const Tensor& logits, const MaybeTensor& selection_bias,
                                         const std::vector<int64_t>& rule,
                                         double routed_scaling_factor, ScalarType ids_dtype) {
  const Call call({{"logits", logits}, {"selection_bias", selection_bias}});
  const Rule chosen = unpack<Rule>("rule", rule);
  check_choice(logits, chosen.K);
  const Tensor scores = call.empty({logits.size(0), chosen.K}, ScalarType::Float);
  const Tensor ids = call.empty({logits.size(0), chosen.K}, ids_dtype);
  const Tensor expert_counts = call.empty({logits.size(1)}, ScalarType::Int);
  choose_into(call, logits, selection_bias, chosen, routed_scaling_factor,
              call.view("scores", scores), call.view("ids", ids), expert_counts);
  return {scores, ids, expert_counts};
}

Tensor scores_at(const Tensor& logits, const Tensor& ids, int64_t scoring,
                 double routed_scaling_factor) {
  const Call call({{"logits", logits}, {"ids", ids}});
  check_dims("logits", logits, 2, "(T, E)");
  check_dims("ids", ids, 2, "(T, K)");
  const Tensor rows = dense_rows(logits);
  const Tensor dense_ids = dense(ids);
  const Tensor scores = call.empty({ids.size(0), ids.size(1)}, ScalarType::Float);
  tilemoe_top_k_scores_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.scoring = narrowed<tilemoe_scoring>("scoring", scoring);
  args.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  args.logits = call.view("logits", rows);
  args.ids = call.view("ids", dense_ids);
  args.scores = call.view("scores", scores);
  args.stream = call.stream();
  check(tilemoe_top_k_scores(&args));
  return scores;
}

// The gradient is that of a routing, so a routing is built again from the chosen ids.
Tensor top_k_backward(const Tensor& dscores, const Tensor& ids, const Tensor& scores,
                      const MaybeTensor& logits, int64_t E, int64_t scoring,
                      double routed_scaling_factor, ScalarType dtype) {
  const Call call({{"dscores", dscores}, {"ids", ids}, {"scores", scores}, {"logits", logits}});
  const Tensor routing = route_top_k(ids, scores, E, ids.numel());
  const tilemoe_routing_spec spec =
      routing_spec(call, TILEMOE_ROUTING_TOP_K, ids.size(0), E, ids.size(1), 0);
  return logits_gradient(call, bind_routing(call, spec, routing), dscores, logits, scoring,
                         routed_scaling_factor, dtype);
}

Tensor router_backward(const Tensor& ds, const Tensor& routing, const MaybeTensor& logits,
                       int64_t E, const std::vector<int64_t>& rule, double routed_scaling_factor,
                       ScalarType dtype) {
  const Call call({{"ds", ds}, {"routing", routing}, {"logits", logits}});
  const auto choice = unpack<Rule>("rule", rule);
  if (!logits && ds.dim() != 2) refuse("ds has shape " + describe_shape(ds) + ", expected (T, K)");
  const int64_t T = logits ? logits->size(0) : ds.size(0);
  const tilemoe_routing_spec spec = routing_spec(
      call, narrowed<tilemoe_routing_kind>("kind", choice.kind), T, E, choice.K, ds.numel());
  return logits_gradient(call, bind_routing(call, spec, routing), ds, logits, choice.scoring,
                         routed_scaling_factor, dtype);
}

Tensor router_logits(const Tensor& X, const Tensor& weight, const MaybeTensor& bias,
                     ScalarType dtype) {
  const Call call({{"X", X}, {"weight", weight}, {"bias", bias}});
  check_dims("X", X, 2, "(T, d)");
  check_dims("weight", weight, 2, "(E, d)");
  const Tensor rows = dense_rows_on_16(X), dense_weight = dense_rows_on_16(weight);
  const MaybeTensor dense_bias = bias ? MaybeTensor(dense(*bias)) : MaybeTensor();
  const int64_t T = X.size(0), d = X.size(1), E = weight.size(0);
  const Tensor logits = call.empty({T, E}, dtype);
  tilemoe_router_logits_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.X = call.view("X", rows);
  args.weight = call.view("weight", dense_weight);
  args.bias = call.view("bias", dense_bias);
  args.logits = call.view("logits", logits);
  check(tilemoe_router_logits_workspace_bytes(args.device, T, E, d, args.weight.dtype,
                                              &args.workspace_bytes));
  const Tensor workspace = call.bytes(args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_router_logits(&args));
  return logits;
}

Tensor router_losses(const Tensor& logits, const Tensor& expert_counts) {
  const Call call({{"logits", logits}, {"expert_counts", expert_counts}});
  LossesArgs losses_args(call, logits, expert_counts);
  const Tensor losses = call.empty({2}, ScalarType::Float);
  losses_args.args.losses = call.view("losses", losses);
  check(tilemoe_router_losses(&losses_args.args));
  return losses;
}

Tensor router_losses_backward(const Tensor& logits, const Tensor& expert_counts,
                              double balance_coefficient, double z_coefficient) {
  const Call call({{"logits", logits}, {"expert_counts", expert_counts}});
  LossesArgs losses_args(call, logits, expert_counts);
  const Tensor dlogits = call.zeros({logits.size(0), logits.size(1)}, ScalarType::Float);
  losses_args.args.dlogits = call.view("dlogits", dlogits);
  losses_args.args.balance_coefficient = static_cast<float>(balance_coefficient);
  losses_args.args.z_coefficient = static_cast<float>(z_coefficient);
  check(tilemoe_router_losses(&losses_args.args));
  return dlogits;
}

}  // namespace tilemoe_torch
