#include "train/moe_layer.h"

#include <cmath>
#include <numeric>

namespace tilemoe::train {
namespace {

Experts experts_of(const ModelConfig& config, const Operators& operators) {
  const bool dense = config.mode == ExpertsMode::kDense;
  return {.device = operators.device(),
          .dtype = operators.experts_type(),
          .d = config.width,
          .n = dense ? config.top_k * config.expert_width : config.expert_width,
          .E = dense ? 1 : config.experts,
          .activation = config.activation};
}

double deviation(double scale, int64_t fan_in) {
  return scale / std::sqrt(static_cast<double>(fan_in));
}

template <class Element>
Tensor view(const Array<Element>& array, DType type, std::initializer_list<int64_t> shape) {
  return Tensor(array.data(), type, shape);
}

}  // namespace

MoeLayer::MoeLayer(const ModelConfig& config, const std::string& name, int64_t max_tokens,
                   uint64_t seed, ParameterStore& parameters, Workspace& workspace)
    : config_(config),
      workspace_(workspace),
      operators_(workspace.operators()),
      seed_(static_cast<int64_t>(seed)),
      experts_(experts_of(config, operators_)),
      top_k_(config.mode == ExpertsMode::kDense ? 1 : config.top_k),
      w1_(parameters.add_normal(name + "experts.w1", {experts_.E, experts_.h_width(), experts_.d},
                                ParameterGroup::kMatrix, deviation(1, experts_.d))),
      w2_(parameters.add_normal(name + "experts.w2", {experts_.E, experts_.d, experts_.n},
                                ParameterGroup::kMatrix, deviation(0.5, experts_.n))) {
  const int64_t E = experts_.E, pairs = max_tokens * top_k_;
  ids_ = workspace.array<int32_t>(pairs);
  scores_ = workspace.floats(pairs);
  if (config.mode == ExpertsMode::kDense) {
    scores_.write(std::vector<float>(static_cast<size_t>(pairs), 1.f));
  } else {
    router_ = &parameters.add_normal(name + "router.weight", {E, experts_.d},
                                     ParameterGroup::kOther, deviation(1, experts_.d));
    logits_ = workspace.floats(max_tokens * E);
    dlogits_ = workspace.floats(max_tokens * E);
    if (config.routing.has_selection_bias()) selection_bias_ = workspace.floats(E);
    workspace.need_scratch(linear_backward_weight_scratch({max_tokens, experts_.d, E}));
    workspace.need_library(router_losses_workspace_bytes(operators_.device(), max_tokens, E));
  }
  counts_ = workspace.array<int32_t>(E);
  losses_ = workspace.floats(2);
  seed_and_step_ = workspace.array<int64_t>(2);

  const RoutingSpec training = spec(Phase::kTrain, max_tokens);
  const RoutingSpec evaluation = spec(Phase::kEvaluate, max_tokens);
  ds_ = workspace.floats(std::max(pairs, training.bound()));
  H_ = workspace.array<std::byte>(static_cast<int64_t>(experts_.saved_bytes(training).H));
  routing_memory_ = workspace.array<std::byte>(
      static_cast<int64_t>(std::max(training.bytes(), evaluation.bytes())));
  for (const RoutingSpec& routing : {training, evaluation}) {
    workspace.need_library(routing.workspace_bytes());
    for (const Pass pass : {Pass::kInference, Pass::kForward})
      workspace.need_library(experts_.workspace_bytes(routing, pass));
    workspace.need_library(experts_.workspace_bytes(routing, BackwardMode::kOverH));
  }
  if (operators_.experts_type() == DType::kFloat32) return;
  w1_copy_ = workspace.array<uint16_t>(w1_.size());
  w2_copy_ = workspace.array<uint16_t>(w2_.size());
  for (Array<uint16_t>* copy : {&X_copy_, &dO_copy_, &result_copy_})
    *copy = workspace.array<uint16_t>(max_tokens * experts_.d);
}

RoutingSpec MoeLayer::spec(Phase phase, int64_t tokens) const {
  const RoutingConfig& routing = config_.routing;
  if (phase == Phase::kTrain && routing.rounded && router_ != nullptr)
    return RoutingSpec::rounded(operators_.device(), tokens, experts_.E, top_k_, routing.rounding,
                                routing.m);
  return RoutingSpec::top_k(operators_.device(), tokens, experts_.E, top_k_);
}

// The routing of v, from the router's logits.
void MoeLayer::route(Phase phase, int64_t step, ConstFloats v) {
  const int64_t tokens = std::ssize(v) / experts_.d, E = experts_.E;
  const RoutingSpec routing_spec = spec(phase, tokens);
  routing_.emplace(routing_spec, routing_memory_.data(), routing_spec.bytes());
  if (router_ != nullptr)
    operators_.linear({tokens, experts_.d, E}, v, router_->value.span(), logits_.first(tokens * E));
  if (routing_spec.kind == TILEMOE_ROUTING_ROUNDED) {
    const bool draws = config_.routing.rounding == Rounding::kStochastic;
    if (draws) seed_and_step_.write(std::vector{seed_, step});
    const auto number = [&](int64_t at) {
      return draws ? Tensor(seed_and_step_.data() + at, DType::kInt64, {1}) : Tensor();
    };
    routing_->from_logits({.logits = view(logits_, DType::kFloat32, {tokens, E}),
                           .seed = number(0),
                           .step = number(1),
                           .expert_counts = view(counts_, DType::kInt32, {E}),
                           .workspace = workspace_.library(),
                           .workspace_bytes = workspace_.library_bytes()});
    return;
  }
  const Tensor ids = view(ids_, DType::kInt32, {tokens, top_k_});
  const Tensor scores = view(scores_, DType::kFloat32, {tokens, top_k_});
  if (router_ != nullptr)
    top_k({.device = operators_.device(),
           .scoring = scoring(),
           .K = top_k_,
           .logits = view(logits_, DType::kFloat32, {tokens, E}),
           .selection_bias =
               selection_bias_.size() > 0 ? view(selection_bias_, DType::kFloat32, {E}) : Tensor(),
           .ids = ids,
           .scores = scores,
           .expert_counts = view(counts_, DType::kInt32, {E})});
  routing_->from_top_k(ids, scores, workspace_.library(), workspace_.library_bytes());
}

// Rounding scores like softmax over all experts, renormalised.
Scoring MoeLayer::scoring() const {
  return config_.routing.rounded ? Scoring::kSoftmaxRenormalized : config_.routing.scoring;
}

ConstTensor MoeLayer::operand(ConstFloats values, const Array<uint16_t>& copy,
                              std::initializer_list<int64_t> shape) const {
  if (copy.size() == 0) return ConstTensor(values.data(), DType::kFloat32, shape);
  operators_.round(values, copy.data());
  return Tensor(copy.data(), operators_.experts_type(), shape);
}

Tensor MoeLayer::result(Floats values, std::initializer_list<int64_t> shape) const {
  if (result_copy_.size() == 0) return Tensor(values.data(), DType::kFloat32, shape);
  return Tensor(result_copy_.data(), operators_.experts_type(), shape);
}

Saved MoeLayer::saved() const {
  return Saved(
      Tensor(H_.data(), operators_.experts_type(), {routing_->capacity(), experts_.h_width()}));
}

void MoeLayer::forward(Phase phase, int64_t step, ConstFloats v, ConstFloats x, Floats y) {
  const int64_t E = experts_.E, d = experts_.d, tokens = std::ssize(v) / d;
  route(phase, step, v);
  Saved saved_state = saved();
  ForwardArgs args;
  args.routing = &*routing_;
  weights_.W1 = operand(w1_.value.span(), w1_copy_, {E, experts_.h_width(), d});
  weights_.W2 = operand(w2_.value.span(), w2_copy_, {E, d, experts_.n});
  X_ = operand(v, X_copy_, {tokens, d});
  args.weights = weights_;
  args.X = X_, args.O = result(y, {tokens, d});
  const bool rounded = result_copy_.size() > 0;  // the residual stays float32
  if (!rounded) args.addend = ConstTensor(x.data(), DType::kFloat32, {tokens, d});
  args.saved = phase == Phase::kTrain ? &saved_state : nullptr;
  args.workspace = workspace_.library(), args.workspace_bytes = workspace_.library_bytes();
  experts_.forward(args);
  if (rounded) operators_.widen(result_copy_.data(), x, y);
}

void MoeLayer::backward(ConstFloats v, ConstFloats dy, Floats dv) {
  const int64_t E = experts_.E, d = experts_.d, tokens = std::ssize(v) / d;
  Saved saved_state = saved();
  BackwardArgs args;
  args.routing = &*routing_;
  args.weights = weights_;
  args.dweights.W1 = Tensor(w1_.gradient.data(), DType::kFloat32, {E, experts_.h_width(), d});
  args.dweights.W2 = Tensor(w2_.gradient.data(), DType::kFloat32, {E, d, experts_.n});
  args.X = X_, args.dO = operand(dy, dO_copy_, {tokens, d});
  args.dX = result(dv, {tokens, d});
  args.saved = &saved_state;
  args.mode = BackwardMode::kOverH;
  const Tensor ds = view(ds_, DType::kFloat32, {routing_->pairs()});
  if (router_ != nullptr) args.ds = ds;
  args.workspace = workspace_.library(), args.workspace_bytes = workspace_.library_bytes();
  experts_.backward(args);
  if (result_copy_.size() > 0) operators_.widen(result_copy_.data(), {}, dv);
  if (router_ == nullptr) return;

  const RoutingConfig& routing = config_.routing;
  const Tensor logits = view(logits_, DType::kFloat32, {tokens, E});
  const Tensor dlogits = view(dlogits_, DType::kFloat32, {tokens, E});
  router_backward({.scoring = scoring(),
                   .routing = &*routing_,
                   .logits = logits,
                   .ds = ds,
                   .dlogits = dlogits,
                   .workspace = workspace_.library(),
                   .workspace_bytes = workspace_.library_bytes()});
  router_losses({.device = operators_.device(),
                 .balance_coefficient = routing.balance_loss,
                 .z_coefficient = routing.z_loss,
                 .logits = logits,
                 .expert_counts = view(counts_, DType::kInt32, {E}),
                 .losses = view(losses_, DType::kFloat32, {2}),
                 .dlogits = dlogits,
                 .workspace = workspace_.library(),
                 .workspace_bytes = workspace_.library_bytes()});
  const Floats all_dlogits = dlogits_.first(tokens * E);
  operators_.linear_backward_input({tokens, d, E}, all_dlogits, router_->value.span(), dv,
                                   Write::kAdd);
  operators_.linear_backward_weight({tokens, d, E}, all_dlogits, v, router_->gradient.span(),
                                    workspace_.scratch());
}

void MoeLayer::balance_selection() {
  if (selection_bias_.size() == 0) return;
  const int64_t E = experts_.E;
  const std::vector<int32_t> counts = counts_.read();
  std::vector<float> bias = selection_bias_.read();
  const int64_t pairs = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (size_t e = 0; e < counts.size(); ++e) {
    const int64_t excess = counts[e] * E - pairs;
    const auto direction = static_cast<float>((excess < 0) - (excess > 0));
    bias[e] += direction * config_.routing.bias_rate;
  }
  selection_bias_.write(bias);
}

RouterReport MoeLayer::report() const {
  const auto experts = static_cast<size_t>(experts_.E);
  const std::vector<float> losses = losses_.read();
  const std::vector<int32_t> counts = counts_.read();
  std::vector<int32_t> offsets(experts + 1);
  operators_.memory().copy_out(offsets.data(), routing_->offsets, offsets.size() * sizeof(int32_t));
  RouterReport report;
  report.balance_loss = losses[0];
  report.z_loss = losses[1];
  for (size_t e = 0; e < experts; ++e) {
    const int32_t load = offsets[e + 1] - offsets[e];
    report.load.push_back(load);
    if (router_ == nullptr) continue;
    const int64_t change = load - counts[e];
    (change > 0 ? report.added : report.dropped) += std::abs(change);
  }
  return report;
}

}  // namespace tilemoe::train
