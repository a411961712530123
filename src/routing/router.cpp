// Argument checks of the backward of the router and of its losses.
#include <cmath>

#include "core/backend.h"
#include "core/check.h"
#include "core/overlap.h"
#include "routing/order.h"
#include "routing/rule_arguments.h"
#include "routing/rules.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

void check_dlogits(const tilemoe_tensor& dlogits, int64_t T, int64_t E,
                   const tilemoe_tensor& logits) {
  if (present(logits))
    check_matrix("dlogits", dlogits, T, E, {TILEMOE_FLOAT32, logits.dtype}, Strides::kRows);
  else
    check_matrix("dlogits", dlogits, T, E, kFloats, Strides::kRows);
}

// The scores alone determine the gradient of a softmax over the chosen experts, under both names of
// that rule.
bool needs_logits(tilemoe_scoring scoring, tilemoe_routing_kind kind) {
  const bool over_chosen =
      scoring == TILEMOE_SOFTMAX_OVER_CHOSEN || scoring == TILEMOE_SOFTMAX_RENORMALIZED;
  return kind == TILEMOE_ROUTING_ROUNDED || !over_chosen;
}

// ds: (pairs), or (T, K) if each token has K pairs.
void check_pairs(const char* name, const tilemoe_tensor& tensor, const tilemoe_routing_spec& spec) {
  if (spec.kind == TILEMOE_ROUTING_TOP_K && tensor.ndim == 2)
    check_matrix(name, tensor, spec.T, spec.K, kFloat32);
  else
    check_vector(name, tensor, spec.pairs, kFloat32);
}

}  // namespace

void router_backward(const tilemoe_router_backward_args* given) {
  tilemoe_router_backward_args args = read_struct("router_backward args", given);
  check_scoring(args.scoring);
  const tilemoe_routing routing = read_routing(args.routing);
  args.routing = &routing;
  const tilemoe_routing_spec& spec = routing.spec;
  const Backend& backend = backend_for(spec.device);
  const bool rounded = spec.kind == TILEMOE_ROUTING_ROUNDED;
  TILEMOE_CHECK(rounded || spec.kind == TILEMOE_ROUTING_TOP_K,
                "the routing is of kind " << kind_name(spec.kind) << ", expected top-K or rounded");
  check_reserved("router_backward args", args.reserved);
  check_factor(args.routed_scaling_factor);
  TILEMOE_CHECK(!rounded || args.routed_scaling_factor == 1,
                "routed_scaling_factor is " << args.routed_scaling_factor
                                            << ", expected 1 with token rounding");
  TILEMOE_CHECK(!rounded || args.scoring == TILEMOE_SOFTMAX_RENORMALIZED,
                "scoring is " << static_cast<int>(args.scoring)
                              << ", expected 2 (softmax renormalised), the rule of token rounding");
  if (present(args.logits) || needs_logits(args.scoring, spec.kind))
    check_matrix("logits", args.logits, spec.T, spec.E, kFloats, Strides::kRows);
  check_pairs("ds", args.ds, spec);
  check_dlogits(args.dlogits, spec.T, spec.E, args.logits);
  check_flag("accumulate", args.accumulate);
  MemoryUse memory;
  check_routing_workspace(backend, spec, args.workspace, args.workspace_bytes, memory);
  memory.reads("routing", routing.offsets, routing_bytes(spec));
  memory.reads("logits", args.logits);
  memory.reads("ds", args.ds);
  memory.writes("dlogits", args.dlogits);
  memory.check();
  backend.router_backward(args);
}

size_t router_losses_workspace_bytes(tilemoe_device device, int64_t T, int64_t E) {
  check_tokens_and_experts(T, E, device);
  return backend_of_build(device).router_losses_scratch_bytes(T, E);
}

void router_losses(const tilemoe_router_losses_args* given) {
  const tilemoe_router_losses_args args = read_struct("router_losses args", given);
  check_reserved("router_losses args", args.reserved);
  check_logits(args.logits, args.device);
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1];
  check_vector("expert_counts", args.expert_counts, E, kInt32);
  if (present(args.losses)) check_vector("losses", args.losses, 2, kFloat32);
  if (present(args.dlogits)) check_dlogits(args.dlogits, T, E, args.logits);
  TILEMOE_CHECK(std::isfinite(args.balance_coefficient) && std::isfinite(args.z_coefficient),
                "balance_coefficient is " << args.balance_coefficient << " and z_coefficient "
                                          << args.z_coefficient << ", expected finite numbers");
  const Backend& backend = backend_for(args.device);
  const size_t needed = router_losses_workspace_bytes(args.device, T, E);
  check_workspace(args.workspace, args.workspace_bytes, needed);
  MemoryUse memory;
  memory.reads("logits", args.logits);
  memory.reads("expert_counts", args.expert_counts);
  memory.writes("losses", args.losses);
  memory.writes("dlogits", args.dlogits);
  memory.writes("workspace", args.workspace, needed);
  memory.check();
  backend.router_losses(args);
}

namespace {

void check_sizes_of_logits(int64_t T, int64_t E, int64_t d, tilemoe_device device) {
  check_tokens_and_experts(T, E, device);
  TILEMOE_CHECK(d >= limits::kWidthMultiple && d % limits::kWidthMultiple == 0,
                "d is " << d << ", expected a multiple of " << limits::kWidthMultiple);
  TILEMOE_CHECK(d <= limits::kMaxWidth, "d is " << d << ", expected at most " << limits::kMaxWidth);
}

}  // namespace

size_t router_logits_workspace_bytes(tilemoe_device device, int64_t T, int64_t E, int64_t d,
                                     tilemoe_dtype weight) {
  check_sizes_of_logits(T, E, d, device);
  TILEMOE_CHECK(is_float(weight), "weight_dtype is " << tilemoe_dtype_name(weight)
                                                     << ", expected float32, bfloat16 or float16");
  return backend_for(device).router_logits_scratch_bytes(T, E, d, weight);
}

void router_logits(const tilemoe_router_logits_args* given) {
  const tilemoe_router_logits_args args = read_struct("router_logits args", given);
  check_reserved("router_logits args", args.reserved);
  TILEMOE_CHECK(args.X.ndim == 2, "X is " << describe(args.X) << ", expected (T, d)");
  TILEMOE_CHECK(args.weight.ndim == 2,
                "weight is " << describe(args.weight) << ", expected (E, d)");
  const int64_t T = args.X.shape[0], d = args.X.shape[1], E = args.weight.shape[0];
  check_sizes_of_logits(T, E, d, args.device);
  check_tensor("X", args.X, {{T, d}, kFloats, Strides::kRows});
  check_tensor("weight", args.weight, {{E, d}, {args.X.dtype, TILEMOE_FLOAT32}, Strides::kRows});
  if (present(args.bias)) check_vector("bias", args.bias, E, kFloats);
  check_matrix("logits", args.logits, T, E, kFloats, Strides::kRows);
  const Backend& backend = backend_for(args.device);
  const size_t needed = backend.router_logits_scratch_bytes(T, E, d, args.weight.dtype);
  check_workspace(args.workspace, args.workspace_bytes, needed);
  MemoryUse memory;
  memory.reads("X", args.X);
  memory.reads("weight", args.weight);
  memory.reads("bias", args.bias);
  memory.writes("logits", args.logits);
  memory.writes("workspace", args.workspace, needed);
  memory.check();
  backend.router_logits(args);
}

}  // namespace tilemoe
