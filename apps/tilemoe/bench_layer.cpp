#include "bench_layer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "layer.h"
#include "verify/number.h"

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
                            !layer.W2_transposed && !layer.padded && !layer.biases;
  if (!routed || !plain_layout)
    throw std::runtime_error(layer.name +
                             ": bench times layers that route by their logits, with dense weights "
                             "and no biases");
}

// The logits that a scoring's gradient reads live until the backward.
bool gradient_reads_logits(const Case& layer) {
  return layer.routing == RoutingKind::kRounded || layer.scoring != Scoring::kSoftmaxOverChosen;
}

// The scores of token rounding are renormalised, whatever the case says.
Scoring scoring_of(const Case& layer) {
  return layer.routing == RoutingKind::kRounded ? Scoring::kSoftmaxRenormalized : layer.scoring;
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
  bytes.gradients = bytes.weights;
  bytes.tokens = 4 * element * count(layer.T, layer.d);
  const size_t logits = sizeof(float) * count(layer.T, layer.E);
  const size_t chosen = count(layer.T, layer.K) * (sizeof(int32_t) + sizeof(float));
  const size_t ds = sizeof(float) * static_cast<size_t>(spec.bound());
  bytes.saved =
      experts.saved_bytes(spec).total + (gradient_reads_logits(layer) ? logits : size_t{0});
  bytes.forward_workspace = experts.workspace_bytes(spec, Pass::kForward);
  bytes.backward_workspace = experts.workspace_bytes(spec, Pass::kBackward);
  // X is in `tokens` and in `saved`; the gradients are counted although the forward has none yet.
  const size_t always =
      bytes.weights + bytes.gradients + bytes.tokens - element * count(layer.T, layer.d);
  bytes.peak = always + std::max(bytes.saved + logits + chosen + bytes.forward_workspace,
                                 bytes.saved + logits + ds + bytes.backward_workspace);
  return bytes;
}

BenchLayer::BenchLayer(const Case& layer, Device device)
    : case_(layer),
      experts_(layer.experts(device)),
      spec_(layer.spec(0, device)),
      bytes_(measure(layer, device)) {
  if (device != Device::kCpu) throw std::runtime_error("bench: layers on a GPU are not built yet");
  allocate();
  fill();
}

void BenchLayer::allocate() {
  const int64_t T = case_.T, d = case_.d, n = case_.n, E = case_.E, K = case_.K;
  const int64_t h = case_.h_width(), rows = spec_.bound();
  const DType dtype = case_.dtype;
  W1_ = Buffer(dtype, E * h * d), W2_ = Buffer(dtype, E * d * n), Wr_ = Buffer(dtype, E * d);
  dW1_ = Buffer(dtype, E * h * d), dW2_ = Buffer(dtype, E * d * n), dWr_ = Buffer(dtype, E * d);
  X_ = Buffer(dtype, T * d), O_ = Buffer(dtype, T * d);
  dO_ = Buffer(dtype, T * d), dX_ = Buffer(dtype, T * d);
  H_ = Buffer(dtype, rows * h);
  logits_ = Buffer(DType::kFloat32, T * E), dlogits_ = Buffer(DType::kFloat32, T * E);
  ids_ = Buffer(DType::kInt32, T * K), scores_ = Buffer(DType::kFloat32, T * K);
  ds_ = Buffer(DType::kFloat32, rows);
  routing_memory_ = Buffer(spec_.bytes());
  routing_workspace_ = Buffer(spec_.workspace_bytes());
  workspace_ = Buffer(std::max(bytes_.forward_workspace, bytes_.backward_workspace));
  router_ = std::make_unique<Router>(T, d, E);
  routing_ = std::make_unique<Routing>(spec_, routing_memory_.data(), routing_memory_.bytes());
  saved_ = Saved(Tensor(H_.data(), dtype, {rows, h}));
}

void BenchLayer::fill() {
  const int64_t T = case_.T, d = case_.d, E = case_.E;
  const DType dtype = case_.dtype;
  fill_normal(dtype, X_.data(), T * d, 0.2, 1);
  fill_normal(dtype, dO_.data(), T * d, 0.2, 2);
  fill_normal(dtype, W1_.data(), E * case_.h_width() * d, 0.02, 3);
  fill_normal(dtype, W2_.data(), E * d * case_.n, 0.02, 4);
  fill_normal(dtype, Wr_.data(), E * d, 1 / std::sqrt(static_cast<double>(d)), 5);
  if (case_.load == Load::kRandom) return;
  if (case_.load != Load::kZipf)
    throw std::runtime_error(case_.name + ": bench knows random and zipf loads");
  // The first column of X is 1, which makes the router's first column a bias: an expert's logit is
  // lower by 0.2 ln(e + 1), where the other columns give logits of deviation 0.2.
  for (int64_t t = 0; t < T; ++t) verify::store(dtype, X_.data(), t * d, 1);
  for (int64_t e = 0; e < E; ++e)
    verify::store(dtype, Wr_.data(), e * d, -0.2 * std::log(static_cast<double>(e + 1)));
}

