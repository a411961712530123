// Defects of kernels of tcgen05 by pairs of blocks that the simulator must find and name, and one
// kernel that it must find nothing in.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "pair_kernels.h"
#include "run_kernels.h"
#include "tensor_numbers.h"

namespace tilemoe::simulator_test {
namespace {

std::string line(const char* word) {
  return line_of(word, "pair_kernels.cu");
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
  int found = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run_pairs(Pair::kNotSyncedAtEnd, seed);
    const Finding* const late = find(outcome, FindingKind::kBarrierMisuse);
    if (late == nullptr) continue;
    ++found;
    EXPECT_TRUE(names(late->site, line("commits"))) << describe(*late);
  }
  EXPECT_GT(found, 0);
}

struct Defect {
  Pair how;
  const char* name;
  FindingKind kind;
  const char* site;                        // a word of pair_kernels.cu; null: any
  const char* other = nullptr;             // the same of the other access
  std::vector<FindingKind> or_kinds = {};  // where another order of events shows it so
};

class PairDefects : public TensorPairs, public testing::WithParamInterface<Defect> {};

TEST_P(PairDefects, AreNamed) {
  const Defect& defect = GetParam();
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run_pairs(defect.how, seed);
    const Finding* found = find(outcome, defect.kind);
    const auto is_found = [&](FindingKind kind) { return find(outcome, kind) != nullptr; };
    if (found == nullptr && std::ranges::any_of(defect.or_kinds, is_found)) continue;
    ASSERT_NE(found, nullptr) << "seed " << seed << "\n" << all(outcome.findings);
    EXPECT_EQ(found->kernel, "simulator_test::multiply_pairs");
    if (defect.site != nullptr) {
      EXPECT_TRUE(names(found->site, line(defect.site))) << describe(*found);
    }
    if (defect.other != nullptr) {
      EXPECT_TRUE(names(found->other, line(defect.other))) << describe(*found);
    }
  }
}

constexpr auto kEarlyRead = FindingKind::kReadBeforeWrite, kInUse = FindingKind::kOverwrittenInUse,
               kNever = FindingKind::kNeverWritten, kDeadlock = FindingKind::kDeadlock,
               kOutside = FindingKind::kOutOfBounds, kMisused = FindingKind::kTensorMemory,
               kUnfenced = FindingKind::kMissingProxyFence, kBarrier = FindingKind::kBarrierMisuse;

const Defect kDefects[] = {
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
INSTANTIATE_TEST_SUITE_P(Simulator, PairDefects, testing::ValuesIn(kDefects),
                         [](const auto& defect) { return std::string(defect.param.name); });

}  // namespace
}  // namespace tilemoe::simulator_test
