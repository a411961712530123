// The targets of the router: the choice of experts, its gradient, and the losses.
#include "view.h"

namespace tilemoe_jax {
namespace {

tilemoe_routing_spec spec_of(const Call& call) {
  const tilemoe_tensor ids = call.tensor("ids");
  auto spec = sized<tilemoe_routing_spec>();
  spec.device = call.device;
  spec.kind = TILEMOE_ROUTING_TOP_K;
  spec.T = ids.shape[0], spec.K = ids.shape[1], spec.E = call.number("E");
  return spec;
}

size_t routing_workspace_bytes(const tilemoe_routing_spec& spec) {
  size_t bytes = 0;
  check(tilemoe_routing_workspace_bytes(&spec, &bytes));
  return bytes;
}

size_t losses_workspace_bytes(const Call& call) {
  const tilemoe_tensor logits = call.tensor("logits");
  size_t bytes = 0;
  check(
      tilemoe_router_losses_workspace_bytes(call.device, logits.shape[0], logits.shape[1], &bytes));
  return bytes;
}

}  // namespace

void top_k(Call& call) {
  auto args = sized<tilemoe_top_k_args>();
  args.device = call.device;
  args.scoring = call.kind<tilemoe_scoring>("scoring");
  args.K = call.number("K");
  args.logits = call.tensor("logits"), args.selection_bias = call.tensor("selection_bias");
  args.ids = call.tensor("ids"), args.scores = call.tensor("scores");
  args.expert_counts = call.tensor("counts");
  args.stream = call.stream;
  args.n_group = call.number("n_group"), args.topk_group = call.number("topk_group");
  args.group_score = call.kind<tilemoe_group_score>("group_score");
  args.routed_scaling_factor = call.real("routed_scaling_factor");
  check(tilemoe_top_k(&args));
}

void top_k_scores(Call& call) {
  auto args = sized<tilemoe_top_k_scores_args>();
  args.device = call.device;
  args.scoring = call.kind<tilemoe_scoring>("scoring");
  args.routed_scaling_factor = call.real("routed_scaling_factor");
  args.logits = call.tensor("logits"), args.ids = call.tensor("ids");
  args.scores = call.tensor("scores");
  args.stream = call.stream;
  check(tilemoe_top_k_scores(&args));
}

// The gradient is that of a routing, so a routing is built again from the chosen ids.
void top_k_backward(Call& call) {
  const tilemoe_routing_spec spec = spec_of(call);
  const Workspace workspace(call, routing_workspace_bytes(spec));
  auto routing = sized<tilemoe_routing>();
  check(tilemoe_routing_bind(&spec, call.memory("routing"), call.bytes("routing"), &routing));
  auto route = sized<tilemoe_route_top_k_args>();
  route.ids = call.tensor("ids"), route.scores = call.tensor("scores");
  route.workspace = workspace.data(), route.workspace_bytes = workspace.bytes();
  route.stream = call.stream;
  check(tilemoe_route_top_k(&routing, &route));

  auto args = sized<tilemoe_router_backward_args>();
  args.scoring = call.kind<tilemoe_scoring>("scoring");
  args.routed_scaling_factor = call.real("routed_scaling_factor");
  args.routing = &routing;
  args.logits = call.tensor("logits");
  args.ds = call.tensor("dscores");
  args.ds.ndim = 1;  // (T, K) as pairs
  args.ds.shape[0] *= args.ds.shape[1], args.ds.stride[0] = 1;
  args.ds.shape[1] = args.ds.stride[1] = 0;
  args.dlogits = call.tensor("dlogits");
  args.workspace = workspace.data(), args.workspace_bytes = workspace.bytes();
  args.stream = call.stream;
  check(tilemoe_router_backward(&args));
}

// The losses, or their gradient, which is added to the zeros of the operand that it overwrites.
void router_losses(Call& call) {
  const Workspace workspace(call, losses_workspace_bytes(call));
  auto args = sized<tilemoe_router_losses_args>();
  args.device = call.device;
  args.balance_coefficient = call.real("balance_coefficient");
  args.z_coefficient = call.real("z_coefficient");
  args.logits = call.tensor("logits"), args.expert_counts = call.tensor("counts");
  args.losses = call.tensor("losses"), args.dlogits = call.tensor("dlogits");
  args.workspace = workspace.data(), args.workspace_bytes = workspace.bytes();
  args.stream = call.stream;
  check(tilemoe_router_losses(&args));
}

Sizes router_sizes(const Call& call) {
  const tilemoe_routing_spec spec = spec_of(call);
  size_t routing = 0;
  check(tilemoe_routing_bytes(&spec, &routing));
  Sizes sizes;
  sizes.routing = static_cast<int64_t>(routing);
  sizes.workspace = static_cast<int64_t>(routing_workspace_bytes(spec));
  return sizes;
}

Sizes losses_sizes(const Call& call) {
  Sizes sizes;
  sizes.workspace = static_cast<int64_t>(losses_workspace_bytes(call));
  return sizes;
}

}  // namespace tilemoe_jax
