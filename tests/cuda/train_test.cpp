// The trainer on a GPU against the trainer on the CPU: the same model from the same numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "train/run_folder.h"
#include "train/sampling.h"
#include "train/small_model.h"
#include "train/temp_folder.h"

namespace tilemoe::train {
namespace {

TrainerConfig on(Device device, TrainerConfig config = small_config()) {
  config.model.device = device;
  return config;
}

double norm(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

// |got - want| / |want|
double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  std::vector<float> difference(want.size());
  for (size_t i = 0; i < want.size(); ++i) difference[i] = got[i] - want[i];
  return norm(difference) / norm(want);
}

struct Gradients {
  double loss = 0;
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;
};

// A head of zeros, the initial value in training, would hide every other gradient.
Gradients gradients_of(const ModelConfig& config, Sequences sequences) {
  Model model(config, sequences, 11);
  for (Parameter& parameter : model.parameters().all()) {
    if (parameter.group != ParameterGroup::kHead) continue;
    const RandomStream random(9, parameter.name);
    std::vector<float> head(static_cast<size_t>(parameter.size()));
    for (size_t i = 0; i < head.size(); ++i) head[i] = static_cast<float>(0.3 * random.normal(i));
    parameter.value.write(head);
  }
  const Batch batch(model, model.capacity());
  Gradients all;
  all.loss = model.loss_and_gradient(sequences, 3, batch.inputs, batch.targets);
  for (const Parameter& parameter : model.parameters().all()) {
    all.names.push_back(parameter.name);
    all.values.push_back(parameter.gradient.read());
  }
  return all;
}

struct ModelCase {
  const char* name;
  ExpertsMode mode;
  bool rounded;
  Scoring scoring;
  double loss_tolerance, gradient_tolerance;
};

void PrintTo(const ModelCase& c, std::ostream* out) {
  *out << c.name;
}

class CudaModel : public testing::TestWithParam<ModelCase> {};

// Without experts both compute in float32, and differ by the order of sums alone. With them the
// GPU's are in bfloat16.
TEST_P(CudaModel, HasTheGradientsOfTheCpus) {
  ModelConfig config = small_config().model;
  config.mode = GetParam().mode;
  config.routing.rounded = GetParam().rounded;
  config.routing.scoring = GetParam().scoring;
  config.top_k = 4;  // every expert, so that no rounding changes a choice
  // More rows than one part of a sum over the batch has, and a last part that is not full.
  const Sequences sequences{7, 100};
  const Gradients want = gradients_of(config, sequences);
  config.device = Device::kCuda;
  const Gradients got = gradients_of(config, sequences);
  EXPECT_NEAR(got.loss, want.loss, GetParam().loss_tolerance);
  ASSERT_EQ(got.names, want.names);
  for (size_t i = 0; i < want.values.size(); ++i) {
    const bool unused =
        config.mode == ExpertsMode::kOff && want.names[i].find("moe_norm") != std::string::npos;
    if (unused) continue;
    ASSERT_GT(norm(want.values[i]), 0) << want.names[i];
    EXPECT_LE(relative_error(got.values[i], want.values[i]), GetParam().gradient_tolerance)
        << want.names[i];
  }
}

INSTANTIATE_TEST_SUITE_P(
    , CudaModel,
    testing::Values(
        ModelCase{"Off", ExpertsMode::kOff, false, Scoring::kSoftmaxOverChosen, 1e-5, 1e-5},
        ModelCase{"TopK", ExpertsMode::kRouted, false, Scoring::kSoftmaxOverChosen, 5e-3, 2e-2},
        ModelCase{"Sigmoid", ExpertsMode::kRouted, false, Scoring::kSigmoid, 5e-3, 2e-2},
        ModelCase{"Dense", ExpertsMode::kDense, false, Scoring::kSoftmaxOverChosen, 5e-3, 2e-2}),
    [](const testing::TestParamInfo<ModelCase>& test) { return test.param.name; });

TEST(CudaAdamW, StepsAsTheCpus) {
  const std::unique_ptr<Operators> device = make_operators(Device::kCuda);
  std::vector<std::vector<float>> values;
  std::vector<double> norms;
  for (Operators* operators : {&cpu_operators(), device.get()}) {
    ParameterStore store(3, *operators);
    store.add_normal("matrix", {2500, 16}, ParameterGroup::kMatrix, 1);
    store.add_normal("head", {32}, ParameterGroup::kHead, 1);
    AdamW optimizer({}, store);
    for (int64_t step = 1; step <= 3; ++step) {
      for (Parameter& parameter : store.all()) {
        const RandomStream random(static_cast<uint64_t>(step), parameter.name);
        std::vector<float> gradient(static_cast<size_t>(parameter.size()));
        for (size_t i = 0; i < gradient.size(); ++i)
          gradient[i] = static_cast<float>(random.normal(i));
        parameter.gradient.write(gradient);
      }
      norms.push_back(optimizer.update(step, 1));
    }
    for (Parameter& parameter : store.all()) values.push_back(parameter.value.read());
  }
  for (size_t step = 0; step < 3; ++step) EXPECT_NEAR(norms[3 + step] / norms[step], 1, 1e-6);
  for (size_t p = 0; p < 2; ++p) EXPECT_LE(relative_error(values[2 + p], values[p]), 1e-6) << p;
}

TEST(CudaTrainer, LosesAsTheCpusAndLearnsTheText) {
  const Corpus corpus = small_corpus();
  Trainer cpu(on(Device::kCpu), corpus), gpu(on(Device::kCuda), corpus);
  for (int step = 0; step < 8; ++step)
    EXPECT_NEAR(gpu.step().loss, cpu.step().loss, 1e-2) << "step " << step + 1;
  while (!gpu.done()) gpu.step();
  // As on the CPU: all seven words are known.
  EXPECT_LE(gpu.evaluate().bits_per_byte(), 2.5);
}

// Every bit that a run has made so far.
std::vector<std::vector<float>> everything(Trainer& trainer) {
  std::vector<std::vector<float>> values;
  for (const TensorRef& tensor : trainer.tensors()) {
    int64_t size = 1;
    for (const int64_t extent : tensor.shape) size *= extent;
    values.emplace_back(tensor.data, tensor.data + size);
  }
  return values;
}

void take_steps(Trainer& trainer, int count) {
  for (int i = 0; i < count; ++i) trainer.step();
}

TEST(CudaTrainer, ResumedHasTheBitsOfTheUninterrupted) {
  const Corpus corpus = small_corpus();
  for (const bool rounded : {false, true}) {
    SCOPED_TRACE(rounded ? "stochastic" : "sigmoid with bias");
    TrainerConfig config = on(Device::kCuda);
    config.model.routing.rounded = rounded;
    config.model.routing.rounding = Rounding::kStochastic;
    if (!rounded) config.model.routing.scoring = Scoring::kSigmoidRenormalized;
    const TempFolder temp;
    RunFolder folder(temp.path() / "run");
    Trainer whole(config, corpus);
    take_steps(whole, 5);
    const auto checkpoint =
        save_checkpoint(folder, whole.steps_done(), whole.tensors(), whole.state({}), 1);
    take_steps(whole, 4);
    Trainer resumed(config, corpus);
    take_steps(resumed, 2);  // earlier steps must not matter
    resumed.load(checkpoint);
    take_steps(resumed, 4);
    EXPECT_EQ(everything(whole), everything(resumed));
    EXPECT_EQ(whole.evaluate().loss, resumed.evaluate().loss);
  }
}

TEST(CudaTrainer, ACheckpointOfOneDeviceContinuesOnTheOther) {
  const Corpus corpus = small_corpus();
  for (const Device from : {Device::kCpu, Device::kCuda}) {
    const Device to = from == Device::kCpu ? Device::kCuda : Device::kCpu;
    const TempFolder temp;
    RunFolder folder(temp.path() / "run");
    Trainer first(on(from), corpus), second(on(to), corpus);
    take_steps(first, 6);
    second.load(save_checkpoint(folder, first.steps_done(), first.tensors(), first.state({}), 1));
    EXPECT_EQ(everything(first), everything(second));
    EXPECT_NEAR(first.evaluate().loss, second.evaluate().loss, 5e-3);
    EXPECT_NEAR(first.step().loss, second.step().loss, 5e-3);
  }
}

TEST(CudaSample, ContinuesWithWhatTheModelLearnt) {
  Corpus corpus = small_corpus();
  for (size_t i = 0; i < corpus.train.size(); ++i)
    corpus.train[i] = static_cast<uint8_t>("abcde"[i % 5]);
  Trainer trainer(on(Device::kCuda), corpus);
  while (!trainer.done()) trainer.step();
  EXPECT_EQ(sample(trainer.model(), {.bytes = 30, .prompt = "abcdeab", .temperature = 0}),
            "cdeabcdeabcdeabcdeabcdeabcdeab");
}

}  // namespace
}  // namespace tilemoe::train
