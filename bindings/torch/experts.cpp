#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>

#include "operators.h"
#include "router.h"
#include "routing.h"

namespace tilemoe_torch {
namespace {

struct Config {
  int64_t kind, K, activation, gate_layout;
  double clamp, alpha, up_shift;
  int64_t column_blocks;
};

struct Weights {
  const Tensor& W1;
  const MaybeTensor& W1_up;
  const Tensor& W2;
  const MaybeTensor &b1, &b1_up, &b2;

  tilemoe_weights view(const Call& call) const {
    return {sizeof(tilemoe_weights), call.view("W1", W1), call.view("W1_up", W1_up),
            call.view("W2", W2),     call.view("b1", b1), call.view("b1_up", b1_up),
            call.view("b2", b2)};
  }
};

// Where W1 and W2 have unlike sizes either may be the wrong one: the sentence has both.
void check_one_layer(const tilemoe_experts& experts, const Tensor& W1, const Tensor& W2) {
  const bool gated = tilemoe_activation_gated(experts.activation);
  if (!gated && experts.gate_layout != TILEMOE_GATE_CONCATENATED) return;  // the library refuses it
  const bool both = gated && experts.gate_layout != TILEMOE_GATE_SPLIT;
  const int64_t rows = both ? 2 * experts.n : experts.n;
  if (W1.dim() == 3 && W1.size(0) == experts.E && W1.size(1) == rows && W1.size(2) == experts.d)
    return;
  refuse("W1 has shape " + describe_shape(W1) + " and W2 " + describe_shape(W2) + ", expected " +
         (both ? "(E, 2n, d)" : "(E, n, d)") + " and (E, d, n) of the same E, n and d");
}

// The sizes are W2's, which has one shape whatever the activation and the layout of the gate.
tilemoe_experts experts_of(const Call& call, const Tensor& X, const Weights& weights,
                           const Config& config) {
  check_dims("W2", weights.W2, 3, "(E, d, n)");
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = call.device();
  experts.dtype = call.view("X", X).dtype;
  experts.E = weights.W2.size(0), experts.d = weights.W2.size(1), experts.n = weights.W2.size(2);
  experts.activation = narrowed<tilemoe_activation>("activation", config.activation);
  experts.gate_layout = narrowed<tilemoe_gate_layout>("gate_layout", config.gate_layout);
  experts.clamp = static_cast<float>(config.clamp);
  experts.alpha = static_cast<float>(config.alpha);
  experts.up_shift = static_cast<float>(config.up_shift);
  experts.column_blocks = narrowed<int32_t>("column_blocks", config.column_blocks);
  check_one_layer(experts, weights.W1, weights.W2);
  return experts;
}

tilemoe_routing_spec spec_of(const Call& call, const Tensor& X, const tilemoe_experts& experts,
                             const Config& config, int64_t capacity) {
  check_dims("X", X, 2, "(T, d)");
  const auto kind = narrowed<tilemoe_routing_kind>("kind", config.kind);
  const int64_t T = kind == TILEMOE_ROUTING_GROUPED ? 0 : X.size(0);
  return routing_spec(call, kind, T, experts.E, config.K, capacity);
}

Tensor workspace_for(const Call& call, const tilemoe_experts& experts,
                     const tilemoe_routing_spec& spec, tilemoe_pass pass,
                     tilemoe_backward_mode mode, uint32_t gradients, size_t* bytes) {
  tilemoe_workspace_query query{};
  query.struct_size = sizeof query;
  query.experts = &experts, query.routing = &spec;
  query.pass = pass, query.mode = mode, query.gradients = gradients;
  check(tilemoe_workspace_bytes(&query, bytes));
  return call.bytes(*bytes);
}

// A gradient in its weight's own layout, whichever of its last two dimensions is contiguous.
Tensor gradient_like(const Call& call, const Tensor& weight) {
  const ScalarType dtype = weight.scalar_type();
  if (weight.dim() != 3) return call.empty({weight.size(0), weight.size(1)}, dtype);
  const int64_t E = weight.size(0), rows = weight.size(1), columns = weight.size(2);
  if (weight.stride(2) == 1 || weight.stride(1) != 1) return call.empty({E, rows, columns}, dtype);
  return torch::stable::transpose(call.empty({E, columns, rows}, dtype), 1, 2);
}

// Every gradient of one backward; what is absent is not computed.
struct Gradients {
  MaybeTensor X, s, W1, W1_up, W2, b1, b1_up, b2;
};

// In the order of their bits (TILEMOE_GRADIENT_), in which they come back.
constexpr MaybeTensor Gradients::*kInOrder[] = {&Gradients::X,     &Gradients::s,  &Gradients::W1,
                                                &Gradients::W1_up, &Gradients::W2, &Gradients::b1,
                                                &Gradients::b1_up, &Gradients::b2};

// Those that come of dH alone but dX, and so can come last.
constexpr int64_t kOfW1 =
    TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP | TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP;

// The bits of those that are there. Of none, which the library takes for all, dW1's: its workspace
// is the least, and enough for dH over H.
uint32_t workspace_bits(const Gradients& gradients) {
  uint32_t bits = 0;
  for (int i = 0; i < 8; ++i)
    if (gradients.*kInOrder[i]) bits |= 1u << i;
  return bits ? bits : uint32_t{TILEMOE_GRADIENT_W1};
}

Gradients select(const Gradients& gradients, int64_t bits) {
  Gradients selected;
  for (int64_t i = 0; i < 8; ++i)
    if (bits & (int64_t{1} << i)) selected.*kInOrder[i] = gradients.*kInOrder[i];
  return selected;
}

// Puts new memory where `wanted` has a bit, zeros where sums are added to it.
void allocate(const Call& call, int64_t wanted, const Tensor& X, const Tensor& H,
              const Weights& weights, const Config& config, bool accumulate, Gradients& gradients) {
  check_dims("X", X, 2, "(T, d)");
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  const auto like = [&](int64_t bit, const MaybeTensor& weight, MaybeTensor& gradient) {
    if (!(wanted & bit)) return;
    if (!weight) refuse("the gradient of an absent weight is wanted");
    gradient = gradient_like(call, *weight);
    if (accumulate) torch::stable::zero_(*gradient);
  };
  if (wanted & TILEMOE_GRADIENT_X)
    gradients.X = call.empty({X.size(0), X.size(1)}, X.scalar_type());
  if (wanted & TILEMOE_GRADIENT_S)
    gradients.s = config.kind == TILEMOE_ROUTING_TOP_K
                      ? call.empty({X.size(0), config.K}, ScalarType::Float)
                      : call.empty({H.size(0)}, ScalarType::Float);
  like(TILEMOE_GRADIENT_W1, weights.W1, gradients.W1);
  like(TILEMOE_GRADIENT_W1_UP, weights.W1_up, gradients.W1_up);
  like(TILEMOE_GRADIENT_W2, weights.W2, gradients.W2);
  like(TILEMOE_GRADIENT_B1, weights.b1, gradients.b1);
  like(TILEMOE_GRADIENT_B1_UP, weights.b1_up, gradients.b1_up);
  like(TILEMOE_GRADIENT_B2, weights.b2, gradients.b2);
}

std::vector<Tensor> in_order(const Gradients& gradients, int64_t wanted) {
  std::vector<Tensor> made;
  for (int64_t i = 0; i < 8; ++i)
    if (wanted & (int64_t{1} << i)) made.push_back(*(gradients.*kInOrder[i]));
  return made;
}

// Asks for all memory that it needs, its workspace the last, before it launches anything; when it
// returns the workspace is torch's again.
void backward(const Call& call, const MaybeTensor& dO, const Tensor& X, const Tensor& H,
              tilemoe_backward_mode mode, const Tensor& routing_tensor, const Weights& weights,
              const Config& config, const Gradients& gradients, bool accumulate) {
  const Tensor rows = dense_rows_on_16(X);
  const MaybeTensor grad_rows = dO ? MaybeTensor(dense_rows_on_16(*dO)) : std::nullopt;
  const tilemoe_experts experts = experts_of(call, X, weights, config);
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  const tilemoe_routing_spec spec = spec_of(call, X, experts, config, H.size(0));
  const tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  saved.H = call.view("H", H);
  saved.state = mode == TILEMOE_BACKWARD_REST ? TILEMOE_SAVED_DH_OVER_H : TILEMOE_SAVED_H;

  const tilemoe_weights all = weights.view(call);
  tilemoe_weights dweights{};
  dweights.struct_size = sizeof dweights;
  dweights.W1 = call.view("dW1", gradients.W1);
  dweights.W1_up = call.view("dW1_up", gradients.W1_up);
  dweights.W2 = call.view("dW2", gradients.W2);
  dweights.b1 = call.view("db1", gradients.b1);
  dweights.b1_up = call.view("db1_up", gradients.b1_up);
  dweights.b2 = call.view("db2", gradients.b2);

  tilemoe_backward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = &all, args.dweights = &dweights;
  args.X = call.view("X", rows);
  args.dO = call.view("dO", grad_rows);
  args.saved = &saved;
  args.mode = mode;
  args.dX = call.view("dX", gradients.X);
  args.ds = call.view("ds", gradients.s);
  args.accumulate = accumulate;
  args.block_turns = call.block_turns();
  const Tensor workspace = workspace_for(call, experts, spec, TILEMOE_PASS_BACKWARD, mode,
                                         workspace_bits(gradients), &args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_backward(&experts, &args));
}

// What router_backward makes of ds.
Tensor of_logits(const Call& call, const Tensor& ds, const Tensor& X, const Tensor& routing,
                 const Weights& weights, const MaybeTensor& logits, const Config& config,
                 int64_t scoring, ScalarType dtype) {
  const tilemoe_routing_spec spec =
      routing_spec(call, narrowed<tilemoe_routing_kind>("kind", config.kind), X.size(0),
                   weights.W2.size(0), config.K, ds.numel());
  return logits_gradient(call, bind_routing(call, spec, routing), ds, logits, scoring, dtype);
}

}  // namespace

std::tuple<Tensor, Tensor> experts(Tensor X, MaybeTensor router, Tensor routing_tensor, Tensor W1,
                                   MaybeTensor W1_up, Tensor W2, MaybeTensor b1, MaybeTensor b1_up,
                                   MaybeTensor b2, MaybeTensor addend, int64_t kind, int64_t K,
                                   int64_t capacity, int64_t /*scoring*/, int64_t activation,
                                   int64_t gate_layout, double clamp, double alpha, double up_shift,
                                   int64_t column_blocks, bool keep_H, bool /*overwrite_H*/) {
  const Call call({{"X", X},
                   {"router", router},
                   {"routing", routing_tensor},
                   {"W1", W1},
                   {"W1_up", W1_up},
                   {"W2", W2},
                   {"b1", b1},
                   {"b1_up", b1_up},
                   {"b2", b2},
                   {"addend", addend}});
  const Weights weights{W1, W1_up, W2, b1, b1_up, b2};
  const Config config{kind, K, activation, gate_layout, clamp, alpha, up_shift, column_blocks};
  const tilemoe_experts layer = experts_of(call, X, weights, config);
  const tilemoe_routing_spec spec = spec_of(call, X, layer, config, capacity);
  const tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  const Tensor rows = dense_rows_on_16(X);
  if (addend) addend = dense_rows_on_16(*addend);
  const int64_t width = tilemoe_activation_gated(layer.activation) ? 2 * layer.n : layer.n;
  const Tensor O = call.empty({X.size(0), X.size(1)}, X.scalar_type());
  const Tensor H = keep_H ? call.empty({routing.spec.capacity, width}, X.scalar_type())
                          : call.empty({0}, X.scalar_type());
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  if (keep_H) saved.H = call.view("H", H);

  const tilemoe_weights all = weights.view(call);
  tilemoe_forward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = &all;
  args.X = call.view("X", rows);
  args.O = call.view("O", O);
  args.addend = call.view("addend", addend);
  args.saved = keep_H ? &saved : nullptr;
  args.block_turns = call.block_turns();
  const Tensor workspace =
      workspace_for(call, layer, spec, keep_H ? TILEMOE_PASS_FORWARD : TILEMOE_PASS_INFERENCE,
                    TILEMOE_BACKWARD_WHOLE, 0, &args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_forward(&layer, &args));
  return {O, H};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe(
    Tensor X, Tensor logits, MaybeTensor selection_bias, Tensor W1, MaybeTensor W1_up, Tensor W2,
    MaybeTensor b1, MaybeTensor b1_up, MaybeTensor b2, MaybeTensor addend, int64_t K,
    int64_t scoring, int64_t activation, int64_t gate_layout, double clamp, double alpha,
    double up_shift, int64_t column_blocks, bool keep_H, bool overwrite_H) {
  device_of({{"X", X},
             {"logits", logits},
             {"selection_bias", selection_bias},
             {"W1", W1},
             {"W1_up", W1_up},
             {"W2", W2},
             {"b1", b1},
             {"b1_up", b1_up},
             {"b2", b2},
             {"addend", addend}});
  const auto [routing, expert_counts] = route_logits(logits, selection_bias, K, scoring);
  const auto [O, H] =
      experts(X, logits, routing, W1, W1_up, W2, b1, b1_up, b2, addend, TILEMOE_ROUTING_TOP_K, K,
              logits.size(0) * K, scoring, activation, gate_layout, clamp, alpha, up_shift,
              column_blocks, keep_H, overwrite_H);
  return {O, H, routing, expert_counts};
}

std::vector<Tensor> experts_backward(Tensor dO, Tensor X, Tensor H, Tensor routing, Tensor W1,
                                     MaybeTensor W1_up, Tensor W2, MaybeTensor b1,
                                     MaybeTensor b1_up, MaybeTensor b2, MaybeTensor logits,
                                     int64_t kind, int64_t K, int64_t scoring,
                                     ScalarType router_dtype, int64_t activation,
                                     int64_t gate_layout, double clamp, double alpha,
                                     double up_shift, int64_t column_blocks, int64_t wanted) {
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"routing", routing},
                   {"W1", W1},
                   {"W1_up", W1_up},
                   {"W2", W2},
                   {"b1", b1},
                   {"b1_up", b1_up},
                   {"b2", b2},
                   {"logits", logits}});
  const Weights weights{W1, W1_up, W2, b1, b1_up, b2};
  const Config config{kind, K, activation, gate_layout, clamp, alpha, up_shift, column_blocks};
  Gradients gradients;
  allocate(call, wanted, X, H, weights, config, false, gradients);
  backward(call, dO, X, H, TILEMOE_BACKWARD_WHOLE, routing, weights, config, gradients, false);
  if (gradients.s && scoring >= 0)
    gradients.s =
        of_logits(call, *gradients.s, X, routing, weights, logits, config, scoring, router_dtype);
  return in_order(gradients, wanted);
}

