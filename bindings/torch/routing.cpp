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

constexpr int64_t kEveryPair = 0;  // as a capacity: rows for all pairs

// Builds a routing of kind top-K from the chosen ids.
Tensor build_top_k(const Call& call, const Tensor& ids, const Tensor& scores, int64_t E,
                   int64_t capacity) {
  check_dims("ids", ids, 2, "(T, K)");
  NewRouting routing(
      call, routing_spec(call, TILEMOE_ROUTING_TOP_K, ids.size(0), E, ids.size(1), capacity));
  tilemoe_route_top_k_args args{};
  args.struct_size = sizeof args;
  args.ids = call.view("ids", ids);
  args.scores = call.view("scores", scores);
  args.workspace = routing.workspace(), args.workspace_bytes = routing.workspace_bytes();
  args.stream = call.stream();
  check(tilemoe_route_top_k(&routing.get(), &args));
  return routing.tensor();
}

// Rejects counts that exceed the rows, which the library would clip. Only for the CPU: the host
// does not read a GPU's counts.
template <typename Count>
void check_counts(const Tensor& counts, int64_t rows) {
  const auto* count = static_cast<const Count*>(counts.data_ptr());
  int64_t left = rows;
  for (int64_t e = 0; e < counts.size(0); ++e) {
    if (count[e] < 0 || count[e] > left)
      refuse("counts[" + std::to_string(e) + "] must be in [0, " + std::to_string(left) +
             "], got " + std::to_string(count[e]) + ": rows has " + std::to_string(rows) +
             " rows, the counts before it use " + std::to_string(rows - left));
    left -= count[e];
  }
}

}  // namespace

NewRouting::NewRouting(const Call& call, const tilemoe_routing_spec& spec)
    : tensor_(call.empty({elements(spec)}, ScalarType::Int)),
      workspace_(routing_workspace(call, spec, &workspace_bytes_)),
      routing_(bind_routing(call, spec, tensor_)) {}

NewRouting::NewRouting(const Call& call, const tilemoe_routing_spec& spec, size_t workspace_bytes)
    : tensor_(call.empty({elements(spec)}, ScalarType::Int)),
      workspace_bytes_(workspace_bytes),
      workspace_(call.bytes(workspace_bytes)),
      routing_(bind_routing(call, spec, tensor_)) {}

tilemoe_routing bind_routing(const Call& call, const tilemoe_routing_spec& spec,
                             const Tensor& tensor) {
  const tilemoe_tensor memory = call.view("routing", tensor);
  if (memory.dtype != TILEMOE_INT32 || memory.ndim != 1 || memory.stride[0] != 1 ||
      memory.shape[0] != elements(spec))
    refuse(std::string("routing is ") + tilemoe_dtype_name(memory.dtype) + " " +
           describe_shape(tensor) + ", expected a contiguous int32 tensor with shape (" +
           std::to_string(elements(spec)) + ",) from a route operator with these sizes");
  tilemoe_routing routing{};
  routing.struct_size = sizeof routing;
  check(tilemoe_routing_bind(&spec, memory.data, routing_bytes(spec), &routing));
  return routing;
}

Tensor routing_workspace(const Call& call, const tilemoe_routing_spec& spec, size_t* bytes) {
  check(tilemoe_routing_workspace_bytes(&spec, bytes));
  return call.bytes(*bytes);
}

// The scores, the ids and the workspace live until the routing is built: one allocation.
std::tuple<Tensor, Tensor> choose_and_route(const Call& call, const Tensor& logits,
                                            const MaybeTensor& selection_bias, const Rule& rule,
                                            double routed_scaling_factor) {
  check_choice(logits, rule.K);
  const int64_t T = logits.size(0), E = logits.size(1);
  const tilemoe_routing_spec spec =
      routing_spec(call, TILEMOE_ROUTING_TOP_K, T, E, rule.K, kEveryPair);
  size_t workspace_bytes = 0;
  check(tilemoe_routing_workspace_bytes(&spec, &workspace_bytes));
  constexpr size_t kAlignment = 256;
  const size_t matrix_bytes = (static_cast<size_t>(T * rule.K) * sizeof(int32_t) + kAlignment - 1) /
                              kAlignment * kAlignment;
  const Tensor memory = call.bytes(2 * matrix_bytes + workspace_bytes);
  char* const begin = static_cast<char*>(memory.data_ptr());
  const auto matrix = [&](char* data, tilemoe_dtype dtype) {
    tilemoe_tensor made{};
    made.data = data, made.dtype = dtype, made.ndim = 2;
    made.shape[0] = T, made.shape[1] = rule.K;
    made.stride[0] = rule.K, made.stride[1] = 1;
    return made;
  };
  const tilemoe_tensor scores = matrix(begin, TILEMOE_FLOAT32);
  const tilemoe_tensor ids = matrix(begin + matrix_bytes, TILEMOE_INT32);
  const Tensor expert_counts = call.empty({E}, ScalarType::Int);
  choose_into(call, logits, selection_bias, rule, routed_scaling_factor, scores, ids,
              expert_counts);
  const Tensor routing_tensor = call.empty({elements(spec)}, ScalarType::Int);
  tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  tilemoe_route_top_k_args args{};
  args.struct_size = sizeof args;
  args.ids = ids, args.scores = scores;
  args.workspace = begin + 2 * matrix_bytes, args.workspace_bytes = workspace_bytes;
  args.stream = call.stream();
  check(tilemoe_route_top_k(&routing, &args));
  return {routing_tensor, expert_counts};
}

