#include "bench_layer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "layer.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::app {
namespace {

using verify::Case;
using verify::Load;
using verify::RoutingKind;

// Runs `body`, by the clock where there is one.
template <class Body>
void timed(StepClock* clock, const char* name, Body&& body) {
  if (clock)
    clock->time(name, body);
  else
    body();
}

void check_benchable(const Case& layer) {
  const bool routed = layer.routing == RoutingKind::kTopK || layer.routing == RoutingKind::kRounded;
  const bool plain_layout = layer.gate_layout != GateLayout::kSplit && !layer.W1_transposed &&
                            !layer.W2_transposed && !layer.padded;
  if (!routed || !plain_layout || layer.load == Load::kHalfEmpty)
    throw std::runtime_error(layer.name +
                             ": bench times layers that route by their logits, with dense weights "
                             "and random, zipf or one-expert loads");
}

// The logits that a scoring's gradient reads live until the backward.
bool gradient_reads_logits(const Case& layer) {
  return layer.routing == RoutingKind::kRounded || layer.scoring != Scoring::kSoftmaxOverChosen;
}

// The scores of token rounding are renormalised, whatever the case says.
Scoring scoring_of(const Case& layer) {
  return layer.routing == RoutingKind::kRounded ? Scoring::kSoftmaxRenormalized : layer.scoring;
}

// Of the first of the two calls that make a backward.
BackwardMode backward_mode(const Case& layer) {
  return layer.dH_over_H ? BackwardMode::kOverH : BackwardMode::kFirst;
}

}  // namespace

LayerBytes BenchLayer::measure(const Case& layer, Device device) {
  check_benchable(layer);
  const Experts experts = layer.experts(device);
  const RoutingSpec spec = layer.spec(0, device);
  const size_t element = size_of(layer.dtype);
  const auto count = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b); };
  LayerBytes bytes;
  bytes.weights = element * (count(layer.E * layer.h_width(), layer.d) +
                             count(layer.E * layer.d, layer.n) + count(layer.E, layer.d));
  if (layer.biases) bytes.weights += element * count(layer.E, layer.h_width() + layer.d);
  bytes.gradients = bytes.weights;
  bytes.tokens = 4 * element * count(layer.T, layer.d);
  const size_t logits = element * count(layer.T, layer.E);
  const size_t chosen = count(layer.T, layer.K) * (sizeof(int32_t) + sizeof(float));
  const size_t ds = sizeof(float) * static_cast<size_t>(spec.bound());
  const tilemoe_saved_size saved = experts.saved_bytes(spec);
  bytes.saved = saved.total + (gradient_reads_logits(layer) ? logits : size_t{0});
  bytes.forward_workspace = experts.workspace_bytes(spec, Pass::kForward);
  bytes.backward_workspace = experts.workspace_bytes(spec, backward_mode(layer));
  bytes.library_peak =
      saved.H + saved.routing + std::max(bytes.forward_workspace, bytes.backward_workspace);
  // X is in `tokens` and in `saved`; the gradients are counted although the forward has none yet.
  const size_t always =
      bytes.weights + bytes.gradients + bytes.tokens - element * count(layer.T, layer.d);
  bytes.peak = always + std::max(bytes.saved + logits + chosen + bytes.forward_workspace,
                                 bytes.saved + logits + ds + bytes.backward_workspace);
  return bytes;
}

BenchLayer::BenchLayer(const Case& layer, const BenchMachine& machine, bool with_backward)
    : case_(layer),
      machine_(machine),
      experts_(layer.experts(machine.device())),
      spec_(layer.spec(0, machine.device())),
      bytes_(measure(layer, machine.device())) {
  allocate(with_backward);
  fill(with_backward);
  router_ = machine.router(layer, with_backward);
}

