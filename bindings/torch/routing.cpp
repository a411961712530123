#include "routing.h"

#include <torch/csrc/stable/ops.h>

#include <string>

#include "operators.h"
#include "router.h"

namespace tilemoe_torch {
namespace {

size_t routing_bytes(const tilemoe_routing_spec& spec) {
  size_t bytes = 0;
  check(tilemoe_routing_bytes(&spec, &bytes));
  return bytes;
}

int64_t elements(const tilemoe_routing_spec& spec) {
  return static_cast<int64_t>(routing_bytes(spec) / sizeof(int32_t));
}

// Builds a routing of kind top-K from what was chosen.
Tensor build_top_k(const Call& call, const Tensor& ids, const Tensor& scores, int64_t E) {
  check_dims("ids", ids, 2, "(T, K)");
  NewRouting routing(call,
                     routing_spec(call, TILEMOE_ROUTING_TOP_K, ids.size(0), E, ids.size(1), 0));
  tilemoe_route_top_k_args args{};
  args.struct_size = sizeof args;
  args.ids = call.view("ids", ids);
  args.scores = call.view("scores", scores);
  args.workspace = routing.workspace(), args.workspace_bytes = routing.workspace_bytes();
  args.stream = call.stream();
  check(tilemoe_route_top_k(&routing.get(), &args));
  return routing.tensor();
}

}  // namespace

NewRouting::NewRouting(const Call& call, const tilemoe_routing_spec& spec)
    : tensor_(call.empty({elements(spec)}, ScalarType::Int)),
      workspace_(routing_workspace(call, spec, &workspace_bytes_)),
      routing_(bind_routing(call, spec, tensor_)) {}

tilemoe_routing bind_routing(const Call& call, const tilemoe_routing_spec& spec,
                             const Tensor& tensor) {
  const tilemoe_tensor memory = call.view("routing", tensor);
  if (memory.dtype != TILEMOE_INT32 || memory.ndim != 1 || memory.stride[0] != 1 ||
      memory.shape[0] != elements(spec))
    refuse(std::string("routing is ") + tilemoe_dtype_name(memory.dtype) + " " +
           describe_shape(tensor) + ", expected the contiguous int32 (" +
           std::to_string(elements(spec)) + ",) that a route operator gave for these sizes");
  tilemoe_routing routing{};
  routing.struct_size = sizeof routing;
  check(tilemoe_routing_bind(&spec, memory.data, routing_bytes(spec), &routing));
  return routing;
}

Tensor routing_workspace(const Call& call, const tilemoe_routing_spec& spec, size_t* bytes) {
  check(tilemoe_routing_workspace_bytes(&spec, bytes));
  return call.bytes(*bytes);
}

std::tuple<Tensor, Tensor> choose_and_route(const Call& call, const Tensor& logits,
                                            const MaybeTensor& selection_bias, const Rule& rule,
                                            double routed_scaling_factor) {
  const auto [scores, ids, expert_counts] =
      choose(call, logits, selection_bias, rule, routed_scaling_factor, ScalarType::Int);
  return {build_top_k(call, ids, scores, logits.size(1)), expert_counts};
}

std::tuple<Tensor, Tensor> route_logits(const Tensor& logits, const MaybeTensor& selection_bias,
                                        const std::vector<int64_t>& rule,
                                        double routed_scaling_factor) {
  const Call call({{"logits", logits}, {"selection_bias", selection_bias}});
  return choose_and_route(call, logits, selection_bias, unpack<Rule>("rule", rule),
                          routed_scaling_factor);
}

Tensor route_top_k(const Tensor& ids, const Tensor& scores, int64_t E) {
  const Call call({{"ids", ids}, {"scores", scores}});
  return build_top_k(call, torch::stable::contiguous(ids), torch::stable::contiguous(scores), E);
}

Tensor route_general(const Tensor& tokens, const Tensor& experts, const Tensor& scores, int64_t T,
                     int64_t E) {
  const Call call({{"tokens", tokens}, {"experts", experts}, {"scores", scores}});
  check_dims("tokens", tokens, 1, "(pairs)");
  const Tensor dense_tokens = torch::stable::contiguous(tokens);
  const Tensor dense_experts = torch::stable::contiguous(experts);
  const Tensor dense_scores = torch::stable::contiguous(scores);
  NewRouting routing(call, routing_spec(call, TILEMOE_ROUTING_GENERAL, T, E, 0, tokens.size(0)));
  tilemoe_route_general_args args{};
  args.struct_size = sizeof args;
  args.tokens = call.view("tokens", dense_tokens);
  args.experts = call.view("experts", dense_experts);
  args.scores = call.view("scores", dense_scores);
  args.workspace = routing.workspace(), args.workspace_bytes = routing.workspace_bytes();
  args.stream = call.stream();
  check(tilemoe_route_general(&routing.get(), &args));
  return routing.tensor();
}

std::tuple<Tensor, Tensor> route_rounded(const Tensor& logits, const MaybeTensor& seed,
                                         const MaybeTensor& offset, int64_t K, int64_t m,
                                         int64_t rounding, int64_t round_tokens) {
  const Call call({{"logits", logits}, {"seed", seed}, {"offset", offset}});
  check_dims("logits", logits, 2, "(T, E)");
  const Tensor rows = dense_rows(logits);
  const int64_t E = logits.size(1);
  tilemoe_routing_spec spec = routing_spec(call, TILEMOE_ROUTING_ROUNDED, logits.size(0), E, K, 0);
  spec.m = m;
  spec.rounding = narrowed<tilemoe_rounding>("rounding", rounding);
  spec.round_tokens = round_tokens;
  NewRouting routing(call, spec);
  const Tensor expert_counts = call.empty({E}, ScalarType::Int);
  tilemoe_route_rounded_args args{};
  args.struct_size = sizeof args;
  args.logits = call.view("logits", rows);
  args.seed = call.view("seed", seed);
  args.step = call.view("offset", offset);
  args.expert_counts = call.view("expert_counts", expert_counts);
  args.workspace = routing.workspace(), args.workspace_bytes = routing.workspace_bytes();
  args.stream = call.stream();
  check(tilemoe_route_rounded(&routing.get(), &args));
  return {routing.tensor(), expert_counts};
}

Tensor route_grouped(const Tensor& counts, const MaybeTensor& row_scores, int64_t rows) {
  const Call call({{"counts", counts}, {"row_scores", row_scores}});
  check_dims("counts", counts, 1, "(E)");
  const Tensor dense_counts = torch::stable::contiguous(counts);
  const MaybeTensor scores =
      row_scores ? MaybeTensor(torch::stable::contiguous(*row_scores)) : std::nullopt;
  NewRouting routing(call, routing_spec(call, TILEMOE_ROUTING_GROUPED, 0, counts.size(0), 0, rows));
  tilemoe_route_grouped_args args{};
  args.struct_size = sizeof args;
  args.counts = call.view("counts", dense_counts);
  args.scores = call.view("row_scores", scores);
  args.stream = call.stream();
  check(tilemoe_route_grouped(&routing.get(), &args));
  return routing.tensor();
}

}  // namespace tilemoe_torch
