#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <string>

#include "operators.h"
#include "router.h"
#include "routing.h"
#include "wanted.h"

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
    return {call.view("W1", W1), call.view("W1_up", W1_up), call.view("W2", W2),
            call.view("b1", b1), call.view("b1_up", b1_up), call.view("b2", b2)};
  }
};

// The sizes are W2's, which has one shape whatever the activation and the layout of the gate.
tilemoe_experts experts_of(const Call& call, const Tensor& X, const Weights& weights,
                           const Config& config) {
  check_dims("W2", weights.W2, 3, "(E, d, n)");
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = call.device();
  experts.dtype = call.view("X", X).dtype;
  experts.E = weights.W2.size(0), experts.d = weights.W2.size(1), experts.n = weights.W2.size(2);
  experts.activation = static_cast<tilemoe_activation>(config.activation);
  experts.gate_layout = static_cast<tilemoe_gate_layout>(config.gate_layout);
  experts.clamp = static_cast<float>(config.clamp);
  experts.alpha = static_cast<float>(config.alpha);
  experts.up_shift = static_cast<float>(config.up_shift);
  if (config.column_blocks < 0 || config.column_blocks > INT32_MAX)
    refuse("column_blocks is " + std::to_string(config.column_blocks) + ", expected 0 to " +
           std::to_string(INT32_MAX));
  experts.column_blocks = static_cast<int32_t>(config.column_blocks);
  return experts;
}

tilemoe_routing_spec spec_of(const Call& call, const Tensor& X, const tilemoe_experts& experts,
                             const Config& config, int64_t capacity) {
  check_dims("X", X, 2, "(T, d)");
  const auto kind = static_cast<tilemoe_routing_kind>(config.kind);
  const int64_t T = kind == TILEMOE_ROUTING_GROUPED ? 0 : X.size(0);
  return routing_spec(call, kind, T, experts.E, config.K, capacity);
}

Tensor workspace_for(const Call& call, const tilemoe_experts& experts,
                     const tilemoe_routing_spec& spec, tilemoe_pass pass, size_t* bytes) {
  check(tilemoe_workspace_bytes(&experts, &spec, pass, bytes));
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

// `H` is read, or, where it may be consumed, overwritten with dH.
void backward(const Call& call, const MaybeTensor& dO, const Tensor& X, const Tensor& H,
              bool consume, const Tensor& routing_tensor, const Weights& weights,
              const Config& config, const Gradients& gradients, bool accumulate) {
  const Tensor rows = dense_rows_on_16(X);
  const MaybeTensor grad_rows = dO ? MaybeTensor(dense_rows_on_16(*dO)) : std::nullopt;
  const tilemoe_experts experts = experts_of(call, X, weights, config);
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  const tilemoe_routing_spec spec = spec_of(call, X, experts, config, H.size(0));
  const tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  tilemoe_saved saved{};
  saved.H = call.view("H", H);
  saved.consumed = dO ? 0 : 1;

  tilemoe_backward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = weights.view(call);
  args.X = call.view("X", rows);
  args.dO = call.view("dO", grad_rows);
  args.saved = &saved;
  args.overwrite_H = consume;
  args.dX = call.view("dX", gradients.X);
  args.ds = call.view("ds", gradients.s);
  args.dweights.W1 = call.view("dW1", gradients.W1);
  args.dweights.W1_up = call.view("dW1_up", gradients.W1_up);
  args.dweights.W2 = call.view("dW2", gradients.W2);
  args.dweights.b1 = call.view("db1", gradients.b1);
  args.dweights.b1_up = call.view("db1_up", gradients.b1_up);
  args.dweights.b2 = call.view("db2", gradients.b2);
  args.beta = accumulate ? 1.f : 0.f;
  const Tensor workspace = workspace_for(call, experts, spec,
                                         !dO       ? TILEMOE_PASS_BACKWARD_REST
                                         : consume ? TILEMOE_PASS_BACKWARD_DH_OVER_H
                                                   : TILEMOE_PASS_BACKWARD,
                                         &args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_backward(&experts, &args));
}

}  // namespace