void BenchLayer::allocate(bool with_backward) {
  const int64_t T = case_.T, d = case_.d, n = case_.n, E = case_.E, K = case_.K;
  const int64_t h = case_.h_width(), rows = spec_.bound();
  const auto take = [&](int64_t elements) {
    return MachineBuffer(machine_, case_.dtype, elements);
  };
  const auto take_float32 = [&](int64_t elements) {
    return MachineBuffer(machine_, DType::kFloat32, elements);
  };
  W1_ = take(E * h * d), W2_ = take(E * d * n), Wr_ = take(E * d);
  X_ = take(T * d), O_ = take(T * d), H_ = take(rows * h), logits_ = take(T * E);
  ids_ = MachineBuffer(machine_, DType::kInt32, T * K), scores_ = take_float32(T * K);
  if (case_.biases) b1_ = take(E * h), b2_ = take(E * d);
  size_t workspace = bytes_.forward_workspace;
  if (with_backward) {
    dW1_ = take(E * h * d), dW2_ = take(E * d * n), dWr_ = take(E * d);
    if (case_.biases) db1_ = take(E * h), db2_ = take(E * d);
    dO_ = take(T * d), dX_ = take(T * d), dlogits_ = take(T * E);
    ds_ = take_float32(rows);
    workspace = std::max(workspace, bytes_.backward_workspace);
  }
  routing_memory_ = MachineBuffer(machine_, spec_.bytes());
  routing_workspace_ = MachineBuffer(machine_, spec_.workspace_bytes());
  workspace_ = MachineBuffer(machine_, workspace);
  routing_ = std::make_unique<Routing>(spec_, routing_memory_.data(), routing_memory_.bytes());
  saved_ = Saved(view(H_, {rows, h}));
}

void BenchLayer::fill(bool with_backward) {
  const int64_t T = case_.T, d = case_.d, E = case_.E, h = case_.h_width();
  const auto fill_with = [&](MachineBuffer& buffer, int64_t elements, double scale, uint64_t seed) {
    machine_.fill_normal(case_.dtype, buffer.data(), elements, scale, seed);
  };
  fill_with(X_, T * d, 0.2, 1);
  if (with_backward) fill_with(dO_, T * d, 0.2, 2);
  fill_with(W1_, E * h * d, 0.02, 3);
  fill_with(W2_, E * d * case_.n, 0.02, 4);
  fill_with(Wr_, E * d, 1 / std::sqrt(static_cast<double>(d)), 5);
  if (case_.biases) fill_with(b1_, E * h, 0.02, 6), fill_with(b2_, E * d, 0.02, 7);
  if (case_.load != Load::kRandom) prepare_skewed_logits();
}

// log p(e) + Gumbel noise: top-K of these draws K experts without replacement by their popularity
// p, 1 / (e + 1) or all of it one expert's.
void BenchLayer::prepare_skewed_logits() {
  constexpr double kCertain = 100;
  skewed_logits_ = MachineBuffer(machine_, logits_.bytes());
  std::vector<std::byte> logits(logits_.bytes());
  verify::Random random(6, 6);
  for (int64_t t = 0, i = 0; t < case_.T; ++t)
    for (int64_t e = 0; e < case_.E; ++e, ++i) {
      const double uniform = (static_cast<double>(random.below(int64_t{1} << 30)) + 0.5) * 0x1p-30;
      const double popularity = case_.load == Load::kOneExpert
                                    ? (e == case_.E / 2 ? kCertain : 0)
                                    : -std::log(static_cast<double>(e + 1));
      verify::store(case_.dtype, logits.data(), i, popularity - std::log(-std::log(uniform)));
    }
  machine_.memory().copy_in(skewed_logits_.data(), logits.data(), logits.size());
}

Weights BenchLayer::weights() const {
  const int64_t d = case_.d, n = case_.n, E = case_.E, h = case_.h_width();
  Weights all;
  all.W1 = view(W1_, {E, h, d}), all.W2 = view(W2_, {E, d, n});
  if (case_.biases) all.b1 = view(b1_, {E, h}), all.b2 = view(b2_, {E, d});
  return all;
}

WeightGradients BenchLayer::gradients() const {
  const int64_t d = case_.d, n = case_.n, E = case_.E, h = case_.h_width();
  WeightGradients all;
  all.W1 = view(dW1_, {E, h, d}), all.W2 = view(dW2_, {E, d, n});
  if (case_.biases) all.b1 = view(db1_, {E, h}), all.b2 = view(db2_, {E, d});
  return all;
}

void BenchLayer::router() {
  router_->forward(view(X_, {case_.T, case_.d}), view(Wr_, {case_.E, case_.d}),
                   view(logits_, {case_.T, case_.E}));
}

