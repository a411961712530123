#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "operators.h"
#include "packing.h"
#include "router.h"
#include "routing.h"

namespace tilemoe_torch {
namespace {

// The function of the experts.
struct Config {
  Numbers numbers;
  Reals reals;

  Config(const std::vector<int64_t>& its_numbers, const std::vector<double>& its_reals)
      : numbers(unpack<Numbers>("numbers", its_numbers)),
        reals(unpack<Reals>("reals", its_reals)) {}
};

// The experts' weights; W1 and W2 are required. On the CPU a weight that is not on 16 bytes is
// copied, as X is: a memory-mapped checkpoint has tensors on 8. On a GPU the library rejects it: a
// copy in every call would cost a weight's memory and time.
class Weights {
 public:
  Weights(const Call& call, const Tensors& list) : list_(list) {
    for (size_t place : {kW1, kW2})
      if (!list[place]) refuse(std::string(kWeightNames[place]) + " is absent");
    if (call.device() != TILEMOE_CPU) return;
    for (MaybeTensor& weight : list_)
      if (weight) weight = weight_on_16(*weight);
  }

  const Tensor& W1() const { return *list_[kW1]; }
  const Tensor& W2() const { return *list_[kW2]; }
  const MaybeTensor& operator[](size_t place) const { return list_[place]; }

