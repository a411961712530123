// The whole model: its gradient against differences of its loss, and what does not change its bits.
#include "train/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "small_model.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::train {
namespace {

// A head of zeros, as training begins with, would hide every other gradient.
void fill_head(Model& model) {
  for (Parameter& parameter : model.parameters().all()) {
    if (parameter.group != ParameterGroup::kHead) continue;
    const RandomStream random(9, parameter.name);
    for (int64_t i = 0; i < parameter.size(); ++i)
      parameter.value.data()[i] = static_cast<float>(0.3 * random.normal(static_cast<uint64_t>(i)));
  }
}

double norm(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

// Loss with the routers' losses, as the gradient has them.
double whole_loss(Model& model, const ModelConfig& config, Sequences sequences,
                  const Batch& batch) {
  double loss = model.loss_and_gradient(sequences, 1, batch.inputs, batch.targets);
  for (MoeLayer* layer : model.moe_layers()) {
    const RouterReport report = layer->report();
    loss +=
        config.routing.balance_loss * report.balance_loss + config.routing.z_loss * report.z_loss;
  }
  return loss;
}

struct GradientCase {
  const char* name;
  ExpertsMode mode;
  int64_t top_k;
  Scoring scoring;
};

void PrintTo(const GradientCase& c, std::ostream* out) {
  *out << c.name;
}

class ModelGradient : public testing::TestWithParam<GradientCase> {};

// Along the gradient of each parameter, and along random signs, the loss must change as the
// gradient says. Every token goes to every expert if a router chooses: a choice that changes is
// a jump.
TEST_P(ModelGradient, IsTheLossesDerivative) {
  ModelConfig config = small_config().model;
  config.mode = GetParam().mode;
  config.top_k = GetParam().top_k;
  config.routing.scoring = GetParam().scoring;
  config.routing.z_loss = 0.05f;
  const Sequences sequences{3, 20};
  Model model(config, sequences, 11);
  fill_head(model);
  const Batch batch(model, sequences);
  whole_loss(model, config, sequences, batch);
  std::vector<std::vector<float>> gradients;
  for (const Parameter& parameter : model.parameters().all())
    gradients.emplace_back(parameter.gradient.span().begin(), parameter.gradient.span().end());

  size_t index = 0;
  for (Parameter& parameter : model.parameters().all()) {
    SCOPED_TRACE(parameter.name);
    const std::vector<float>& gradient = gradients[index++];
    const std::span<float> values = parameter.value.span();
    const std::vector<float> before(values.begin(), values.end());
    ASSERT_GT(norm(gradient), 0);
    for (const bool along_gradient : {true, false}) {
      const RandomStream random(13, parameter.name);
      std::vector<double> direction(gradient.size());
      double slope = 0, length = 0;
      for (size_t i = 0; i < gradient.size(); ++i) {
        direction[i] = along_gradient ? gradient[i] : random.bits(i) % 2 == 0 ? 1 : -1;
        slope += direction[i] * gradient[i];
        length += direction[i] * direction[i];
      }
      const double step = 2e-3 * std::max(norm(before), 1.0) / std::sqrt(length);
      double losses[2];
      for (const int sign : {1, -1}) {
        for (size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>(before[i] + sign * step * direction[i]);
        losses[sign > 0] = whole_loss(model, config, sequences, batch);
      }
      std::copy(before.begin(), before.end(), values.begin());
      const double measured = (losses[1] - losses[0]) / (2 * step);
      // The third derivative, and 24 bits of each token's loss.
      const double tolerance = 2e-2 * std::abs(slope) + 1e-3 * norm(gradient) * std::sqrt(length);
      EXPECT_LE(std::abs(measured - slope), tolerance) << measured << " for " << slope;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    , ModelGradient,
    testing::Values(GradientCase{"Softmax", ExpertsMode::kRouted, 4, Scoring::kSoftmaxOverChosen},
                    GradientCase{"Sigmoid", ExpertsMode::kRouted, 4, Scoring::kSigmoid},
                    GradientCase{"Dense", ExpertsMode::kDense, 2, Scoring::kSoftmaxOverChosen}),
    [](const testing::TestParamInfo<GradientCase>& test) { return test.param.name; });

std::vector<float> all_gradients(const TrainerConfig& config, int threads) {
  EXPECT_EQ(tilemoe_set_num_threads(threads), TILEMOE_SUCCESS);
  // More rows than one task of any op has.
  const Sequences sequences{7, 100};
  Model model(config.model, sequences, 11);
  fill_head(model);
  const Batch batch(model, sequences);
  model.loss_and_gradient(sequences, 3, batch.inputs, batch.targets);
  std::vector<float> gradients;
  for (const Parameter& parameter : model.parameters().all())
    gradients.insert(gradients.end(), parameter.gradient.span().begin(),
                     parameter.gradient.span().end());
  return gradients;
}

TEST(Model, GradientsHaveTheSameBitsForEveryNumberOfThreads) {
  for (const bool rounded : {false, true}) {
    TrainerConfig config = small_config();
    config.model.routing.rounded = rounded;
    config.model.routing.rounding = Rounding::kStochastic;
    const std::vector<float> one = all_gradients(config, 1);
    EXPECT_EQ(one, all_gradients(config, 2));
    EXPECT_EQ(one, all_gradients(config, 5));
  }
  EXPECT_EQ(tilemoe_set_num_threads(0), TILEMOE_SUCCESS);
}

TEST(Model, NoTokenSeesWhatComesAfterIt) {
  const Sequences sequences{2, 20};
  Model model(small_config().model, sequences, 11);
  fill_head(model);
  Batch batch(model, sequences);
  const auto logits_of = [&] {
    const ConstFloats logits = model.logits(sequences, batch.inputs);
    return std::vector<float>(logits.begin(), logits.end());
  };
  const std::vector<float> before = logits_of();
  constexpr size_t kChanged = 12;  // token of the first sequence
  batch.inputs[static_cast<size_t>(model.past()) + kChanged] ^= 1;
  const std::vector<float> after = logits_of();
  const auto same = [&](size_t token) {
    return std::memcmp(&before[token * 256], &after[token * 256], 256 * sizeof(float)) == 0;
  };
  for (size_t token = 0; token < 40; ++token)
    EXPECT_EQ(same(token), token < kChanged || token >= 20) << token;
}

TEST(Model, ExpertsThatAreOffLeaveNoParameters) {
  ModelConfig config = small_config().model;
  config.mode = ExpertsMode::kOff;
  Model model(config, {3, 20}, 11);
  EXPECT_TRUE(model.moe_layers().empty());
  for (const Parameter& parameter : model.parameters().all())
    EXPECT_EQ(parameter.name.find("experts"), std::string::npos) << parameter.name;
}

TEST(Model, RoundingGivesRowsInMultiples) {
  ModelConfig config = small_config().model;
  config.routing.rounded = true;
  config.routing.rounding = Rounding::kUp;
  const Sequences sequences{3, 20};
  Model model(config, sequences, 11);
  const Batch batch(model, sequences);
  model.loss_and_gradient(sequences, 1, batch.inputs, batch.targets);
  for (MoeLayer* layer : model.moe_layers()) {
    const RouterReport report = layer->report();
    int64_t rows = 0;
    for (const int32_t load : report.load) {
      EXPECT_EQ(load % config.routing.m, 0);
      rows += load;
    }
    EXPECT_EQ(rows, 2 * sequences.tokens() + report.added - report.dropped);
    EXPECT_GT(report.added, 0);
  }
}

}  // namespace
}  // namespace tilemoe::train
