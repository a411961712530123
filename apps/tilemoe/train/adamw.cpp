#include "train/adamw.h"

#include <cmath>

namespace tilemoe::train {

AdamW::AdamW(const AdamWConfig& config, ParameterStore& parameters)
    : config_(config), operators_(parameters.operators()) {
  for (Parameter& parameter : parameters.all()) {
    moments_.push_back({.parameter = &parameter,
                        .mean = FloatArray(parameter.size(), parameters.memory()),
                        .square = FloatArray(parameter.size(), parameters.memory())});
    gradients_.push_back(parameter.gradient.span());
  }
}

double AdamW::update(int64_t step, double factor) {
  const double norm = std::sqrt(operators_.sum_of_squares(gradients_));
  if (!std::isfinite(norm)) return norm;
  const double scale = config_.clip > 0 && norm > config_.clip ? config_.clip / norm : 1.0;
  const auto steps = static_cast<double>(step);
  const auto factors_of = [&](ParameterGroup group) {
    const double rate = factor * (group == ParameterGroup::kHead ? config_.head_learning_rate
                                                                 : config_.learning_rate);
    const double decay = group == ParameterGroup::kMatrix ? config_.weight_decay : 0.0;
    return AdamWFactors{
        .gradient_scale = static_cast<float>(scale),
        .beta1 = static_cast<float>(config_.beta1),
        .beta2 = static_cast<float>(config_.beta2),
        .epsilon = static_cast<float>(config_.epsilon),
        .step_size = static_cast<float>(rate / (1 - std::pow(config_.beta1, steps))),
        .square_scale = static_cast<float>(1 / (1 - std::pow(config_.beta2, steps))),
        .kept = static_cast<float>(1 - rate * decay),
    };
  };
  std::vector<AdamWTask> tasks;
  for (const Moments& moments : moments_) {
    const Parameter& parameter = *moments.parameter;
    tasks.push_back({.stretch = {.size = parameter.size(),
                                 .gradient = parameter.gradient.data(),
                                 .value = parameter.value.data(),
                                 .mean = moments.mean.data(),
                                 .square = moments.square.data()},
                     .factors = factors_of(parameter.group)});
  }
  operators_.adamw_update(tasks);
  return norm;
}

}  // namespace tilemoe::train