std::tuple<Tensor, Tensor> experts(Tensor X, MaybeTensor /*router*/, Tensor routing_tensor,
                                   Tensor W1, MaybeTensor W1_up, Tensor W2, MaybeTensor b1,
                                   MaybeTensor b1_up, MaybeTensor b2, MaybeTensor addend,
                                   int64_t kind, int64_t K, int64_t capacity, int64_t /*scoring*/,
                                   int64_t activation, int64_t gate_layout, double clamp,
                                   double alpha, double up_shift, int64_t column_blocks,
                                   bool keep_H, bool /*overwrite_H*/) {
  const Call call(X);
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
  if (keep_H) saved.H = call.view("H", H);

  tilemoe_forward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = weights.view(call);
  args.X = call.view("X", rows);
  args.O = call.view("O", O);
  args.addend = call.view("addend", addend);
  args.saved = keep_H ? &saved : nullptr;
  const Tensor workspace =
      workspace_for(call, layer, spec, keep_H ? TILEMOE_PASS_FORWARD : TILEMOE_PASS_INFERENCE,
                    &args.workspace_bytes);
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
  const Call call(X);
  std::vector<Tensor> made;
  const auto make = [&](int64_t bit, auto&& allocate) -> MaybeTensor {
    if (!(wanted & bit)) return std::nullopt;
    made.push_back(allocate());
    return made.back();
  };
  const auto make_like = [&](int64_t bit, const MaybeTensor& weight) {
    return make(bit, [&] {
      if (!weight) refuse("the gradient of an absent weight is wanted");
      return gradient_like(call, *weight);
    });
  };
  check_dims("X", X, 2, "(T, d)");
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  Gradients gradients;
  gradients.X = make(kWantedX, [&] { return call.empty({X.size(0), X.size(1)}, X.scalar_type()); });
  gradients.s = make(kWantedS, [&] {
    return kind == TILEMOE_ROUTING_TOP_K ? call.empty({X.size(0), K}, ScalarType::Float)
                                         : call.empty({H.size(0)}, ScalarType::Float);
  });
  gradients.W1 = make_like(kWantedW1, W1);
  gradients.W1_up = make_like(kWantedW1Up, W1_up);
  gradients.W2 = make_like(kWantedW2, W2);
  gradients.b1 = make_like(kWantedB1, b1);
  gradients.b1_up = make_like(kWantedB1Up, b1_up);
  gradients.b2 = make_like(kWantedB2, b2);
  const Config config{kind, K, activation, gate_layout, clamp, alpha, up_shift, column_blocks};
  backward(call, dO, X, H, false, routing, {W1, W1_up, W2, b1, b1_up, b2}, config, gradients,
           false);
  if (gradients.s && scoring >= 0) {
    const tilemoe_routing_spec spec = routing_spec(call, static_cast<tilemoe_routing_kind>(kind),
                                                   X.size(0), W2.size(0), K, gradients.s->numel());
    made[wanted & kWantedX ? 1 : 0] = logits_gradient(call, bind_routing(call, spec, routing),
                                                      *gradients.s, logits, scoring, router_dtype);
  }
  return made;
}

void experts_backward_out(MaybeTensor dO, Tensor X, MaybeTensor H, MaybeTensor H_consumed,
                          Tensor routing, Tensor W1, MaybeTensor W1_up, Tensor W2, MaybeTensor b1,
                          MaybeTensor b1_up, MaybeTensor b2, MaybeTensor dX, MaybeTensor ds,
                          MaybeTensor dW1, MaybeTensor dW1_up, MaybeTensor dW2, MaybeTensor db1,
                          MaybeTensor db1_up, MaybeTensor db2, int64_t kind, int64_t K,
                          int64_t activation, int64_t gate_layout, double clamp, double alpha,
                          double up_shift, int64_t column_blocks, bool accumulate) {
  if (H.has_value() == H_consumed.has_value())
    refuse("H and H_consumed are both given or both absent, expected one of them");
  if (!dO && !H_consumed) refuse("dO is absent, expected only with an H_consumed that holds dH");
  backward(Call(X), dO, X, H ? *H : *H_consumed, H_consumed.has_value(), routing,
           {W1, W1_up, W2, b1, b1_up, b2},
           {kind, K, activation, gate_layout, clamp, alpha, up_shift, column_blocks},
           {dX, ds, dW1, dW1_up, dW2, db1, db1_up, db2}, accumulate);
}

}  // namespace tilemoe_torch
