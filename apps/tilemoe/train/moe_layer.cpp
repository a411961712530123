#include "train/moe_layer.h"

#include <cmath>

#include "train/ops/linear.h"

namespace tilemoe::train {
namespace {

Experts experts_of(const ModelConfig& config) {
  if (config.mode == ExpertsMode::kDense)
    return Experts(config.width, config.top_k * config.expert_width, 1, DType::kFloat32,
                   config.activation);
  return Experts(config.width, config.expert_width, config.experts, DType::kFloat32,
                 config.activation);
}

double deviation(double scale, int64_t fan_in) {
  return scale / std::sqrt(static_cast<double>(fan_in));
}

template <class Element>
Tensor view(const Array<Element>& array, DType type, std::initializer_list<int64_t> shape) {
  return Tensor(array.data(), type, shape);
}
Tensor view(ConstFloats values, int64_t rows) {
  return Tensor(values.data(), DType::kFloat32, {rows, std::ssize(values) / rows});
}

}  // namespace

MoeLayer::MoeLayer(const ModelConfig& config, const std::string& name, int64_t max_tokens,
                   uint64_t seed, ParameterStore& parameters, Workspace& workspace)
    : config_(config),
      workspace_(workspace),
      experts_(experts_of(config)),
      top_k_(config.mode == ExpertsMode::kDense ? 1 : config.top_k),
      w1_(parameters.add_normal(name + "experts.w1", {experts_.E, experts_.h_width(), experts_.d},
                                ParameterGroup::kMatrix, deviation(1, experts_.d))),
      w2_(parameters.add_normal(name + "experts.w2", {experts_.E, experts_.d, experts_.n},
                                ParameterGroup::kMatrix, deviation(0.5, experts_.n))) {
  const int64_t E = experts_.E, pairs = max_tokens * top_k_;
  ids_ = Array<int32_t>(pairs);
  scores_ = FloatArray(pairs);
  if (config.mode == ExpertsMode::kDense) {
    std::fill_n(scores_.data(), pairs, 1.f);
  } else {
    router_ = &parameters.add_normal(name + "router.weight", {E, experts_.d},
                                     ParameterGroup::kOther, deviation(1, experts_.d));
    logits_ = FloatArray(max_tokens * E);
    dlogits_ = FloatArray(max_tokens * E);
    if (config.routing.has_selection_bias()) selection_bias_ = FloatArray(E);
    workspace.need_scratch(linear_backward_weight_scratch({max_tokens, experts_.d, E}));
    workspace.need_library(router_losses_workspace_bytes(max_tokens, E));
  }
  counts_ = Array<int32_t>(E);
  losses_ = FloatArray(2);
  seed_and_step_ = Array<int64_t>(2);
  seed_and_step_.data()[0] = static_cast<int64_t>(seed);

  const RoutingSpec training = spec(Phase::kTrain, max_tokens);
  const RoutingSpec evaluation = spec(Phase::kEvaluate, max_tokens);
  ds_ = FloatArray(std::max(pairs, training.bound()));
  H_ = FloatArray(training.bound() * experts_.h_width());
  routing_memory_ =
      Array<std::byte>(static_cast<int64_t>(std::max(training.bytes(), evaluation.bytes())));
  for (const RoutingSpec& routing : {training, evaluation}) {
    workspace.need_library(routing.workspace_bytes());
    for (const Pass pass : {Pass::kInference, Pass::kForward, Pass::kBackwardDhOverH})
      workspace.need_library(experts_.workspace_bytes(routing, pass));
  }
  if (config.device == Device::kCuda)
    device_experts_ =
        std::make_unique<DeviceExperts>(experts_, std::vector<RoutingSpec>{training, evaluation});
}

RoutingSpec MoeLayer::spec(Phase phase, int64_t tokens) const {
  const RoutingConfig& routing = config_.routing;
  if (phase == Phase::kTrain && routing.rounded && router_ != nullptr)
    return RoutingSpec::rounded(tokens, experts_.E, top_k_, routing.rounding, routing.m);
  return RoutingSpec::top_k(tokens, experts_.E, top_k_);
}

// The routing of v, from the router's logits.
void MoeLayer::route(Phase phase, int64_t step, ConstFloats v) {
  const int64_t tokens = std::ssize(v) / experts_.d, E = experts_.E;
  const RoutingSpec routing_spec = spec(phase, tokens);
  routing_.emplace(routing_spec, routing_memory_.data(), routing_spec.bytes());
  if (router_ != nullptr)
    linear({tokens, experts_.d, E}, v, router_->value.span(), logits_.first(tokens * E));
  if (routing_spec.kind == TILEMOE_ROUTING_ROUNDED) {
    seed_and_step_.data()[1] = step;
    const bool draws = config_.routing.rounding == Rounding::kStochastic;
    const auto number = [&](int64_t at) {
      return draws ? Tensor(seed_and_step_.data() + at, DType::kInt64, {1}) : Tensor();
    };
    routing_->from_logits_rounded(view(logits_, DType::kFloat32, {tokens, E}), workspace_.library(),
                                  workspace_.library_bytes(), number(0), number(1),
                                  view(counts_, DType::kInt32, {E}));
    return;
  }
  const Tensor ids = view(ids_, DType::kInt32, {tokens, top_k_});
  const Tensor scores = view(scores_, DType::kFloat32, {tokens, top_k_});
  if (router_ != nullptr)
    top_k(scoring(), top_k_, view(logits_, DType::kFloat32, {tokens, E}), ids, scores,
          selection_bias_.size() > 0 ? view(selection_bias_, DType::kFloat32, {E}) : Tensor(),
          view(counts_, DType::kInt32, {E}));
  routing_->from_top_k(ids, scores, workspace_.library(), workspace_.library_bytes());
}

// Rounding scores like softmax over all experts, renormalised.
Scoring MoeLayer::scoring() const {
  return config_.routing.rounded ? Scoring::kSoftmaxRenormalized : config_.routing.scoring;
}

void MoeLayer::forward(Phase phase, int64_t step, ConstFloats v, ConstFloats x, Floats y) {
  const int64_t tokens = std::ssize(v) / experts_.d;
  route(phase, step, v);
  if (device_experts_) {
    device_experts_->forward(*routing_, v, w1_.value.span(), w2_.value.span(), y,
                             phase == Phase::kTrain ? H_.span() : Floats());
    for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];  // the residual stays float32
    return;
  }
  Saved saved(view(H_, DType::kFloat32, {routing_->capacity(), experts_.h_width()}));
  ForwardArgs args;
  args.routing = &*routing_;
  args.weights = weights(&Parameter::value);
  args.X = view(v, tokens), args.addend = view(x, tokens), args.O = view(y, tokens);
  args.saved = phase == Phase::kTrain ? &saved : nullptr;
  args.workspace = workspace_.library(), args.workspace_bytes = workspace_.library_bytes();
  experts_.forward(args);
}

