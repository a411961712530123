#include "train/memory_need.h"

#include <gtest/gtest.h>

#include <memory>

#include "small_model.h"
#include "temp_folder.h"

namespace tilemoe::train {
namespace {

// The host's memory, and how much of it was taken.
class CountedHostMemory final : public Memory {
 public:
  void* allocate(size_t bytes) override {
    taken_ += static_cast<double>(bytes);
    return host_memory().allocate(bytes);
  }
  void release(void* memory) override { host_memory().release(memory); }
  void copy_in(void* to, const void* from, size_t bytes) override {
    host_memory().copy_in(to, from, bytes);
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    host_memory().copy_out(to, from, bytes);
  }
  double taken() const { return taken_; }

 private:
  double taken_ = 0;
};

TEST(MemoryNeed, IsWhatModelAndOptimizerTake) {
  for (const int64_t layers : {1, 2, 5})
    for (const auto mode : {ExpertsMode::kRouted, ExpertsMode::kDense, ExpertsMode::kOff})
      for (const bool trained : {true, false}) {
        SCOPED_TRACE(layers);
        CountedHostMemory memory;
        ModelConfig config = small_config().model;
        config.layers = layers, config.mode = mode, config.trained = trained;
        config.routing.rounded = layers == 5;
        const MemoryNeed need = memory_need(config, {3, 20});
        config.memory = &memory;
        Model model(config, {3, 20}, 0);
        std::unique_ptr<AdamW> optimizer;
        if (trained) optimizer = std::make_unique<AdamW>(AdamWConfig(), model.parameters());
        EXPECT_EQ(need.total(), memory.taken());
        EXPECT_EQ(need.parameters, 4.0 * static_cast<double>(model.parameters().count()));
        EXPECT_EQ(need.gradients, trained ? need.parameters : 0);
        EXPECT_EQ(need.optimizer, trained ? 2 * need.parameters : 0);
        EXPECT_GT(need.activations, 0);
      }
}

TEST(MemoryNeed, MoreThanThereIsIsRefusedWithBothNumbers) {
  ModelConfig config = small_config().model;
  EXPECT_NO_THROW(require_memory(config, {3, 20}));
  config.experts = 65536, config.width = config.expert_width = 4096;  // 13 TB of W1 and W2 a layer
  config.layers = 1000;
  const std::string error = error_of([&] { require_memory(config, {8, 512}); });
  EXPECT_TRUE(contains(error, "the model requires "));
  EXPECT_TRUE(contains(error, "gradients 13195"));
  EXPECT_TRUE(contains(error, " GB are free"));
}

TEST(MemoryNeed, TheHostSaysWhatIsFree) {
  const std::optional<double> available = host_memory().available();
  ASSERT_TRUE(available.has_value());
  EXPECT_GT(*available, 1e6);
  EXPECT_LT(*available, 1e15);
}

}  // namespace
}  // namespace tilemoe::train
