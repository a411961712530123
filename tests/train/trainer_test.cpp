// Training in steps: that it learns, that its bits are the same however it is cut, and what it
// keeps.
#include "train/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "small_model.h"
#include "temp_folder.h"
#include "tilemoe/tilemoe.h"
#include "train/run_folder.h"
#include "train/sampling.h"

namespace tilemoe::train {
namespace {

// Every bit that a run has made so far.
std::vector<float> everything(Trainer& trainer) {
  std::vector<float> values;
  for (const TensorRef& tensor : trainer.tensors()) {
    int64_t size = 1;
    for (const int64_t extent : tensor.shape) size *= extent;
    values.insert(values.end(), tensor.data, tensor.data + size);
  }
  return values;
}

void take_steps(Trainer& trainer, int count) {
  for (int i = 0; i < count; ++i) trainer.step();
}

TEST(Trainer, LearnsTheText) {
  const Corpus corpus = small_corpus();
  Trainer trainer(small_config(), corpus);
  const double before = trainer.evaluate().bits_per_byte();
  EXPECT_NEAR(before, 8, 1e-5);  // a head of zeros
  while (!trainer.done()) trainer.step();
  EXPECT_EQ(trainer.steps_done(), 40);
  // All seven words are known: what is left is which comes next, log2(7) bits in 4.7 bytes.
  EXPECT_LE(trainer.evaluate().bits_per_byte(), 2.5);
}

struct RunCase {
  const char* name;
  bool rounded;
  Rounding rounding;
  Scoring scoring;
  ExpertsMode mode;
};

void PrintTo(const RunCase& c, std::ostream* out) {
  *out << c.name;
}

class TrainerRun : public testing::TestWithParam<RunCase> {
 protected:
  static TrainerConfig config() {
    TrainerConfig config = small_config();
    config.model.routing.rounded = GetParam().rounded;
    config.model.routing.rounding = GetParam().rounding;
    config.model.routing.scoring = GetParam().scoring;
    config.model.mode = GetParam().mode;
    return config;
  }
};

TEST_P(TrainerRun, ResumedHasTheBitsOfOneRun) {
  const Corpus corpus = small_corpus();
  const TempFolder temp;
  Trainer whole(config(), corpus);
  take_steps(whole, 5);
  RunFolder folder(temp.path() / "run");
  const auto checkpoint =
      save_checkpoint(folder, whole.steps_done(), whole.tensors(), whole.state({}), 1);
  take_steps(whole, 4);

  Trainer resumed(config(), corpus);
  take_steps(resumed, 2);  // what it did before must not matter
  resumed.load(checkpoint);
  EXPECT_EQ(resumed.steps_done(), 5);
  take_steps(resumed, 4);
  EXPECT_EQ(everything(whole), everything(resumed));
  EXPECT_EQ(whole.evaluate().loss, resumed.evaluate().loss);
}

TEST_P(TrainerRun, HasTheSameBitsOnAnyThreads) {
  const Corpus corpus = small_corpus();
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 3}) {
    ASSERT_EQ(tilemoe_set_num_threads(threads), TILEMOE_SUCCESS);
    Trainer trainer(config(), corpus);
    take_steps(trainer, 4);
    results.push_back(everything(trainer));
  }
  ASSERT_EQ(tilemoe_set_num_threads(0), TILEMOE_SUCCESS);
  EXPECT_EQ(results[0], results[1]);
}

INSTANTIATE_TEST_SUITE_P(
    , TrainerRun,
    testing::Values(RunCase{"TopK", false, Rounding::kNearest, Scoring::kSoftmaxOverChosen,
                            ExpertsMode::kRouted},
                    RunCase{"SigmoidWithBias", false, Rounding::kNearest,
                            Scoring::kSigmoidRenormalized, ExpertsMode::kRouted},
                    RunCase{"Nearest", true, Rounding::kNearest, Scoring::kSoftmaxOverChosen,
                            ExpertsMode::kRouted},
                    RunCase{"Stochastic", true, Rounding::kStochastic, Scoring::kSoftmaxOverChosen,
                            ExpertsMode::kRouted},
                    RunCase{"Balanced", true, Rounding::kBalanced, Scoring::kSoftmaxOverChosen,
                            ExpertsMode::kRouted},
                    RunCase{"Dense", false, Rounding::kNearest, Scoring::kSoftmaxOverChosen,
                            ExpertsMode::kDense},
                    RunCase{"Off", false, Rounding::kNearest, Scoring::kSoftmaxOverChosen,
                            ExpertsMode::kOff}),
    [](const testing::TestParamInfo<RunCase>& test) { return test.param.name; });