void BenchLayer::route(StepClock* clock) {
  const Tensor logits(logits_.data(), DType::kFloat32, {case_.T, case_.E});
  if (case_.routing == RoutingKind::kRounded) {
    timed(clock, step::kRoute, [&] {
      routing_->from_logits_rounded(logits, routing_workspace_.data(), routing_workspace_.bytes());
    });
    return;
  }
  const Tensor ids(ids_.data(), DType::kInt32, {case_.T, case_.K});
  const Tensor scores(scores_.data(), DType::kFloat32, {case_.T, case_.K});
  timed(clock, step::kTopK, [&] { top_k(case_.scoring, case_.K, logits, ids, scores); });
  timed(clock, step::kRoute, [&] {
    routing_->from_top_k(ids, scores, routing_workspace_.data(), routing_workspace_.bytes());
  });
}

void BenchLayer::forward(StepClock* clock) {
  const int64_t T = case_.T, d = case_.d, E = case_.E;
  const DType dtype = case_.dtype;
  const Tensor X(X_.data(), dtype, {T, d});
  timed(clock, step::kRouter, [&] {
    router_->forward(X, Tensor(Wr_.data(), dtype, {E, d}),
                     Tensor(logits_.data(), DType::kFloat32, {T, E}));
  });
  route(clock);
  ForwardArgs args;
  args.routing = routing_.get();
  args.weights.W1 = Tensor(W1_.data(), dtype, {E, case_.h_width(), d});
  args.weights.W2 = Tensor(W2_.data(), dtype, {E, d, case_.n});
  args.X = X, args.O = Tensor(O_.data(), dtype, {T, d});
  args.saved = &saved_;
  args.workspace = workspace_.data(), args.workspace_bytes = workspace_.bytes();
  if (!clock) return experts_.forward(args);
  TimedBackend steps(backend_for(experts_.device), *clock);
  tilemoe::forward(&experts_, &args, &steps);
}

void BenchLayer::backward(StepClock* clock) {
  const int64_t T = case_.T, d = case_.d, E = case_.E, h = case_.h_width();
  const DType dtype = case_.dtype;
  const Tensor X(X_.data(), dtype, {T, d}), dX(dX_.data(), dtype, {T, d});
  const Tensor ds(ds_.data(), DType::kFloat32, {routing_->pairs()});
  BackwardArgs args;
  args.routing = routing_.get();
  args.weights.W1 = Tensor(W1_.data(), dtype, {E, h, d});
  args.weights.W2 = Tensor(W2_.data(), dtype, {E, d, case_.n});
  args.dweights.W1 = Tensor(dW1_.data(), dtype, {E, h, d});
  args.dweights.W2 = Tensor(dW2_.data(), dtype, {E, d, case_.n});
  args.X = X, args.dX = dX, args.dO = Tensor(dO_.data(), dtype, {T, d});
  args.ds = ds;
  args.saved = &saved_;
  args.workspace = workspace_.data(), args.workspace_bytes = workspace_.bytes();
  if (clock) {
    TimedBackend steps(backend_for(experts_.device), *clock);
    tilemoe::backward(&experts_, &args, &steps);
  } else {
    experts_.backward(args);
  }

  const Tensor logits(logits_.data(), DType::kFloat32, {T, E});
  const Tensor dlogits(dlogits_.data(), DType::kFloat32, {T, E});
  timed(clock, step::kRouterBackward, [&] {
    router_backward(scoring_of(case_), *routing_, gradient_reads_logits(case_) ? logits : Tensor(),
                    ds, dlogits, routing_workspace_.data(), routing_workspace_.bytes());
  });
  timed(clock, step::kRouterGradient, [&] {
    router_->backward(dlogits, X, Tensor(Wr_.data(), dtype, {E, d}), dX,
                      Tensor(dWr_.data(), dtype, {E, d}));
  });
}

int64_t BenchLayer::rows() const {
  return routing_->offsets[case_.E];
}

}  // namespace tilemoe::app
