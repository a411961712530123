#include "train/adamw.h"

#include <cmath>
#include <numeric>

#include "train/ops/adamw_update.h"

namespace tilemoe::train {

AdamW::AdamW(const AdamWConfig& config, ParameterStore& parameters) : config_(config) {
  constexpr int64_t kStretch = 32768;  // four arrays of it fit a core's second cache
  for (Parameter& parameter : parameters.all())
    moments_.push_back({.parameter = &parameter,
                        .mean = FloatArray(parameter.size()),
                        .square = FloatArray(parameter.size())});
  for (Moments& moments : moments_)
    for (int64_t first = 0; first < moments.parameter->size(); first += kStretch)
      stretches_.push_back({.moments = &moments,
                            .first = first,
                            .size = std::min(kStretch, moments.parameter->size() - first)});
  squares_.resize(stretches_.size());
}

double AdamW::gradient_norm() {
  cpu::parallel_for(std::ssize(stretches_), [&](int64_t task, int) {
    const auto i = static_cast<size_t>(task);
    const Stretch& stretch = stretches_[i];
    squares_[i] =
        sum_of_squares(stretch.moments->parameter->gradient.data() + stretch.first, stretch.size);
  });
  return std::sqrt(std::accumulate(squares_.begin(), squares_.end(), 0.0));
}

double AdamW::update(int64_t step, double factor) {
  const double norm = gradient_norm();
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
  cpu::parallel_for(std::ssize(stretches_), [&](int64_t task, int) {
    const Stretch& stretch = stretches_[static_cast<size_t>(task)];
    Moments& moments = *stretch.moments;
    adamw_update({.size = stretch.size,
                  .gradient = moments.parameter->gradient.data() + stretch.first,
                  .value = moments.parameter->value.data() + stretch.first,
                  .mean = moments.mean.data() + stretch.first,
                  .square = moments.square.data() + stretch.first},
                 factors_of(moments.parameter->group));
  });
  return norm;
}

}  // namespace tilemoe::train