 private:
  Tensors list_;
};

// Views of weights, or of their gradients, that begin at `first` and have these names.
tilemoe_weights views(const Call& call, const MaybeTensor* first, const char* const* names) {
  tilemoe_weights all{};
  all.struct_size = sizeof all;
  all.W1 = call.view(names[kW1], first[kW1]);
  all.W1_up = call.view(names[kW1Up], first[kW1Up]);
  all.W2 = call.view(names[kW2], first[kW2]);
  all.b1 = call.view(names[kB1], first[kB1]);
  all.b1_up = call.view(names[kB1Up], first[kB1Up]);
  all.b2 = call.view(names[kB2], first[kB2]);
  return all;
}

// If the sizes of W1 and W2 do not match, either may be wrong: the message contains both.
void check_one_layer(const tilemoe_experts& experts, const Tensor& W1, const Tensor& W2) {
  const bool gated = tilemoe_activation_gated(experts.activation);
  if (!gated && experts.gate_layout != TILEMOE_GATE_CONCATENATED) return;  // the library rejects it
  const bool both = gated && experts.gate_layout != TILEMOE_GATE_SPLIT;
  const int64_t rows = both ? 2 * experts.n : experts.n;
  if (W1.dim() == 3 && W1.size(0) == experts.E && W1.size(1) == rows && W1.size(2) == experts.d)
    return;
  refuse("W1 has shape " + describe_shape(W1) + " and W2 " + describe_shape(W2) + ", expected " +
         (both ? "(E, 2n, d)" : "(E, n, d)") + " and (E, d, n) of the same E, n and d");
}

// The sizes are W2's, whose shape does not depend on the activation and the layout of the gate.
tilemoe_experts experts_of(const Call& call, const Tensor& X, const Weights& weights,
                           const Config& config) {
  const auto& [numbers, reals] = config;
  check_dims("W2", weights.W2(), 3, "(E, d, n)");
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = call.device();
  experts.dtype = call.view("X", X).dtype;
  experts.E = weights.W2().size(0), experts.d = weights.W2().size(1);
  experts.n = weights.W2().size(2);
  experts.activation = narrowed<tilemoe_activation>("activation", numbers.activation);
  experts.gate_layout = narrowed<tilemoe_gate_layout>("gate_layout", numbers.gate_layout);
  experts.clamp = static_cast<float>(reals.clamp);
  experts.alpha = static_cast<float>(reals.alpha);
  experts.up_shift = static_cast<float>(reals.up_shift);
  experts.column_blocks = narrowed<int32_t>("column_blocks", numbers.column_blocks);
  check_one_layer(experts, weights.W1(), weights.W2());
  return experts;
}

tilemoe_routing_spec spec_of(const Call& call, const Tensor& X, const tilemoe_experts& experts,
                             const Numbers& numbers, int64_t capacity) {
  check_dims("X", X, 2, "(T, d)");
  const auto kind = narrowed<tilemoe_routing_kind>("kind", numbers.rule.kind);
  const int64_t T = kind == TILEMOE_ROUTING_GROUPED ? 0 : X.size(0);
  return routing_spec(call, kind, T, experts.E, numbers.rule.K, capacity);
}

size_t workspace_size(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                      tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients) {
  tilemoe_workspace_query query{};
  query.struct_size = sizeof query;
  query.experts = &experts, query.routing = &spec;
  query.pass = pass, query.mode = mode, query.gradients = gradients;
  size_t bytes = 0;
  check(tilemoe_workspace_bytes(&query, &bytes));
  return bytes;
}

Tensor workspace_for(const Call& call, const tilemoe_experts& experts,
                     const tilemoe_routing_spec& spec, tilemoe_pass pass,
                     tilemoe_backward_mode mode, uint32_t gradients, size_t* bytes) {
  *bytes = workspace_size(experts, spec, pass, mode, gradients);
  return call.bytes(*bytes);
}

void check_top_k(const Rule& rule) {
  if (rule.kind != TILEMOE_ROUTING_TOP_K)
    refuse("kind is " + std::to_string(rule.kind) + ", expected that of a top-K routing");
}

// Every gradient of one backward, in the order of their bits; absent ones are not computed.
using Gradients = Tensors;

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

// The bits of the gradients that exist. If there are none, which the library reads as all, dW1's
// bit: its workspace is the smallest, and sufficient for dH over H.
uint32_t workspace_bits(const Gradients& gradients) {
  int64_t bits = 0;
  for (size_t i = 0; i < kGradients; ++i)
    if (gradients[i]) bits |= bit(i);
  return bits ? static_cast<uint32_t>(bits) : uint32_t{TILEMOE_GRADIENT_W1};
}

Gradients select(const Gradients& gradients, int64_t bits) {
  Gradients selected(kGradients);
  for (size_t i = 0; i < kGradients; ++i)
    if (bits & bit(i)) selected[i] = gradients[i];
  return selected;
}

// Allocates memory for each bit of `wanted`, zeroed if sums are added to it.
void allocate(const Call& call, int64_t wanted, const Tensor& X, const Tensor& H,
              const Weights& weights, const Numbers& numbers, bool accumulate,
              Gradients& gradients) {
  check_dims("X", X, 2, "(T, d)");
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  if (wanted & bit(kDX)) gradients[kDX] = call.empty({X.size(0), X.size(1)}, X.scalar_type());
  if (wanted & bit(kDs))
    gradients[kDs] = numbers.rule.kind == TILEMOE_ROUTING_TOP_K
                         ? call.empty({X.size(0), numbers.rule.K}, ScalarType::Float)
                         : call.empty({H.size(0)}, ScalarType::Float);
  for (size_t place = 0; place < kWeights; ++place) {
    if (!(wanted & bit(kDWeights + place))) continue;
    if (!weights[place]) refuse("the gradient of an absent weight is wanted");
    MaybeTensor& gradient = gradients[kDWeights + place];
    gradient = empty_like_weight(*weights[place]);
    if (accumulate) zero(*gradient);
  }
}

std::vector<Tensor> in_order(const Gradients& gradients, int64_t wanted) {
  std::vector<Tensor> made;
  for (size_t i = 0; i < kGradients; ++i)
    if (wanted & bit(i)) made.push_back(*gradients[i]);
  return made;
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
    refuse("part is " + std::to_string(part) + ", expected 0 to " + std::to_string(parts - 1));
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

// Writes O, and H if it is given, else as in inference.
void forward_into(const Call& call, const Tensor& X, const Tensor& routing_tensor,
                  const Weights& weights, const MaybeTensor& addend, const tilemoe_experts& layer,
                  const tilemoe_routing_spec& spec, const tilemoe_part* part, const Tensor& O,
                  const MaybeTensor& H) {
  const tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  const Tensor rows = dense_rows_on_16(X);
  const MaybeTensor added = addend ? MaybeTensor(dense_rows_on_16(*addend)) : std::nullopt;
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  if (H) saved.H = call.view("H", *H);

  const tilemoe_weights all = views(call, &weights[0], kWeightNames);
  tilemoe_forward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = &all;
  args.X = call.view("X", rows);
  args.O = call.view("O", O);
  args.addend = call.view("addend", added);
  args.saved = H ? &saved : nullptr;
  args.block_turns = call.ctas_per_sm();
  args.part = part;
  const Tensor workspace =
      workspace_for(call, layer, spec, H ? TILEMOE_PASS_FORWARD : TILEMOE_PASS_INFERENCE,
                    TILEMOE_BACKWARD_WHOLE, 0, &args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_forward(&layer, &args));
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

// Allocates all memory, the workspace last, before it launches anything, and frees the workspace
// when it returns. A part uses a workspace of the caller.
void backward(const Call& call, const MaybeTensor& dO, const Tensor& X, const Tensor& H,
              tilemoe_backward_mode mode, const Tensor& routing_tensor, const Weights& weights,
              const Config& config, const Gradients& gradients, bool accumulate,
              const tilemoe_part* part = nullptr, const Tensor* given_workspace = nullptr) {
  const Tensor rows = dense_rows_on_16(X);
  const MaybeTensor grad_rows = dO ? MaybeTensor(dense_rows_on_16(*dO)) : std::nullopt;
  const tilemoe_experts experts = experts_of(call, X, weights, config);
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  const tilemoe_routing_spec spec = spec_of(call, X, experts, config.numbers, H.size(0));
  const tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  saved.H = call.view("H", H);
  saved.state = mode == TILEMOE_BACKWARD_REST ? TILEMOE_SAVED_DH_OVER_H : TILEMOE_SAVED_H;
  if (part && part->first_token > 0) {  // the parts come in the order of their tokens
    saved.state = TILEMOE_SAVED_PARTS_OF_DH;
    saved.parts_tokens = part->first_token;
  }

  const tilemoe_weights all = views(call, &weights[0], kWeightNames);
  const tilemoe_weights dweights = views(call, &gradients[kDWeights], &kGradientNames[kDWeights]);

  tilemoe_backward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = &all, args.dweights = &dweights;
  args.X = call.view("X", rows);
  args.dO = call.view("dO", grad_rows);
  args.saved = &saved;
  args.mode = mode;
  args.dX = call.view("dX", gradients[kDX]);
  args.ds = call.view("ds", gradients[kDs]);
  args.accumulate = accumulate;
  args.block_turns = call.ctas_per_sm();
  args.part = part;
  args.workspace_bytes = given_workspace ? static_cast<size_t>(given_workspace->numel()) : 0;
  const Tensor workspace = given_workspace
                               ? *given_workspace
                               : workspace_for(call, experts, spec, TILEMOE_PASS_BACKWARD, mode,
                                               workspace_bits(gradients), &args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_backward(&experts, &args));
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

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> layer_bytes(
    const Tensor& like, const std::vector<int64_t>& size_list,
    const std::vector<int64_t>& number_list) {
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
  const tilemoe_routing_spec spec =
      routing_spec(call, TILEMOE_ROUTING_TOP_K, sizes.T, sizes.E, numbers.rule.K, sizes.capacity);
  tilemoe_saved_size saved{};
  saved.struct_size = sizeof saved;
  check(tilemoe_saved_bytes(&experts, &spec, &saved));
  const auto workspace = [&](tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients) {
    return static_cast<int64_t>(workspace_size(experts, spec, pass, mode, gradients));
  };
  constexpr uint32_t kBeforeW1 =
      TILEMOE_GRADIENT_X | TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_B2;
  const int64_t of_W1 =
      workspace(TILEMOE_PASS_BACKWARD, TILEMOE_BACKWARD_REST, TILEMOE_GRADIENT_W1);
  return {static_cast<int64_t>(saved.routing), static_cast<int64_t>(saved.H),
          workspace(TILEMOE_PASS_FORWARD, TILEMOE_BACKWARD_WHOLE, 0),
          std::max(workspace(TILEMOE_PASS_BACKWARD, TILEMOE_BACKWARD_OVER_H, kBeforeW1), of_W1),
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
  const Weights weights(call, weight_list);
  const Config config(numbers, reals);
  const Rule& rule = config.numbers.rule;
  check_top_k(rule);
  const auto [routing, expert_counts] =
      choose_and_route(call, logits, selection_bias, rule, config.reals.routed_scaling_factor);
  const auto [O, H] =
      forward(call, X, routing, weights, addend, logits.size(0) * rule.K, config, keep_H);
  return {O, H, routing, expert_counts};
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
  if (gradients[kDX] || gradients[kDs]) refuse("dX or ds is given, expected weights' gradients");
  const int64_t last = wanted & kOfW1 ? kOfW1 : 0, first = ~last;
  if (dO) {
    allocate(call, wanted & first, X, H, weights, config.numbers, accumulate, gradients);
    backward(call, dO, X, H, TILEMOE_BACKWARD_OVER_H, routing, weights, config,
             select(gradients, first), accumulate);
  } else if (wanted & ~kOfW1) {
    refuse("dO is absent: dH alone gives only the gradients of W1 and b1");
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
    throw std::runtime_error("tilemoe: H was overwritten with dH, then: " +
                             std::string(error.what()));
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
  if (H.has_value() == H_consumed.has_value())
    refuse("H and H_consumed are both given or both absent, expected one of them");
  if (!dO && !H_consumed) refuse("dO is absent, expected only with an H_consumed that contains dH");
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
    refuse("gradients of W1 or b1 are given, but they are computed afterwards, from dH alone");
  const tilemoe_part of_pass = part_of(bounds, cuts, part, weights.W2().size(0));
  backward(call, dO, X, H, TILEMOE_BACKWARD_OVER_H, routing, weights, config, gradients, false,
           &of_pass, &workspace);
}

}  // namespace tilemoe_torch
