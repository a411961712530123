// AdamW over all parameters, and the learning rate's course.
#include <gtest/gtest.h>

#include <cmath>

#include "gradients.h"
#include "train/adamw.h"
#include "train/schedule.h"

namespace tilemoe::train {
namespace {

TEST(AdamW, EqualsItsDefinitionOverSteps) {
  constexpr AdamWConfig kConfig{.learning_rate = 0.01,
                                .head_learning_rate = 0.03,
                                .beta1 = 0.8,
                                .beta2 = 0.9,
                                .epsilon = 1e-3,
                                .weight_decay = 0.5,
                                .clip = 2};
  constexpr int64_t kLarge = 40000;  // more than one task
  ParameterStore store(3);
  store.add_normal("matrix", {kLarge / 16, 16}, ParameterGroup::kMatrix, 1);
  store.add_normal("head", {32}, ParameterGroup::kHead, 1);
  store.add_constant("gain", {16}, ParameterGroup::kOther, 1);
  AdamW optimizer(kConfig, store);

  std::vector<Doubles> values, means, squares;
  for (const Parameter& parameter : store.all()) {
    values.emplace_back(parameter.value.span().begin(), parameter.value.span().end());
    means.emplace_back(values.back().size());
    squares.emplace_back(values.back().size());
  }
  for (int step = 1; step <= 3; ++step) {
    const double factor = 1.0 / step;
    std::vector<Doubles> gradients;
    double norm_squared = 0;
    for (Parameter& parameter : store.all()) {
      // The last step's norm is below the clip.
      Doubles gradient = random_doubles(parameter.name + std::to_string(step), parameter.size());
      for (double& g : gradient) g = static_cast<float>(step == 3 ? g * 1e-3 : g);
      for (size_t i = 0; i < gradient.size(); ++i)
        parameter.gradient.data()[i] = static_cast<float>(gradient[i]);
      norm_squared += inner(gradient, gradient);
      gradients.push_back(std::move(gradient));
    }
    const double norm = std::sqrt(norm_squared);
    EXPECT_NEAR(optimizer.update(step, factor) / norm, 1, 1e-6);
    ASSERT_EQ(norm > kConfig.clip, step != 3);
    const double scale = std::min(1.0, kConfig.clip / norm);
    for (size_t p = 0; p < values.size(); ++p) {
      const double rate = factor * (p == 1 ? 0.03 : 0.01), decay = p == 0 ? 0.5 : 0;
      for (size_t i = 0; i < values[p].size(); ++i) {
        const double g = scale * gradients[p][i];
        means[p][i] = 0.8 * means[p][i] + 0.2 * g;
        squares[p][i] = 0.9 * squares[p][i] + 0.1 * g * g;
        const double mean = means[p][i] / (1 - std::pow(0.8, step));
        const double square = squares[p][i] / (1 - std::pow(0.9, step));
        values[p][i] = values[p][i] * (1 - rate * decay) - rate * mean / (std::sqrt(square) + 1e-3);
      }
    }
  }
  for (size_t p = 0; p < values.size(); ++p)
    EXPECT_LE(relative_error(store.all()[p].value.span(), values[p]), kFloatTolerance) << p;
}

TEST(ParameterStore, DrawsByNameAndSeed) {
  ParameterStore a(1), b(1), c(2);
  const Parameter& first = a.add_normal("w", {4096}, ParameterGroup::kOther, 2);
  b.add_normal("other", {64}, ParameterGroup::kOther, 1);
  const Parameter& same = b.add_normal("w", {4096}, ParameterGroup::kOther, 2);
  const Parameter& other = c.add_normal("w", {4096}, ParameterGroup::kOther, 2);
  const auto equal = [](const Parameter& x, const Parameter& y) {
    return std::equal(x.value.span().begin(), x.value.span().end(), y.value.span().begin());
  };
  EXPECT_TRUE(equal(first, same));
  EXPECT_FALSE(equal(first, other));
  double sum = 0, squares = 0;
  for (const float value : first.value.span()) {
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  EXPECT_NEAR(sum / 4096, 0, 0.125);         // 4 standard errors
  EXPECT_NEAR(squares / 4096, 4, 4 * 0.09);  // likewise
}

TEST(Schedule, RisesThenFalls) {
  const Schedule schedule{.steps = 110, .warm_up = 10, .final_fraction = 0.1};
  EXPECT_DOUBLE_EQ(schedule.factor(1), 0.1);
  EXPECT_DOUBLE_EQ(schedule.factor(10), 1);
  EXPECT_NEAR(schedule.factor(60), 0.55, 1e-12);
  EXPECT_NEAR(schedule.factor(110), 0.1, 1e-12);
  for (int64_t step = 11; step <= 110; ++step)
    EXPECT_LT(schedule.factor(step), schedule.factor(step - 1));
}

TEST(Schedule, MayLackEitherPart) {
  const Schedule no_warm_up{.steps = 10, .warm_up = 0};
  EXPECT_LE(no_warm_up.factor(1), 1);
  EXPECT_GT(no_warm_up.factor(1), 0.9);
  const Schedule warm_up_alone{.steps = 10, .warm_up = 10};
  EXPECT_DOUBLE_EQ(warm_up_alone.factor(10), 1);
}

}  // namespace
}  // namespace tilemoe::train
