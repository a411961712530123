// Defects of tcgen05 kernels that the simulator must find and name, and one right kernel, in which
// it must find nothing.
#include "simulator/machine/tensor_memory.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "named_defects.h"
#include "run_kernels.h"
#include "tensor_kernels.h"
#include "tensor_numbers.h"

namespace tilemoe::simulator_test {
namespace {

std::string line(const std::string& word) {
  return line_of(word, word == "stages" ? "tensor_stages.h" : "tensor_kernels.cu");
}

class TensorMemory : public testing::Test {
 protected:
  void SetUp() override { Machine::instance().set_device({"simulated", 10, 0, 227 * 1024, 3}); }
  void TearDown() override { Machine::instance().take_findings(); }
};

constexpr size_t kRows = kTensorTiles * kTensorRows;

Outcome run_tiles(Tensor how, uint64_t seed, std::vector<float>* result = nullptr) {
  const Array<uint16_t> a(numbers(kRows * kTensorSteps, 0));
  const Array<uint16_t> b(numbers(kTensorWidth * kTensorSteps, 5));
  const Array<float> out(kRows * kTensorWidth);
  const Outcome outcome =
      run_with(seed, [&] { tensor_tiles(how, out.data(), a.data(), b.data()); });
  if (result != nullptr) *result = out.read();
  return outcome;
}

TEST_F(TensorMemory, FindsNothingInARightKernel) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<float> out;
    const Outcome outcome = run_tiles(Tensor::kRight, seed, &out);
    ASSERT_EQ(outcome.error, cudaSuccess) << all(outcome.findings);
    ASSERT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
    ASSERT_NO_FATAL_FAILURE(expect_gemm(out, kRows, kTensorWidth, kTensorSteps));
  }
}

TEST_F(TensorMemory, IsDoneAtOnceInOrderedSchedules) {
  std::vector<float> expected;
  run_tiles(Tensor::kRight, 1, &expected);
  const auto with = [&](Schedule schedule, Tensor how) {
    return tally(schedule, [&](uint64_t seed, bool& right) {
      std::vector<float> out;
      const Outcome outcome = run_tiles(how, seed, &out);
      right = out == expected;
      return outcome;
    });
  };
  for (const Schedule schedule : {Schedule::kByRank, Schedule::kInStep}) {
    const Tally no_wait = with(schedule, Tensor::kNoWaitForLoads);
    EXPECT_EQ(no_wait.right, kSeeds);
    EXPECT_EQ(no_wait.found, kSeeds);
    const Tally right = with(schedule, Tensor::kRight);
    EXPECT_EQ(right.right, kSeeds);
    EXPECT_EQ(right.found, 0);
  }
  EXPECT_LT(with(Schedule::kAny, Tensor::kNoWaitForLoads).right, kSeeds);
}

TEST_F(TensorMemory, NamesACommitThatArrivesInABlockThatHasEnded) {
  expect_late_arrival([](uint64_t seed) { return run_tiles(Tensor::kEndsEarly, seed); },
                      line("commits"));
}

class TensorDefects : public TensorMemory, public testing::WithParamInterface<Defect<Tensor>> {};

TEST_P(TensorDefects, AreNamed) {
  const auto run = [](uint64_t seed) { return run_tiles(GetParam().how, seed); };
  expect_named(GetParam(), "simulator_test::multiply_tiles", run, line);
}

constexpr auto kEarlyRead = FindingKind::kReadBeforeWrite, kInUse = FindingKind::kOverwrittenInUse,
               kNever = FindingKind::kNeverWritten, kDeadlock = FindingKind::kDeadlock,
               kOutside = FindingKind::kOutOfBounds, kMisused = FindingKind::kTensorMemory;

const Defect<Tensor> kDefects[] = {
    {Tensor::kNoCommit, "NoCommit", kDeadlock, nullptr},
    {Tensor::kNoStageCommit, "NoStageCommit", kDeadlock, nullptr},
    {Tensor::kNoWaitForTurn,
     "NoWaitForTurn",
     kInUse,
     "multiplies",
     "loads",
     {kDeadlock, kEarlyRead}},
    {Tensor::kNoWaitForMmas, "NoWaitForMmas", kEarlyRead, "loads", "multiplies", {kNever}},
    {Tensor::kNoFenceBeforeLoads, "NoFenceBeforeLoads", kEarlyRead, "loads", "multiplies"},
    {Tensor::kNoFenceAfterLoads, "NoFenceAfterLoads", kInUse, "multiplies", "loads"},
    {Tensor::kNoFenceBeforeMmas, "NoFenceBeforeMmas", kInUse, "multiplies", "loads"},
    {Tensor::kNoWaitForLoads, "NoWaitForLoads", kEarlyRead, "uses"},
    {Tensor::kArrivedTooEarly, "ArrivedTooEarly", kInUse, "multiplies", "loads", {kEarlyRead}},
    {Tensor::kNoProxyFence, "NoProxyFence", FindingKind::kMissingProxyFence, "multiplies",
     "stages"},
    {Tensor::kNotFreed, "NotFreed", kMisused, "allocates"},
    {Tensor::kFreedByAnother, "FreedByAnother", kMisused, nullptr},
    {Tensor::kFreedInUse, "FreedInUse", kInUse, "frees", nullptr, {kOutside}},
    {Tensor::kAllocatedLate, "AllocatedLate", kMisused, "allocates"},
    {Tensor::kTooManyColumns, "TooManyColumns", kMisused, "allocates"},
    {Tensor::kOtherLanes, "OtherLanes", kOutside, "loads"},
    {Tensor::kWiderMma, "WiderMma", kOutside, "multiplies"},
    {Tensor::kNarrowerRows, "NarrowerRows", kOutside, "multiplies"},
    {Tensor::kOtherStride, "OtherStride", kNever, "multiplies", nullptr, {kEarlyRead}},
    {Tensor::kHoppersVersion, "HoppersVersion", kOutside, "multiplies"},
    {Tensor::kAddsToNothing, "AddsToNothing", kNever, "multiplies"},
    {Tensor::kEndsUncommitted, "EndsUncommitted", kMisused, "multiplies"},
};

INSTANTIATE_TEST_SUITE_P(, TensorDefects, testing::ValuesIn(kDefects),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace tilemoe::simulator_test
