// Defects of 2-CTA tcgen05 kernels that the simulator must find and name, and one right kernel, in
// which it must find nothing.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "named_defects.h"
#include "run_kernels.h"
#include "tensor_numbers.h"
#include "two_cta_kernels.h"

namespace tilemoe::simulator_test {
namespace {

std::string line(const std::string& word) {
  return line_of(word, word == "stages" ? "tensor_stages.h" : "two_cta_kernels.cu");
}

class Tensor2Cta : public testing::Test {
 protected:
  void SetUp() override { Machine::instance().set_device({"simulated", 10, 0, 227 * 1024, 4}); }
  void TearDown() override { Machine::instance().take_findings(); }
};

constexpr size_t kRows = kTwoCtaTiles * kTwoCtaRows;

Outcome run_2cta(TwoCta how, uint64_t seed, std::vector<float>* result = nullptr) {
  const Array<uint16_t> a(numbers(kRows * kTwoCtaSteps, 0));
  const Array<uint16_t> b(numbers(kTwoCtaWidth * kTwoCtaSteps, 5));
  const Array<float> out(kRows * kTwoCtaWidth);
  const Outcome outcome =
      run_with(seed, [&] { two_cta_tiles(how, out.data(), a.data(), b.data()); });
  if (result != nullptr) *result = out.read();
  return outcome;
}

TEST_F(Tensor2Cta, FindsNothingInARightKernel) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<float> out;
    const Outcome outcome = run_2cta(TwoCta::kRight, seed, &out);
    ASSERT_EQ(outcome.error, cudaSuccess) << all(outcome.findings);
    ASSERT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
    ASSERT_NO_FATAL_FAILURE(expect_gemm(out, kRows, kTwoCtaWidth, kTwoCtaSteps));
  }
}

TEST_F(Tensor2Cta, NamesACommitThatArrivesInACtaThatHasEnded) {
  expect_late_arrival([](uint64_t seed) { return run_2cta(TwoCta::kNotSyncedAtEnd, seed); },
                      line("commits"));
}

class TwoCtaDefects : public Tensor2Cta, public testing::WithParamInterface<Defect<TwoCta>> {};

TEST_P(TwoCtaDefects, AreNamed) {
  const auto run = [](uint64_t seed) { return run_2cta(GetParam().how, seed); };
  expect_named(GetParam(), "simulator_test::multiply_2cta", run, line);
}

constexpr auto kEarlyRead = FindingKind::kReadBeforeWrite, kInUse = FindingKind::kOverwrittenInUse,
               kNever = FindingKind::kNeverWritten, kDeadlock = FindingKind::kDeadlock,
               kOutside = FindingKind::kOutOfBounds, kMisused = FindingKind::kTensorMemory,
               kUnfenced = FindingKind::kMissingProxyFence, kBarrier = FindingKind::kBarrierMisuse;

const Defect<TwoCta> kDefects[] = {
    {TwoCta::kStagesCommittedToOneCta, "StagesCommittedToOneCta", kDeadlock, nullptr},
    {TwoCta::kAccumulatorsCommittedToOneCta, "AccumulatorsCommittedToOneCta", kDeadlock, nullptr},
    {TwoCta::kOtherStageNotWaitedFor,
     "OtherStageNotWaitedFor",
     kEarlyRead,
     "multiplies",
     "stages",
     {kNever, kDeadlock}},
    {TwoCta::kOtherStageNotSignalled, "OtherStageNotSignalled", kDeadlock, nullptr},
    {TwoCta::kNoProxyFenceInOther, "NoProxyFenceInOther", kUnfenced, "multiplies", "stages"},
    {TwoCta::kOtherLoadsNotWaitedFor, "OtherLoadsNotWaitedFor", kInUse, "multiplies", "loads"},
    {TwoCta::kNotSyncedAtFirst, "NotSyncedAtFirst", kMisused, "allocates"},
    {TwoCta::kAllocatedByOneCta, "AllocatedByOneCta", kDeadlock, nullptr},
    {TwoCta::kAllocatedByTwoWarps, "AllocatedByTwoWarps", kMisused, nullptr},
    {TwoCta::kOtherColumns, "OtherColumns", kMisused, nullptr},
    {TwoCta::kAllocatedElsewhere, "AllocatedElsewhere", kMisused, "allocates"},
    {TwoCta::kFreedByOneCta, "FreedByOneCta", kMisused, nullptr},
    {TwoCta::kCommitOfOneCta, "CommitOfOneCta", kMisused, "commits_alone"},
    {TwoCta::kMmaOfOneCta, "MmaOfOneCta", kMisused, "multiplies"},
    {TwoCta::kRowsOfOneCta, "RowsOfOneCta", kOutside, "multiplies"},
    {TwoCta::kHalfTheColumns, "HalfTheColumns", kOutside, "multiplies"},
    {TwoCta::kOtherHasEnded, "OtherHasEnded", kMisused, nullptr, nullptr, {kBarrier}},
    {TwoCta::kInClusterOfOne, "InClusterOfOne", kMisused, "allocates"},
};
INSTANTIATE_TEST_SUITE_P(, TwoCtaDefects, testing::ValuesIn(kDefects),
                         [](const auto& defect) { return std::string(defect.param.name); });

}  // namespace
}  // namespace tilemoe::simulator_test
