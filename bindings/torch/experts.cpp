#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "layer_call.h"
#include "router.h"
#include "routing.h"

namespace tilemoe_torch {
namespace {

void check_top_k(const Rule& rule) {
  if (rule.kind != TILEMOE_ROUTING_TOP_K)
    refuse("kind must be " + std::to_string(TILEMOE_ROUTING_TOP_K) + " (top-K), got " +
           std::to_string(rule.kind));
}

// The gradients, except dX, that are computed from dH alone, and so can be computed last.
constexpr int64_t kOfW1 =
    TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP | TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP;

// The gradients that are passed to an operator, each at its bit.
Gradients given(const std::vector<Tensor>& list, int64_t places) {
  const auto bits = static_cast<uint64_t>(places);
  const auto expected = static_cast<size_t>(std::popcount(bits));
  if (list.size() != expected || bits >> kGradients)
    refuse_length("gradients", list.size(), expected);
  Gradients gradients(kGradients);
  auto next = list.begin();
  for (size_t i = 0; i < kGradients; ++i)
    if (places & bit(i)) gradients[i] = *next++;
  return gradients;
}

Gradients select(const Gradients& gradients, int64_t bits) {
  Gradients selected(kGradients);
  for (size_t i = 0; i < kGradients; ++i)
    if (bits & bit(i)) selected[i] = gradients[i];
  return selected;
}

// One of the parts of a pass that `bounds` and `cuts` define.
tilemoe_part part_of(const Tensor& bounds, const std::vector<int64_t>& cuts, int64_t part,
                     int64_t E) {
  const auto parts = static_cast<int64_t>(cuts.size()) - 1;
  if (bounds.scalar_type() != ScalarType::Int || !bounds.is_contiguous() || bounds.dim() != 2 ||
      bounds.size(0) != parts + 1 || bounds.size(1) != E)
    refuse("bounds has shape " + describe_shape(bounds) + ", expected (" +
           std::to_string(parts + 1) + ", " + std::to_string(E) + ") int32, contiguous");
  if (part < 0 || part >= parts)
    refuse("part must be in [0, " + std::to_string(parts - 1) + "], got " + std::to_string(part));
  const auto first = static_cast<size_t>(part);
  tilemoe_part made{};
  made.struct_size = sizeof made;
  made.begins = static_cast<const int32_t*>(bounds.data_ptr()) + part * E;
  made.ends = made.begins + E;
  made.first_token = cuts[first];
  made.tokens = cuts[first + 1] - cuts[first];
  made.last = part + 1 == parts;
  return made;
}

// O, and H if it is to be kept, else empty.
std::tuple<Tensor, Tensor> forward(const Call& call, const Tensor& X, const Tensor& routing_tensor,
                                   const Weights& weights, const MaybeTensor& addend,
                                   int64_t capacity, const Config& config, bool keep_H) {
  const tilemoe_experts layer = experts_of(call, X, weights, config);
  const tilemoe_routing_spec spec = spec_of(call, X, layer, config.numbers, capacity);
  const int64_t width = tilemoe_activation_gated(layer.activation) ? 2 * layer.n : layer.n;
  const Tensor O = call.empty({X.size(0), X.size(1)}, X.scalar_type());
  const Tensor H = keep_H ? call.empty({spec.capacity, width}, X.scalar_type())
                          : call.empty({0}, X.scalar_type());
  forward_into(call, X, routing_tensor, weights, addend, layer, spec, nullptr, O,
               keep_H ? MaybeTensor(H) : std::nullopt);
  return {O, H};
}

// The result of router_backward for ds.
Tensor of_logits(const Call& call, const Tensor& ds, const Tensor& X, const Tensor& routing,
                 const Weights& weights, const MaybeTensor& logits, const Config& config,
                 ScalarType dtype) {
  const Rule& rule = config.numbers.rule;
  const tilemoe_routing_spec spec =
      routing_spec(call, narrowed<tilemoe_routing_kind>("kind", rule.kind), X.size(0),
                   weights.W2().size(0), rule.K, ds.numel());
  return logits_gradient(call, bind_routing(call, spec, routing), ds, logits, rule.scoring,
                         config.reals.routed_scaling_factor, dtype);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> routed_forward(
    const Call& call, const Tensor& X, const Tensor& logits, const MaybeTensor& selection_bias,
    const Weights& weights, const MaybeTensor& addend, const Config& config, bool keep_H) {
  const Rule& rule = config.numbers.rule;
  check_top_k(rule);
  const auto [routing, expert_counts] =
      choose_and_route(call, logits, selection_bias, rule, config.reals.routed_scaling_factor);
  const auto [O, H] =
      forward(call, X, routing, weights, addend, logits.size(0) * rule.K, config, keep_H);
  return {O, H, routing, expert_counts};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> layer_bytes(
    const Tensor& like, const std::vector<int64_t>& size_list,
    const std::vector<int64_t>& number_list, const std::vector<int64_t>& formats) {
  const Call call({{"like", like}});
  const auto sizes = unpack<Sizes>("sizes", size_list);
  const auto numbers = unpack<Numbers>("numbers", number_list);
  check_top_k(numbers.rule);
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = call.device();
  experts.dtype = call.view("like", like).dtype;
  experts.E = sizes.E, experts.d = sizes.d, experts.n = sizes.n;
  experts.activation = narrowed<tilemoe_activation>("activation", numbers.activation);
  experts.gate_layout = narrowed<tilemoe_gate_layout>("gate_layout", numbers.gate_layout);
  experts.column_blocks = narrowed<int32_t>("column_blocks", numbers.column_blocks);
  experts.weight_blocks = narrowed<int32_t>("weight_blocks", numbers.weight_blocks);
  experts.recipe = narrowed<tilemoe_recipe>("recipe", numbers.recipe);
  experts.format_H = narrowed<tilemoe_format>("save_h", numbers.save_h);
  const Quantized quantized(formats);
  quantized.set_formats(experts);
  const tilemoe_routing_spec spec =
      routing_spec(call, TILEMOE_ROUTING_TOP_K, sizes.T, sizes.E, numbers.rule.K, sizes.capacity);
  tilemoe_saved_size saved{};
  saved.struct_size = sizeof saved;
  check(tilemoe_saved_bytes(&experts, &spec, &saved));
  const auto workspace = [&](tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients) {
    return static_cast<int64_t>(workspace_size(experts, spec, pass, mode, gradients));
  };
  // A quantised weight has a gradient with the FP8 recipes alone, that of its master.
  const bool masters = experts.recipe != TILEMOE_RECIPE_BF16;
  const bool has_dW1 = masters || !quantized.of(kW1), has_dW2 = masters || !quantized.of(kW2);
  const uint32_t before_W1 = TILEMOE_GRADIENT_X | TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_B2 |
                             (has_dW2 ? TILEMOE_GRADIENT_W2 : 0);
  const int64_t of_W1 =
      has_dW1 ? workspace(TILEMOE_PASS_BACKWARD, TILEMOE_BACKWARD_REST, TILEMOE_GRADIENT_W1) : 0;
  return {static_cast<int64_t>(saved.routing), static_cast<int64_t>(saved.H),
          workspace(TILEMOE_PASS_FORWARD, TILEMOE_BACKWARD_WHOLE, 0),
          std::max(workspace(TILEMOE_PASS_BACKWARD, TILEMOE_BACKWARD_OVER_H, before_W1), of_W1),
          of_W1};
}

std::tuple<Tensor, Tensor> experts(const Tensor& X, const MaybeTensor& router,
                                   const Tensor& routing, const Tensors& weight_list,
                                   const MaybeTensor& addend, int64_t capacity,
                                   const std::vector<int64_t>& numbers,
                                   const std::vector<double>& reals, bool keep_H,
                                   bool /*overwrite_H*/) {
  const Call call({{"X", X},
                   {"router", router},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"addend", addend}});
  return forward(call, X, routing, Weights(call, weight_list), addend, capacity,
                 Config(numbers, reals), keep_H);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe(
    const Tensor& X, const Tensor& logits, const MaybeTensor& selection_bias,
    const Tensors& weight_list, const MaybeTensor& addend, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, bool keep_H, bool /*overwrite_H*/) {
  const Call call({{"X", X},
                   {"logits", logits},
                   {"selection_bias", selection_bias},
                   {"weights", kWeightNames, weight_list},
                   {"addend", addend}});
  return routed_forward(call, X, logits, selection_bias, Weights(call, weight_list), addend,
                        Config(numbers, reals), keep_H);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_tokens(
    const Tensor& X, const Tensor& router_weight, const MaybeTensor& router_bias,
    const MaybeTensor& selection_bias, const Tensors& weight_list, const MaybeTensor& addend,
    const std::vector<int64_t>& numbers, const std::vector<double>& reals, ScalarType logits_dtype,
    bool wants_logits) {
  const Call call({{"X", X},
                   {"router_weight", router_weight},
                   {"router_bias", router_bias},
                   {"selection_bias", selection_bias},
                   {"weights", kWeightNames, weight_list},
                   {"addend", addend}});
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  const Rule& rule = config.numbers.rule;
  check_top_k(rule);
  const auto [routing, expert_counts, logits] =
      route_tokens(call, X, {router_weight, router_bias, selection_bias, logits_dtype}, rule,
                   config.reals.routed_scaling_factor, wants_logits);
  const auto [O, H] = forward(call, X, routing, weights, addend, X.size(0) * rule.K, config, false);
  return {O, routing, expert_counts, logits};
}

std::vector<Tensor> experts_backward(const Tensor& dO, const Tensor& X, const Tensor& H,
                                     const Tensor& routing, const Tensors& weight_list,
                                     const MaybeTensor& logits, const std::vector<int64_t>& numbers,
                                     const std::vector<double>& reals, ScalarType router_dtype,
                                     int64_t wanted) {
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"logits", logits}});
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  Gradients gradients(kGradients);
  allocate(call, wanted, X, H, weights, config.numbers, false, gradients);
  backward(call, dO, X, H, TILEMOE_BACKWARD_WHOLE, routing, weights, config, gradients, false);
  MaybeTensor& ds = gradients[kDs];
  if (ds && config.numbers.rule.scoring >= 0)
    ds = of_logits(call, *ds, X, routing, weights, logits, config, router_dtype);
  return in_order(gradients, wanted);
}

// In two stages if gradients of W1 and b1 are new memory: they are allocated after the workspace of
// dX is freed, so both never exist at once.
std::tuple<std::vector<Tensor>, bool> experts_backward_over_H(
    const MaybeTensor& dO, const Tensor& X, const Tensor& H, const Tensor& routing,
    const Tensors& weight_list, const MaybeTensor& logits, const std::vector<Tensor>& given_list,
    int64_t places, const std::vector<int64_t>& numbers, const std::vector<double>& reals,
    ScalarType router_dtype, int64_t wanted, bool accumulate) {
  Gradients gradients = given(given_list, places);
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"logits", logits},
                   {"gradients", kGradientNames, gradients}});
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  if (gradients[kDX] || gradients[kDs])
    refuse("expected only the gradients of weights, got dX or ds");
  const int64_t last = wanted & kOfW1 ? kOfW1 : 0, first = ~last;
  if (dO) {
    allocate(call, wanted & first, X, H, weights, config.numbers, accumulate, gradients);
    backward(call, dO, X, H, TILEMOE_BACKWARD_OVER_H, routing, weights, config,
             select(gradients, first), accumulate);
  } else if (wanted & ~kOfW1) {
    refuse("dO is required for all gradients but those of W1 and b1");
  }
  // From here on H contains dH. Only a failure for lack of memory can be continued from.
  try {
    const MaybeTensor ds = gradients[kDs];
    MaybeTensor dlogits;
    if (ds && config.numbers.rule.scoring >= 0)
      dlogits = of_logits(call, *ds, X, routing, weights, logits, config, router_dtype);
    if (last) {
      allocate(call, wanted & last, X, H, weights, config.numbers, accumulate, gradients);
      backward(call, std::nullopt, X, H, TILEMOE_BACKWARD_REST, routing, weights, config,
               select(gradients, last), accumulate);
    }
    if (dlogits) gradients[kDs] = dlogits;
  } catch (const OutOfMemory&) {
    return {in_order(gradients, wanted & first), false};
  } catch (const std::exception& error) {
    throw std::runtime_error("H was overwritten with dH, then: " + std::string(error.what()));
  }
  return {in_order(gradients, wanted), true};
}