TEST(Trainer, RoundingAndTopKBeginWithTheSameWeightsAndText) {
  const Corpus corpus = small_corpus();
  TrainerConfig rounded = small_config();
  rounded.model.routing.rounded = true;
  Trainer a(small_config(), corpus), b(rounded, corpus);
  EXPECT_EQ(everything(a), everything(b));
  // The head begins with zeros: the first loss depends on the targets' bytes alone, the second on
  // all.
  EXPECT_EQ(a.step().loss, b.step().loss);
  EXPECT_NE(a.step().loss, b.step().loss);
}

TEST(Trainer, SeedsDiffer) {
  const Corpus corpus = small_corpus();
  TrainerConfig other = small_config();
  other.seed = 1;
  Trainer a(small_config(), corpus), b(other, corpus);
  EXPECT_NE(everything(a), everything(b));
}

TEST(Trainer, EvaluatesWithTopKWhateverTheTraining) {
  const Corpus corpus = small_corpus();
  TrainerConfig rounded = small_config();
  rounded.model.routing.rounded = true;
  rounded.model.routing.rounding = Rounding::kDown;
  Trainer a(small_config(), corpus), b(rounded, corpus);
  take_steps(a, 6);
  const TempFolder temp;
  RunFolder folder(temp.path() / "run");
  b.load(save_checkpoint(folder, a.steps_done(), a.tensors(), a.state({}), 1));
  // The two ways to write the same scores differ in the last bits.
  EXPECT_NEAR(a.evaluate().loss, b.evaluate().loss, 1e-6);
}

TEST(Trainer, SelectionBiasMovesAgainstTheLoad) {
  const Corpus corpus = small_corpus();
  TrainerConfig config = small_config();
  config.model.routing.scoring = Scoring::kSigmoid;
  const float rate = config.model.routing.bias_rate;
  Trainer trainer(config, corpus);
  std::vector<float> expected(4);
  bool just_its_share = false;
  for (int step = 0; step < 30; ++step) {
    const StepResult result = trainer.step();
    for (size_t e = 0; e < 4; ++e) {
      const int32_t load = result.routers[1].load[e], mean = 3 * 20 * 2 / 4;
      expected[e] += load < mean ? rate : load > mean ? -rate : 0.f;
      just_its_share |= load == mean;
    }
  }
  EXPECT_TRUE(just_its_share) << "no expert had a load that leaves its bias as it is";
  for (const TensorRef& tensor : trainer.tensors()) {
    if (tensor.name != "blocks.1.moe.router.selection_bias") continue;
    ASSERT_EQ(tensor.shape, std::vector<int64_t>{4});
    EXPECT_EQ(std::vector<float>(tensor.data, tensor.data + 4), expected);
    return;
  }
  FAIL() << "no selection bias";
}

// As far into a training as no test gets by steps: which batch comes next follows from the sequences.
TEST(Trainer, ResumedLateTakesTheBatchOfItsStep) {
  constexpr int64_t kStep = 123'456;
  const Corpus corpus = small_corpus();
  TrainerConfig config = small_config();
  config.schedule.steps = 2 * kStep;
  Trainer trainer(config, corpus);
  take_steps(trainer, 3);
  nlohmann::json state = trainer.state({});
  state["step"] = kStep;
  state["data"]["sequences"] = kStep * config.batch.count;
  const TempFolder temp;
  RunFolder folder(temp.path() / "run");
  trainer.load(save_checkpoint(folder, kStep, trainer.tensors(), state, 1));

  Model& model = trainer.model();
  const Batches batches(corpus.train, config.batch, model.past(), config.seed);
  const auto loss_of = [&](int64_t step) {
    std::vector<uint8_t> inputs(
        static_cast<size_t>(config.batch.count * (model.past() + config.batch.length)));
    std::vector<uint8_t> targets(static_cast<size_t>(config.batch.tokens()));
    batches.fill((step - 1) * config.batch.count, inputs, targets);
    return model.loss_and_gradient(config.batch, step, inputs, targets);
  };
  const double expected = loss_of(kStep + 1), other = loss_of(kStep + 2);
  EXPECT_NE(expected, other);
  const StepResult result = trainer.step();
  EXPECT_EQ(result.step, kStep + 1);
  EXPECT_EQ(result.loss, expected);
}

TEST(Trainer, TakesNoStepThatIsNotFinite) {
  const Corpus corpus = small_corpus();
  for (const char* spoilt : {"embedding.weight", "head.bias", "blocks.0.moe.experts.w1"}) {
    Trainer trainer(small_config(), corpus);
    take_steps(trainer, 2);
    bool found = false;
    for (Parameter& parameter : trainer.model().parameters().all())
      if (parameter.name == spoilt) {
        std::fill_n(parameter.value.data(), parameter.size(), std::nanf(""));
        found = true;
      }
    EXPECT_TRUE(found) << spoilt;
    const std::vector<float> before = everything(trainer);
    EXPECT_FALSE(trainer.step().taken);
    EXPECT_EQ(trainer.steps_done(), 2);
    const std::vector<float> after = everything(trainer);
    EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)), 0);
  }
}