std::tuple<Tensor, Tensor, Tensor> route_tokens(const Call& call, const Tensor& X,
                                                const TokenRouter& router, const Rule& rule,
                                                double routed_scaling_factor, bool wants_logits) {
  check_dims("X", X, 2, "(T, d)");
  check_dims("router_weight", router.weight, 2, "(E, d)");
  const int64_t T = X.size(0), d = X.size(1), E = router.weight.size(0);
  const Tensor rows = dense_rows_on_16(X), weight = dense_rows_on_16(router.weight);
  const tilemoe_routing_spec spec = routing_spec(call, TILEMOE_ROUTING_TOP_K, T, E, rule.K, 0);
  size_t workspace_bytes = 0;
  check(tilemoe_route_tokens_workspace_bytes(&spec, d, &workspace_bytes));
  NewRouting routing(call, spec, workspace_bytes);
  const Tensor expert_counts = call.empty({E}, ScalarType::Int);
  const Tensor logits =
      wants_logits ? call.empty({T, E}, router.logits_dtype) : call.empty({0}, router.logits_dtype);
  tilemoe_route_tokens_args args{};
  args.struct_size = sizeof args;
  args.scoring = narrowed<tilemoe_scoring>("scoring", rule.scoring);
  args.logits_dtype = call.view("logits", logits).dtype;
  args.X = call.view("X", rows);
  args.router_weight = call.view("router_weight", weight);
  args.router_bias = call.view("router_bias", router.bias);
  args.selection_bias = call.view("selection_bias", router.selection_bias);
  if (wants_logits) args.logits = call.view("logits", logits);
  args.expert_counts = call.view("expert_counts", expert_counts);
  args.n_group = rule.n_group, args.topk_group = rule.topk_group;
  args.group_score = narrowed<tilemoe_group_score>("group_score", rule.group_score);
  args.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  args.workspace = routing.workspace(), args.workspace_bytes = routing.workspace_bytes();
  args.stream = call.stream();
  check(tilemoe_route_tokens(&routing.get(), &args));
  return {routing.tensor(), expert_counts, logits};
}

std::tuple<Tensor, Tensor> route_logits(const Tensor& logits, const MaybeTensor& selection_bias,
                                        const std::vector<int64_t>& rule,
                                        double routed_scaling_factor) {
  const Call call({{"logits", logits}, {"selection_bias", selection_bias}});
  return choose_and_route(call, logits, selection_bias, unpack<Rule>("rule", rule),
                          routed_scaling_factor);
}

Tensor route_top_k(const Tensor& ids, const Tensor& scores, int64_t E, int64_t capacity) {
  const Call call({{"ids", ids}, {"scores", scores}});
  if (capacity < 1 && ids.numel() > 0)
    refuse("capacity must be >= 1, got " + std::to_string(capacity));
  return build_top_k(call, dense(ids), dense(scores), E, capacity);
}

Tensor route_general(const Tensor& tokens, const Tensor& experts, const Tensor& scores, int64_t T,
                     int64_t E) {
  const Call call({{"tokens", tokens}, {"experts", experts}, {"scores", scores}});
  check_dims("tokens", tokens, 1, "(pairs)");
  const Tensor dense_tokens = dense(tokens);
  const Tensor dense_experts = dense(experts);
  const Tensor dense_scores = dense(scores);
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
  const Tensor dense_counts = dense(counts);
  const MaybeTensor scores = row_scores ? MaybeTensor(dense(*row_scores)) : std::nullopt;
  NewRouting routing(call, routing_spec(call, TILEMOE_ROUTING_GROUPED, 0, counts.size(0), 0, rows));
  tilemoe_route_grouped_args args{};
  args.struct_size = sizeof args;
  args.counts = call.view("counts", dense_counts);
  if (call.device() == TILEMOE_CPU) {
    if (args.counts.dtype == TILEMOE_INT32) check_counts<int32_t>(dense_counts, rows);
    if (args.counts.dtype == TILEMOE_INT64) check_counts<int64_t>(dense_counts, rows);
  }
  args.scores = call.view("row_scores", scores);
  args.stream = call.stream();
  check(tilemoe_route_grouped(&routing.get(), &args));
  return routing.tensor();
}

}  // namespace tilemoe_torch