void experts_backward_out(const MaybeTensor& dO, const Tensor& X, const MaybeTensor& H,
                          const MaybeTensor& H_consumed, const Tensor& routing,
                          const Tensors& weight_list, const std::vector<Tensor>& given_list,
                          int64_t places, const std::vector<int64_t>& numbers,
                          const std::vector<double>& reals, bool accumulate) {
  const Gradients gradients = given(given_list, places);
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"H_consumed", H_consumed},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"gradients", kGradientNames, gradients}});
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  if (H.has_value() == H_consumed.has_value()) refuse("expected exactly one of H and H_consumed");
  if (!dO && !H_consumed) refuse("dO is required unless H_consumed contains dH");
  const tilemoe_backward_mode mode = H    ? TILEMOE_BACKWARD_WHOLE
                                     : dO ? TILEMOE_BACKWARD_OVER_H
                                          : TILEMOE_BACKWARD_REST;
  backward(call, dO, X, H ? *H : *H_consumed, mode, routing, weights, config, gradients,
           accumulate);
}

void experts_part(const Tensor& X, const Tensor& routing, const Tensors& weight_list,
                  const Tensor& bounds, const std::vector<int64_t>& cuts, int64_t part,
                  int64_t capacity, const std::vector<int64_t>& numbers,
                  const std::vector<double>& reals, const Tensor& O, const MaybeTensor& H) {
  const Call call({{"X", X},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"bounds", bounds},
                   {"O", O},
                   {"H", H}});
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  const tilemoe_experts layer = experts_of(call, X, weights, config);
  const tilemoe_routing_spec spec = spec_of(call, X, layer, config.numbers, capacity);
  const tilemoe_part of_pass = part_of(bounds, cuts, part, layer.E);
  forward_into(call, X, routing, weights, std::nullopt, layer, spec, &of_pass, O, H);
}

void experts_backward_part(const Tensor& dO, const Tensor& X, const Tensor& H,
                           const Tensor& routing, const Tensors& weight_list,
                           const std::vector<Tensor>& given_list, int64_t places,
                           const Tensor& bounds, const std::vector<int64_t>& cuts, int64_t part,
                           const std::vector<int64_t>& numbers, const std::vector<double>& reals,
                           const Tensor& workspace) {
  const Gradients gradients = given(given_list, places);
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"gradients", kGradientNames, gradients},
                   {"bounds", bounds},
                   {"workspace", workspace}});
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  if (places & kOfW1)
    refuse("expected no gradients of W1 and b1: they are computed afterwards, from dH alone");
  const tilemoe_part of_pass = part_of(bounds, cuts, part, weights.W2().size(0));
  backward(call, dO, X, H, TILEMOE_BACKWARD_OVER_H, routing, weights, config, gradients, false,
           &of_pass, &workspace);
}

}  // namespace tilemoe_torch