// In two stages where dW1 and its like are new memory: they are asked for when the workspace of dX
// is torch's again, so that both are never there at once.
std::tuple<std::vector<Tensor>, bool> experts_backward_over_H(
    MaybeTensor dO, Tensor X, Tensor H, Tensor routing, Tensor W1, MaybeTensor W1_up, Tensor W2,
    MaybeTensor b1, MaybeTensor b1_up, MaybeTensor b2, MaybeTensor logits, MaybeTensor dW1,
    MaybeTensor dW1_up, MaybeTensor dW2, MaybeTensor db1, MaybeTensor db1_up, MaybeTensor db2,
    int64_t kind, int64_t K, int64_t scoring, ScalarType router_dtype, int64_t activation,
    int64_t gate_layout, double clamp, double alpha, double up_shift, int64_t column_blocks,
    int64_t wanted, bool accumulate) {
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"routing", routing},
                   {"W1", W1},
                   {"W1_up", W1_up},
                   {"W2", W2},
                   {"b1", b1},
                   {"b1_up", b1_up},
                   {"b2", b2},
                   {"logits", logits},
                   {"dW1", dW1},
                   {"dW1_up", dW1_up},
                   {"dW2", dW2},
                   {"db1", db1},
                   {"db1_up", db1_up},
                   {"db2", db2}});
  const Weights weights{W1, W1_up, W2, b1, b1_up, b2};
  const Config config{kind, K, activation, gate_layout, clamp, alpha, up_shift, column_blocks};
  Gradients gradients{std::nullopt, std::nullopt, dW1, dW1_up, dW2, db1, db1_up, db2};
  const int64_t last = wanted & kOfW1 ? kOfW1 : 0, first = ~last;
  if (dO) {
    allocate(call, wanted & first, X, H, weights, config, accumulate, gradients);
    backward(call, dO, X, H, TILEMOE_BACKWARD_OVER_H, routing, weights, config,
             select(gradients, first), accumulate);
  } else if (wanted & ~kOfW1) {
    refuse("dO is absent: what comes of dH alone are the gradients of W1 and b1");
  }
  // From here on H holds dH. What fails for want of memory can be gone on from, and nothing else.
  try {
    const MaybeTensor ds = gradients.s;
    MaybeTensor dlogits;
    if (ds && scoring >= 0)
      dlogits = of_logits(call, *ds, X, routing, weights, logits, config, scoring, router_dtype);
    if (last) {
      allocate(call, wanted & last, X, H, weights, config, accumulate, gradients);
      backward(call, std::nullopt, X, H, TILEMOE_BACKWARD_REST, routing, weights, config,
               select(gradients, last), accumulate);
    }
    if (dlogits) gradients.s = dlogits;
  } catch (const OutOfMemory&) {
    return {in_order(gradients, wanted & first), false};
  } catch (const std::exception& error) {
    throw std::runtime_error("tilemoe: H was overwritten with dH, then: " +
                             std::string(error.what()));
  }
  return {in_order(gradients, wanted), true};
}

