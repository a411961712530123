// Defects of kernels of tcgen05 by pairs of blocks that the simulator must find and name, and one
// kernel that it must find nothing in.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "named_defects.h"
#include "pair_kernels.h"
#include "run_kernels.h"
#include "tensor_numbers.h"

namespace tilemoe::simulator_test {
namespace {

std::string line(const std::string& word) {
  return line_of(word, word == "stages" ? "tensor_stages.h" : "pair_kernels.cu");
}

class TensorPairs : public testing::Test {
 protected:
  void SetUp() override { Machine::instance().set_device({"simulated", 10, 0, 227 * 1024, 4}); }
  void TearDown() override { Machine::instance().take_findings(); }
};

constexpr size_t kRows = kPairTiles * kPairRows;

Outcome run_pairs(Pair how, uint64_t seed, std::vector<float>* result = nullptr) {
  const Array<uint16_t> a(numbers(kRows * kPairSteps, 0));
  const Array<uint16_t> b(numbers(kPairWidth * kPairSteps, 5));
  const Array<float> out(kRows * kPairWidth);
  const Outcome outcome = run_with(seed, [&] { pair_tiles(how, out.data(), a.data(), b.data()); });
  if (result != nullptr) *result = out.read();
  return outcome;
}

TEST_F(TensorPairs, FindsNothingInARightKernel) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<float> out;
    const Outcome outcome = run_pairs(Pair::kRight, seed, &out);
    ASSERT_EQ(outcome.error, cudaSuccess) << all(outcome.findings);
    ASSERT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
    ASSERT_NO_FATAL_FAILURE(expect_product(out, kRows, kPairWidth, kPairSteps));
  }
}

TEST_F(TensorPairs, NameACommitThatArrivesInABlockThatHasEnded) {
  expect_late_arrival([](uint64_t seed) { return run_pairs(Pair::kNotSyncedAtEnd, seed); },
                      line("commits"));
}

class PairDefects : public TensorPairs, public testing::WithParamInterface<Defect<Pair>> {};

TEST_P(PairDefects, AreNamed) {
  const auto run = [](uint64_t seed) { return run_pairs(GetParam().how, seed); };
  expect_named(GetParam(), "simulator_test::multiply_pairs", run, line);
}

constexpr auto kEarlyRead = FindingKind::kReadBeforeWrite, kInUse = FindingKind::kOverwrittenInUse,
               kNever = FindingKind::kNeverWritten, kDeadlock = FindingKind::kDeadlock,
               kOutside = FindingKind::kOutOfBounds, kMisused = FindingKind::kTensorMemory,
               kUnfenced = FindingKind::kMissingProxyFence, kBarrier = FindingKind::kBarrierMisuse;

const Defect<Pair> kDefects[] = {
    {Pair::kStagesToldToOneBlock, "StagesToldToOneBlock", kDeadlock, nullptr},
    {Pair::kAccumulatorsToldToOneBlock, "AccumulatorsToldToOneBlock", kDeadlock, nullptr},
    {Pair::kOtherStageNotWaitedFor,
     "OtherStageNotWaitedFor",
     kEarlyRead,
     "multiplies",
     "stages",
     {kNever, kDeadlock}},
    {Pair::kOtherStageNotTold, "OtherStageNotTold", kDeadlock, nullptr},
    {Pair::kNoProxyFenceInOther, "NoProxyFenceInOther", kUnfenced, "multiplies", "stages"},
    {Pair::kOtherLoadsNotWaitedFor, "OtherLoadsNotWaitedFor", kInUse, "multiplies", "loads"},
    {Pair::kNotSyncedAtFirst, "NotSyncedAtFirst", kMisused, "allocates"},
    {Pair::kAllocatedByOneBlock, "AllocatedByOneBlock", kDeadlock, nullptr},
    {Pair::kAllocatedByTwoWarps, "AllocatedByTwoWarps", kMisused, nullptr},
    {Pair::kOtherColumns, "OtherColumns", kMisused, nullptr},
    {Pair::kAllocatedElsewhere, "AllocatedElsewhere", kMisused, "allocates"},
    {Pair::kFreedByOneBlock, "FreedByOneBlock", kMisused, nullptr},
    {Pair::kCommitOfOneBlock, "CommitOfOneBlock", kMisused, "commits_alone"},
    {Pair::kProductOfOneBlock, "ProductOfOneBlock", kMisused, "multiplies"},
    {Pair::kRowsOfOneBlock, "RowsOfOneBlock", kOutside, "multiplies"},
    {Pair::kHalfTheColumns, "HalfTheColumns", kOutside, "multiplies"},
    {Pair::kOtherHasEnded, "OtherHasEnded", kMisused, nullptr, nullptr, {kBarrier}},
    {Pair::kInClusterOfOne, "InClusterOfOne", kMisused, "allocates"},
};
INSTANTIATE_TEST_SUITE_P(, PairDefects, testing::ValuesIn(kDefects),
                         [](const auto& defect) { return std::string(defect.param.name); });

}  // namespace
}  // namespace tilemoe::simulator_test
