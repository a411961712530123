#include "router.h"

#include <torch/csrc/stable/ops.h>

#include "routing.h"

namespace tilemoe_torch {

Tensor logits_gradient(const Call& call, const tilemoe_routing& routing, const Tensor& ds,
                       const MaybeTensor& logits, int64_t scoring, ScalarType dtype) {
  const tilemoe_routing_spec& spec = routing.spec;
  const MaybeTensor rows = logits ? MaybeTensor(dense_rows(*logits)) : MaybeTensor();
  const Tensor dense_ds = torch::stable::contiguous(ds);
  const Tensor dlogits = call.empty({spec.T, spec.E}, dtype);
  size_t workspace_bytes = 0;
  const Tensor workspace = routing_workspace(call, spec, &workspace_bytes);
  tilemoe_router_backward_args args{};
  args.struct_size = sizeof args;
  args.scoring = narrowed<tilemoe_scoring>("scoring", scoring);
  args.routing = &routing;
  args.logits = call.view("logits", rows);
  args.ds = call.view("ds", dense_ds);
  args.dlogits = call.view("dlogits", dlogits);
  args.workspace = workspace.data_ptr(), args.workspace_bytes = workspace_bytes;
  args.stream = call.stream();
  check(tilemoe_router_backward(&args));
  return dlogits;
}

namespace {

struct LossesArgs {
  Tensor logits, counts, workspace;  // what the views look at
  tilemoe_router_losses_args args{};

  LossesArgs(const Call& call, const Tensor& logits_given, const Tensor& expert_counts)
      : logits(dense_rows(logits_given)),
        counts(torch::stable::contiguous(expert_counts)),
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

std::tuple<Tensor, Tensor, Tensor> choose(const Call& call, const Tensor& logits,
                                          const MaybeTensor& selection_bias, int64_t K,
                                          int64_t scoring, ScalarType ids_dtype) {
  check_dims("logits", logits, 2, "(T, E)");
  const Tensor rows = dense_rows(logits);
  const int64_t T = logits.size(0), E = logits.size(1);
  if (K < 1 || K > E)
    refuse("K is " + std::to_string(K) + ", expected 1 to E = " + std::to_string(E));
  const Tensor scores = call.empty({T, K}, ScalarType::Float);
  const Tensor ids = call.empty({T, K}, ids_dtype);
  const Tensor expert_counts = call.empty({E}, ScalarType::Int);
  tilemoe_top_k_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.scoring = narrowed<tilemoe_scoring>("scoring", scoring);
  args.K = K;
  args.logits = call.view("logits", rows);
  args.selection_bias = call.view("selection_bias", selection_bias);
  args.ids = call.view("ids", ids);
  args.scores = call.view("scores", scores);
  args.expert_counts = call.view("expert_counts", expert_counts);
  args.stream = call.stream();
  check(tilemoe_top_k(&args));
  return {scores, ids, expert_counts};
}

std::tuple<Tensor, Tensor, Tensor> top_k(const Tensor& logits, const MaybeTensor& selection_bias,
                                         int64_t K, int64_t scoring, ScalarType ids_dtype) {
  const Call call({{"logits", logits}, {"selection_bias", selection_bias}});
  return choose(call, logits, selection_bias, K, scoring, ids_dtype);
}

// The gradient is that of a routing, so one is built again from what was chosen.
Tensor top_k_backward(const Tensor& dscores, const Tensor& ids, const Tensor& scores,
                      const MaybeTensor& logits, int64_t E, int64_t scoring, ScalarType dtype) {
  const Call call({{"dscores", dscores}, {"ids", ids}, {"scores", scores}, {"logits", logits}});
  const Tensor routing = route_top_k(ids, scores, E);
  const tilemoe_routing_spec spec =
      routing_spec(call, TILEMOE_ROUTING_TOP_K, ids.size(0), E, ids.size(1), 0);
  return logits_gradient(call, bind_routing(call, spec, routing), dscores, logits, scoring, dtype);
}

Tensor router_backward(const Tensor& ds, const Tensor& routing, const MaybeTensor& logits,
                       int64_t kind, int64_t E, int64_t K, int64_t scoring, ScalarType dtype) {
  const Call call({{"ds", ds}, {"routing", routing}, {"logits", logits}});
  if (!logits && ds.dim() != 2) refuse("ds has shape " + describe_shape(ds) + ", expected (T, K)");
  const int64_t T = logits ? logits->size(0) : ds.size(0);
  const tilemoe_routing_spec spec =
      routing_spec(call, narrowed<tilemoe_routing_kind>("kind", kind), T, E, K, ds.numel());
  return logits_gradient(call, bind_routing(call, spec, routing), ds, logits, scoring, dtype);
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