// A skewed load has its logits prepared; the router's product runs all the same.
void BenchLayer::route(StepClock* clock) {
  const MachineBuffer& source = case_.load == Load::kRandom ? logits_ : skewed_logits_;
  const Tensor logits = view(source, {case_.T, case_.E});
  if (case_.routing == RoutingKind::kRounded) {
    timed(clock, step::kRoute, [&] {
      routing_->from_logits({.logits = logits,
                             .workspace = routing_workspace_.data(),
                             .workspace_bytes = routing_workspace_.bytes()});
    });
    return;
  }
  const Tensor ids(ids_.data(), DType::kInt32, {case_.T, case_.K});
  const Tensor scores(scores_.data(), DType::kFloat32, {case_.T, case_.K});
  timed(clock, step::kTopK, [&] {
    top_k({.device = machine_.device(),
           .scoring = case_.scoring,
           .K = case_.K,
           .logits = logits,
           .ids = ids,
           .scores = scores});
  });
  timed(clock, step::kRoute, [&] {
    routing_->from_top_k(ids, scores, routing_workspace_.data(), routing_workspace_.bytes());
  });
}

void BenchLayer::library_forward(StepClock* clock) {
  route(clock);
  ForwardArgs args;
  args.routing = routing_.get();
  args.weights = weights();
  args.X = view(X_, {case_.T, case_.d}), args.O = view(O_, {case_.T, case_.d});
  args.saved = &saved_;
  args.workspace = workspace_.data(), args.workspace_bytes = workspace_.bytes();
  if (!clock) return experts_.forward(args);
  const tilemoe_experts experts = experts_.to_c();
  const tilemoe_weights all = args.weights.to_c();
  const tilemoe_forward_args c_args = args.to_c(all);
  tilemoe::forward(&experts, &c_args, clock);
}

void BenchLayer::forward(StepClock* clock) {
  timed(clock, step::kRouter, [&] { router(); });
  library_forward(clock);
}

// What the router adds to dX follows from ds: it is written to dX between two calls of the library,
// whose combine adds it.
void BenchLayer::backward(StepClock* clock) {
  const int64_t T = case_.T, d = case_.d, E = case_.E;
  const Tensor X = view(X_, {T, d}), dX = view(dX_, {T, d});
  const Tensor ds(ds_.data(), DType::kFloat32, {routing_->pairs()});
  BackwardArgs args;
  args.routing = routing_.get();
  args.weights = weights();
  args.X = X;
  args.saved = &saved_;
  args.workspace = workspace_.data(), args.workspace_bytes = workspace_.bytes();
  BackwardArgs first = args, second = args;
  const WeightGradients all = gradients();
  first.mode = backward_mode(case_), second.mode = BackwardMode::kRest;
  first.dO = view(dO_, {T, d});
  first.ds = ds;
  first.dweights.W2 = all.W2, first.dweights.b2 = all.b2;
  second.dX = dX, second.addend = dX;
  second.dweights.W1 = all.W1, second.dweights.b1 = all.b1;

  library_backward(first, clock);
  const MachineBuffer& routed = case_.load == Load::kRandom ? logits_ : skewed_logits_;
  const Tensor logits = view(routed, {T, E}), dlogits = view(dlogits_, {T, E});
  timed(clock, step::kRouterBackward, [&] {
    router_backward({.scoring = scoring_of(case_),
                     .routing = routing_.get(),
                     .logits = gradient_reads_logits(case_) ? logits : Tensor(),
                     .ds = ds,
                     .dlogits = dlogits,
                     .workspace = routing_workspace_.data(),
                     .workspace_bytes = routing_workspace_.bytes()});
  });
  timed(clock, step::kRouterGradient, [&] {
    router_->backward(dlogits, X, view(Wr_, {E, d}), dX, view(dWr_, {E, d}));
  });
  library_backward(second, clock);
}

void BenchLayer::library_backward(const BackwardArgs& args, StepClock* clock) {
  if (!clock) return experts_.backward(args);
  const tilemoe_experts experts = experts_.to_c();
  const tilemoe_weights all = args.weights.to_c(), dweights = args.dweights.to_c();
  const tilemoe_backward_args c_args = args.to_c(all, dweights);
  tilemoe::backward(&experts, &c_args, clock);
}

int64_t BenchLayer::rows() const {
  int32_t M = 0;
  machine_.memory().copy_out(&M, routing_->offsets + case_.E, sizeof M);
  return M;
}

}  // namespace tilemoe::app