TEST(Trainer, AModelLargerThanItsCheckpointIsRefused) {
  const Corpus corpus = small_corpus();
  TrainerConfig config = small_config();
  Trainer trainer(config, corpus);
  const TempFolder temp;
  RunFolder folder(temp.path() / "run");
  const auto path = save_checkpoint(folder, 0, trainer.tensors(), trainer.state({}), 1);
  config.model.max_parameters = read_checkpoint(path).weights;
  EXPECT_NO_THROW(Trainer(config, corpus));
  config.model.layers = 1 << 20;  // 50 GB
  EXPECT_TRUE(contains(error_of([&] { Trainer(config, corpus); }), "more than the"));
}

TEST(Trainer, RefusesACheckpointOfAnotherText) {
  const Corpus corpus = small_corpus(), other = small_corpus(2);
  const TempFolder temp;
  RunFolder folder(temp.path() / "run");
  Trainer trainer(small_config(), corpus), elsewhere(small_config(), other);
  const auto checkpoint = save_checkpoint(folder, 0, trainer.tensors(), trainer.state({}), 1);
  try {
    elsewhere.load(checkpoint);
    FAIL() << "it was taken";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("SHA-256"), std::string::npos) << error.what();
  }
}

// Checkpoints of 0.1 have the size of the validation text as "held_bytes".
TEST(Trainer, LoadsACheckpointWithTheOlderNameOfItsText) {
  const Corpus corpus = small_corpus();
  const TempFolder temp;
  RunFolder folder(temp.path() / "run");
  Trainer trainer(small_config(), corpus);
  nlohmann::json state = trainer.state({});
  nlohmann::json& text = state["text"];
  ASSERT_EQ(text.at("validation_bytes"), corpus.validation.size());
  text.erase("validation_bytes");
  text["held_bytes"] = corpus.validation.size();
  EXPECT_NO_THROW(trainer.load(save_checkpoint(folder, 0, trainer.tensors(), state, 1)));
  text["held_bytes"] = corpus.validation.size() + 1;
  const auto other = save_checkpoint(folder, 0, trainer.tensors(), state, 1);
  EXPECT_TRUE(contains(error_of([&] { trainer.load(other); }), "split differently"));
}

// No text is passed over and none comes again.
TEST(Trainer, AnotherBatchContinuesBehindTheLastSequence) {
  const Corpus corpus = small_corpus();
  TrainerConfig config = small_config();
  Trainer before(config, corpus);
  take_steps(before, 4);  // of 3 sequences
  const TempFolder temp;
  RunFolder folder(temp.path() / "run");
  const auto path = save_checkpoint(folder, 4, before.tensors(), before.state({}), 1);
  config.batch.count = 2;
  Trainer trainer(config, corpus);
  trainer.load(path);

  Model& model = trainer.model();
  std::vector<uint8_t> inputs(static_cast<size_t>(2 * (model.past() + 20))), targets(2 * 20);
  Batches(corpus.train, config.batch, model.past(), config.seed).fill(12, inputs, targets);
  double expected = 0;
  for (const float loss : model.losses(config.batch, inputs, targets)) expected += loss / 40.0;
  EXPECT_NEAR(trainer.step().loss, expected, 1e-5);
  EXPECT_EQ(trainer.state({}).at("data").at("sequences"), 14);
  EXPECT_EQ(trainer.state({}).at("step"), 5);
}

TEST(Sample, ContinuesWithWhatTheModelLearnt) {
  Corpus corpus = small_corpus();
  for (size_t i = 0; i < corpus.train.size(); ++i)
    corpus.train[i] = static_cast<uint8_t>("abcde"[i % 5]);
  Trainer trainer(small_config(), corpus);
  while (!trainer.done()) trainer.step();
  const SamplingConfig likeliest{.bytes = 30, .prompt = "abcdeab", .temperature = 0};
  EXPECT_EQ(sample(trainer.model(), likeliest), "cdeabcdeabcdeabcdeabcdeabcdeab");
  const SamplingConfig drawn{.bytes = 30, .prompt = "x", .temperature = 50, .seed = 3};
  const std::string text = sample(trainer.model(), drawn);
  EXPECT_EQ(text.size(), 30u);
  EXPECT_EQ(text, sample(trainer.model(), drawn));
  EXPECT_GT(std::set<char>(text.begin(), text.end()).size(), 15u) << "each byte is drawn anew";
  SamplingConfig other = drawn;
  other.seed = 4;
  EXPECT_NE(text, sample(trainer.model(), other));
}

}  // namespace
}  // namespace tilemoe::train
