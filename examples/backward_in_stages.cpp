// A backward pass in two calls, on the CPU: for the lowest peak of memory, and with the router's part
// of dX in between. Both have the bits of one call. Built by the project as `example_backward_in_stages`.
#include <tilemoe/layer.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using namespace tilemoe;

namespace {

constexpr int64_t T = 64, d = 32, n = 16, E = 4, K = 2;
const Experts experts{.device = Device::kCpu, .d = d, .n = n, .E = E};
const RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, T, E, K);

// Memory on 16 bytes: operator new's own alignment on every 64-bit machine.
using Floats = std::vector<float>;

Floats zeros(int64_t count) {
  return Floats(static_cast<size_t>(count));
}
Floats memory(size_t bytes) {
  return Floats(bytes / sizeof(float) + 1);
}
size_t size_in_bytes(const Floats& values) {
  return values.size() * sizeof(float);
}
Floats gaussian(int64_t count, float deviation) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal(0, deviation);
  Floats values = zeros(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// The results of a backward pass.
struct Gradients {
  Floats X = zeros(T * d), W1 = zeros(E * 2 * n * d), W2 = zeros(E * d * n), scores = zeros(T * K),
         logits = zeros(T * E);
  bool operator==(const Gradients&) const = default;
};

// A layer after its forward pass, and the arguments that all backward passes have in common.
class Layer {
 public:
  Layer() : routing(spec, routing_memory_.data(), size_in_bytes(routing_memory_)) {
    const Tensor ids{ids_.data(), DType::kInt32, {T, K}};
    const Tensor scores{scores_.data(), DType::kFloat32, {T, K}};
    top_k({.device = Device::kCpu, .K = K, .logits = logits(), .ids = ids, .scores = scores});
    routing.from_top_k(ids, scores, routing_workspace.data(), size_in_bytes(routing_workspace));
    saved_.H = Tensor(H_.data(), DType::kFloat32, {T * K, 2 * n});
    forward();
  }
  void forward() {
    Floats workspace = memory(experts.workspace_bytes(spec, Pass::kForward));
    experts.forward({.routing = &routing,
                     .weights = weights(),
                     .X = {X_.data(), DType::kFloat32, {T, d}},
                     .O = {O_.data(), DType::kFloat32, {T, d}},
                     .saved = &saved_,
                     .workspace = workspace.data(),
                     .workspace_bytes = size_in_bytes(workspace)});
  }
  Weights weights() {
    return {.W1 = {W1_.data(), DType::kFloat32, {E, 2 * n, d}},
            .W2 = {W2_.data(), DType::kFloat32, {E, d, n}}};
  }
  ConstTensor logits() { return {logits_.data(), DType::kFloat32, {T, E}}; }
  ConstTensor dO() { return {dO_.data(), DType::kFloat32, {T, d}}; }
  BackwardArgs backward_args() {
    return {.routing = &routing,
            .weights = weights(),
            .X = {X_.data(), DType::kFloat32, {T, d}},
            .saved = &saved_};
  }
  // The router's part of dX, dlogits Wr, which a caller computes by any dense GEMM.
  void router_part(const Floats& dlogits, Floats* dX) {
    for (int64_t t = 0; t < T; ++t)
      for (int64_t i = 0; i < d; ++i) {
        float sum = 0;
        for (int64_t e = 0; e < E; ++e) sum += dlogits[t * E + e] * Wr_[e * d + i];
        (*dX)[t * d + i] = sum;
      }
  }

 private:
  Floats X_ = gaussian(T * d, 1), W1_ = gaussian(E * 2 * n * d, 0.2f),
         W2_ = gaussian(E * d * n, 0.2f), Wr_ = gaussian(E * d, 0.2f), logits_ = gaussian(T * E, 1),
         dO_ = gaussian(T * d, 1), O_ = zeros(T * d), H_ = zeros(T * K * 2 * n),
         scores_ = zeros(T * K), routing_memory_ = memory(spec.bytes());
  std::vector<int32_t> ids_ = std::vector<int32_t>(T * K);
  Saved saved_;

 public:
  Floats routing_workspace = memory(spec.workspace_bytes());
  Routing routing;
};

// The gradients' tensors.
struct Views {
  explicit Views(Gradients* of)
      : dX(of->X.data(), DType::kFloat32, {T, d}),
        dW1(of->W1.data(), DType::kFloat32, {E, 2 * n, d}),
        dW2(of->W2.data(), DType::kFloat32, {E, d, n}),
        ds(of->scores.data(), DType::kFloat32, {T, K}),
        dlogits(of->logits.data(), DType::kFloat32, {T, E}) {}
  Tensor dX, dW1, dW2, ds, dlogits;
};

void gradient_of_logits(Layer* layer, const Views& to) {
  router_backward({.routing = &layer->routing,
                   .ds = to.ds,
                   .dlogits = to.dlogits,
                   .workspace = layer->routing_workspace.data(),
                   .workspace_bytes = size_in_bytes(layer->routing_workspace)});
}

// One call; with the router's part of dX, a second one that adds it.
Gradients in_one_call(Layer* layer, bool with_router) {
  Gradients found;
  const Views to(&found);
  Floats workspace = memory(experts.workspace_bytes(spec, BackwardMode::kWhole));
  BackwardArgs args = layer->backward_args();
  args.dO = layer->dO();
  args.dX = to.dX, args.ds = to.ds, args.dweights = {.W1 = to.dW1, .W2 = to.dW2};
  args.workspace = workspace.data(), args.workspace_bytes = size_in_bytes(workspace);
  experts.backward(args);
  gradient_of_logits(layer, to);
  if (with_router) {
    layer->router_part(found.logits, &found.X);
    args.addend = to.dX;
    experts.backward(args);
  }
  return found;
}

// dH lies over H, and dW1 is computed when the workspace of dX is free.
Gradients with_the_lowest_peak(Layer* layer) {
  Gradients found;
  const Views to(&found);
  const Tensor &dX = to.dX, &dW1 = to.dW1, &dW2 = to.dW2, &ds = to.ds;
  const ConstTensor dO = layer->dO();
  BackwardArgs first = layer->backward_args(), rest = first;  // routing, weights, X, saved

  const uint32_t requested = TILEMOE_GRADIENT_X | TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_W2;
  Floats workspace = memory(experts.workspace_bytes(spec, BackwardMode::kOverH, requested));
  first.mode = BackwardMode::kOverH;
  first.dO = dO, first.dX = dX, first.ds = ds, first.dweights.W2 = dW2;
  first.workspace = workspace.data(), first.workspace_bytes = size_in_bytes(workspace);
  experts.backward(first);  // H is dH now

  workspace = memory(experts.workspace_bytes(spec, BackwardMode::kRest, TILEMOE_GRADIENT_W1));
  rest.mode = BackwardMode::kRest;
  rest.dweights.W1 = dW1;  // its memory may come from what the first call used
  rest.workspace = workspace.data(), rest.workspace_bytes = size_in_bytes(workspace);
  experts.backward(rest);

  gradient_of_logits(layer, to);
  layer->forward();  // for whoever comes next
  return found;
}

// The router's part of dX needs ds, and is to be dX's addend, in dX itself.
Gradients with_the_router_between(Layer* layer) {
  Gradients found;
  const Views to(&found);
  const Tensor &dX = to.dX, &dW1 = to.dW1, &dW2 = to.dW2, &ds = to.ds;
  const ConstTensor dO = layer->dO();
  Floats workspace = memory(experts.workspace_bytes(spec, BackwardMode::kFirst));
  BackwardArgs first = layer->backward_args();
  first.workspace = workspace.data(), first.workspace_bytes = size_in_bytes(workspace);
  BackwardArgs second = first;

  first.mode = BackwardMode::kFirst, second.mode = BackwardMode::kRest;
  first.dO = dO, first.ds = ds, first.dweights.W2 = dW2;
  second.dX = dX, second.addend = dX, second.dweights.W1 = dW1;
  experts.backward(first);
  gradient_of_logits(layer, to);               // router_backward: ds -> dlogits
  layer->router_part(found.logits, &found.X);  // dX = dlogits Wr, by any dense GEMM
  experts.backward(second);
  return found;
}

int run() {
  Layer layer;
  const bool lowest = with_the_lowest_peak(&layer) == in_one_call(&layer, false);
  const bool between = with_the_router_between(&layer) == in_one_call(&layer, true);
  std::printf(
      "two calls have the bits of one: with the lowest peak %s, with the router between %s\n",
      lowest ? "yes" : "NO", between ? "yes" : "NO");
  return lowest && between ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