void MoeLayer::backward(ConstFloats v, ConstFloats dy, Floats dv) {
  const int64_t tokens = std::ssize(v) / experts_.d, E = experts_.E, d = experts_.d;
  Saved saved(view(H_, DType::kFloat32, {routing_->capacity(), experts_.h_width()}));
  BackwardArgs args;
  args.routing = &*routing_;
  args.weights = weights(&Parameter::value);
  args.dweights = weights(&Parameter::gradient);
  args.X = view(v, tokens), args.dO = view(dy, tokens), args.dX = view(dv, tokens);
  args.saved = &saved;
  args.overwrite_H = 1;
  const Tensor ds = view(ds_, DType::kFloat32, {routing_->pairs()});
  if (router_ != nullptr) args.ds = ds;
  args.workspace = workspace_.library(), args.workspace_bytes = workspace_.library_bytes();
  experts_.backward(args);
  if (router_ == nullptr) return;

  const RoutingConfig& routing = config_.routing;
  const Tensor logits = view(logits_, DType::kFloat32, {tokens, E});
  const Tensor dlogits = view(dlogits_, DType::kFloat32, {tokens, E});
  router_backward(scoring(), *routing_, logits, ds, dlogits, workspace_.library(),
                  workspace_.library_bytes());
  router_losses(logits, view(counts_, DType::kInt32, {E}), view(losses_, DType::kFloat32, {2}),
                workspace_.library(), workspace_.library_bytes(), routing.balance_loss,
                routing.z_loss, dlogits);
  const Floats all_dlogits = dlogits_.first(tokens * E);
  linear_backward_input({tokens, d, E}, all_dlogits, router_->value.span(), dv, Write::kAdd);
  linear_backward_weight({tokens, d, E}, all_dlogits, v, router_->gradient.span(),
                         workspace_.scratch());
}

Weights MoeLayer::weights(FloatArray Parameter::*part) const {
  Weights weights;
  weights.W1 = view(w1_.*part, DType::kFloat32, {experts_.E, experts_.h_width(), experts_.d});
  weights.W2 = view(w2_.*part, DType::kFloat32, {experts_.E, experts_.d, experts_.n});
  return weights;
}

void MoeLayer::balance_selection() {
  if (selection_bias_.size() == 0) return;
  const int64_t E = experts_.E;
  int64_t pairs = 0;
  for (const int32_t count : counts_.span()) pairs += count;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t excess = counts_.data()[e] * E - pairs;
    const auto direction = static_cast<float>((excess < 0) - (excess > 0));
    selection_bias_.data()[e] += direction * config_.routing.bias_rate;
  }
}

RouterReport MoeLayer::report() const {
  RouterReport report;
  report.balance_loss = losses_.data()[0];
  report.z_loss = losses_.data()[1];
  for (int64_t e = 0; e < experts_.E; ++e) {
    const int32_t load = routing_->offsets[e + 1] - routing_->offsets[e];
    report.load.push_back(load);
    if (router_ == nullptr) continue;
    const int64_t change = load - counts_.data()[e];
    (change > 0 ? report.added : report.dropped) += std::abs(change);
  }
  return report;
}

}  // namespace tilemoe::train
