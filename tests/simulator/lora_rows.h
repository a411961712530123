// The rows of lora_kernels.inc of the archs in this build, and which of them the tests of single
// steps run: a row that none of them runs is an error.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/plan.h"

namespace tilemoe::test {

struct LoraRow {
  cuda::KernelKey key;
  cuda::TileConfiguration tile;
  const char* text;
};

namespace lora_rows {

using namespace cuda;
using enum RecipeName;
using enum Major;
using enum OutputMajor;
using enum Activations;

inline constexpr LoraRow kRows[] = {
#define KERNEL(STEP, UNIT, ARCH, TILE, ...)                                            \
  TILEMOE_ROW_OF_##ARCH({{GemmName::k##STEP, ArchName::k##ARCH, Variant{__VA_ARGS__}}, \
                         TILE,                                                         \
                         #STEP ", " #UNIT ", " #ARCH ", " #__VA_ARGS__}, )
#include "cuda/ops/lora_kernels.inc"
#undef KERNEL
};

}  // namespace lora_rows

// The test that runs a row's step. A GEMM of another kind needs a test and a value.
enum class StepTest { kAdapterStep, kLoraProjection, kLoraGradient, kFp8Projections };
constexpr StepTest test_of(const LoraRow& row) {
  if (cuda::is_fp8(row.key.variant.recipe)) return StepTest::kFp8Projections;
  switch (row.key.gemm) {
    case cuda::GemmName::kLoraProjection: return StepTest::kLoraProjection;
    case cuda::GemmName::kWeightGradient: return StepTest::kLoraGradient;
    case cuda::GemmName::kUpProjection:
    case cuda::GemmName::kDownProjection:
    case cuda::GemmName::kActivationGradient:
    case cuda::GemmName::kInputGradient: break;
  }
  return StepTest::kAdapterStep;
}

// The kernels that a test's cases choose.
class ChosenKernels {
 public:
  template <class Step>
  void add(const Step& step) {
    chosen_.push_back({cuda::key_of(step), *cuda::kernel_of(step), ""});
  }
  void expect_all_of(StepTest test) const {
    for (const LoraRow& row : lora_rows::kRows) {
      const auto is_row = [&](const LoraRow& one) {
        return one.key == row.key && one.tile == row.tile;
      };
      EXPECT_TRUE(test_of(row) != test || std::ranges::any_of(chosen_, is_row))
          << "no case runs " << row.text;
    }
  }

 private:
  std::vector<LoraRow> chosen_;
};

}  // namespace tilemoe::test