void experts_backward_out(MaybeTensor dO, Tensor X, MaybeTensor H, MaybeTensor H_consumed,
                          Tensor routing, Tensor W1, MaybeTensor W1_up, Tensor W2, MaybeTensor b1,
                          MaybeTensor b1_up, MaybeTensor b2, MaybeTensor dX, MaybeTensor ds,
                          MaybeTensor dW1, MaybeTensor dW1_up, MaybeTensor dW2, MaybeTensor db1,
                          MaybeTensor db1_up, MaybeTensor db2, int64_t kind, int64_t K,
                          int64_t activation, int64_t gate_layout, double clamp, double alpha,
                          double up_shift, int64_t column_blocks, bool accumulate) {
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"H_consumed", H_consumed},
                   {"routing", routing},
                   {"W1", W1},
                   {"W1_up", W1_up},
                   {"W2", W2},
                   {"b1", b1},
                   {"b1_up", b1_up},
                   {"b2", b2},
                   {"dX", dX},
                   {"ds", ds},
                   {"dW1", dW1},
                   {"dW1_up", dW1_up},
                   {"dW2", dW2},
                   {"db1", db1},
                   {"db1_up", db1_up},
                   {"db2", db2}});
  if (H.has_value() == H_consumed.has_value())
    refuse("H and H_consumed are both given or both absent, expected one of them");
  if (!dO && !H_consumed) refuse("dO is absent, expected only with an H_consumed that holds dH");
  backward(call, dO, X, H ? *H : *H_consumed,
           H    ? TILEMOE_BACKWARD_WHOLE
           : dO ? TILEMOE_BACKWARD_OVER_H
                : TILEMOE_BACKWARD_REST,
           routing, {W1, W1_up, W2, b1, b1_up, b2},
           {kind, K, activation, gate_layout, clamp, alpha, up_shift, column_blocks},
           {dX, ds, dW1, dW1_up, dW2, db1, db1_up, db2}, accumulate);
}

}  // namespace tilemoe_torch
