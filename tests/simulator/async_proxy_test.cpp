// Defects around TMA, wgmma and clusters that the simulator must find and name, and right kernels,
// in which it must find nothing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "async_kernels.h"
#include "named_defects.h"
#include "run_kernels.h"

namespace tilemoe::simulator_test {
namespace {

constexpr size_t kRows = kGemmRows;

std::string line(const std::string& word) {
  return line_of(word, "async_kernels.cu");
}

uint16_t bfloat16_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}
std::vector<uint16_t> small_numbers(size_t count, size_t step) {
  std::vector<uint16_t> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = bfloat16_of(static_cast<float>(i * step % 5) - 2);
  return numbers;
}
float value_of(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &word, 4);
  return value;
}

class AsyncProxy : public testing::Test {
 protected:
  void SetUp() override { Machine::instance().set_device({"simulated", 9, 0, 227 * 1024, 4}); }
  void TearDown() override { Machine::instance().take_findings(); }

  // Whether D, of `blocks` blocks, is right.
  template <class Run>
  Outcome run(uint64_t seed, size_t blocks, bool& right, const Run& multiply) {
    // Sums of at most 320 products of at most 4, which bfloat16 represents here.
    const std::vector<uint16_t> a = small_numbers(kGemmSteps * kRows * 64, 7),
                                b = small_numbers(64 * 64, 3);
    const Array<uint16_t> A(a), B(b);
    const Array<uint16_t> D(blocks * kRows * 64);
    const Outcome outcome = run_with(seed, [&] { multiply(D.data(), A.data(), B.data()); });
    const std::vector<uint16_t> d = D.read();
    any_nan_ = std::any_of(d.begin(), d.end(), [](uint16_t x) { return std::isnan(value_of(x)); });
    right = true;
    for (size_t i = 0; i < d.size(); ++i) {
      float sum = 0;
      const size_t row = i / 64 % kRows, column = i % 64;
      for (size_t step = 0; step < kGemmSteps; ++step)
        for (size_t k = 0; k < 64; ++k)
          sum += value_of(a[(step * kRows + row) * 64 + k]) * value_of(b[column * 64 + k]);
      right = right && std::abs(value_of(d[i]) - sum) <= std::abs(sum) / 256;
    }
    return outcome;
  }
  Outcome run(Gemm how, uint64_t seed, bool& right) {
    return run(seed, 1, right, [&](uint16_t* D, const uint16_t* A, const uint16_t* B) {
      multiply_steps(how, D, A, B);
    });
  }
  Outcome run(Cluster how, uint64_t seed, bool& right) {
    return run(seed, 2, right, [&](uint16_t* D, const uint16_t* A, const uint16_t* B) {
      multiply_in_cluster(how, D, A, B);
    });
  }

  bool any_nan_ = false;  // in the last D
};

TEST_F(AsyncProxy, FindsNothingInRightKernels) {
  const auto expect_right = [&](auto how, uint64_t seed) {
    bool right = false;
    const Outcome outcome = run(how, seed, right);
    ASSERT_EQ(outcome.error, cudaSuccess);
    ASSERT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
    ASSERT_TRUE(right) << "seed " << seed;
  };
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    expect_right(Gemm::kRight, seed);
    expect_right(Cluster::kRight, seed);
  }
}

class AsyncDefects : public AsyncProxy, public testing::WithParamInterface<Defect<Gemm>> {};

TEST_P(AsyncDefects, AreNamed) {
  bool right = false;
  const auto run_seed = [&](uint64_t seed) { return run(GetParam().how, seed, right); };
  expect_named(GetParam(), "simulator_test::multiply_tiles", run_seed, line);
}

constexpr auto kInUse = FindingKind::kOverwrittenInUse, kUnfenced = FindingKind::kMissingProxyFence,
               kBarrier = FindingKind::kBarrierMisuse;

const Defect<Gemm> kDefects[] = {
    {Gemm::kNoInitFence, "NoInitFence", kUnfenced, "loads"},
    {Gemm::kNoFullWait,
     "NoFullWait",
     FindingKind::kReadBeforeWrite,
     "multiplies",
     "loads",
     {FindingKind::kNeverWritten}},
    {Gemm::kTooManyBytes, "TooManyBytes", FindingKind::kDeadlock, nullptr},
    // Or the barrier has more arrivals than it waits for, after which nothing continues.
    {Gemm::kNoEmptyWait, "NoEmptyWait", kInUse, "loads", nullptr, {kBarrier}},
    {Gemm::kNoWgmmaWait, "NoWgmmaWait", kInUse, "loads", "multiplies"},
    {Gemm::kNoOperandFence, "NoOperandFence", kUnfenced, "multiplies", "writes_B"},
    {Gemm::kNoWgmmaFence, "NoWgmmaFence", kBarrier, "multiplies"},
    {Gemm::kNoStoreFence, "NoStoreFence", kUnfenced, "stores", "writes_D"},
    {Gemm::kNoStoreWait, "NoStoreWait", kInUse, nullptr},
    {Gemm::kSlotWrittenEarly, "SlotWrittenEarly", kInUse, "writes_D", "stores"},
};
INSTANTIATE_TEST_SUITE_P(All, AsyncDefects, testing::ValuesIn(kDefects),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_F(AsyncProxy, FindsAStageWithTooFewBytes) {
  const Tally tallied = tally(Schedule::kAny, [&](uint64_t seed, bool& right) {
    return run(Gemm::kTooFewBytes, seed, right);
  });
  EXPECT_EQ(tallied.found, kSeeds);
}

TEST_F(AsyncProxy, NamesAStoreOfWhatIsNotThereYet) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    bool right = false;
    const Outcome outcome = run(Gemm::kNoStoreBarrier, seed, right);
    ASSERT_GE(outcome.findings.size(), 1u);
    for (const Finding& one : outcome.findings) {
      const std::string sites = one.site + " " + one.other + " ";
      EXPECT_NE(sites.find(line("stores") + " "), std::string::npos) << describe(one);
    }
  }
}

TEST_F(AsyncProxy, NamesTheThreadWhoseStoreStillReads) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    bool right = false;
    const Outcome outcome = run(Gemm::kNoStoreWait, seed, right);
    const Finding* const ends = find(outcome, FindingKind::kOverwrittenInUse);
    ASSERT_NE(ends, nullptr) << all(outcome.findings);
    EXPECT_EQ(ends->thread, "0");
  }
}

// MMAs that are done when they are committed, and copies that land at once, hide defects in the
// output; the findings are the same.
TEST_F(AsyncProxy, IsDoneAtOnceInOrderedSchedules) {
  for (const Schedule schedule : {Schedule::kByRank, Schedule::kInStep}) {
    const auto with = [&](auto how) {
      return tally(schedule, [&](uint64_t seed, bool& right) { return run(how, seed, right); });
    };
    for (const Gemm how : {Gemm::kNoWgmmaWait, Gemm::kSlotWrittenEarly, Gemm::kNoStoreWait}) {
      const Tally defective = with(how);
      EXPECT_EQ(defective.right, kSeeds) << static_cast<int>(how);
      EXPECT_EQ(defective.found, kSeeds) << static_cast<int>(how);
    }
    EXPECT_EQ(with(Gemm::kReadsEarly).right, kSeeds);
    for (const Tally right : {with(Gemm::kRight), with(Cluster::kRight)}) {
      EXPECT_EQ(right.right, kSeeds);
      EXPECT_EQ(right.found, 0);
    }
  }
  EXPECT_LT(tally(Schedule::kAny,
                  [&](uint64_t seed, bool& right) { return run(Gemm::kNoWgmmaWait, seed, right); })
                .right,
            kSeeds);
}

// The producer's warp is in a separate group: if that group runs first, everything is loaded in
// time.
TEST_F(AsyncProxy, RanksWarpsByTheSeed) {
  const Tally no_wait = tally(Schedule::kByRank, [&](uint64_t seed, bool& right) {
    return run(Gemm::kNoFullWait, seed, right);
  });
  EXPECT_EQ(no_wait.found, kSeeds);
  EXPECT_GT(no_wait.right, 0);
  EXPECT_LT(no_wait.right, kSeeds);
}

TEST_F(AsyncProxy, ShowsAccumulatorsThatAreReadEarlyAsNaN) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    bool right = true;
    run(Gemm::kReadsEarly, seed, right);
    EXPECT_FALSE(right);
    EXPECT_TRUE(any_nan_);
  }
}

TEST_F(AsyncProxy, ComputesWhatADescriptorSays) {
  bool right = true;
  run(Gemm::kWrongStride, 1, right);
  EXPECT_FALSE(right);
}

TEST_F(AsyncProxy, NamesWhatAClustersBlocksDoNotWaitFor) {
  for (const Cluster how : {Cluster::kNoFirstSync, Cluster::kNoPeerWait, Cluster::kNoLastSync}) {
    const Tally tallied =
        tally(Schedule::kAny, [&](uint64_t seed, bool& right) { return run(how, seed, right); });
    // Whether a block ends too early is left to the seed.
    EXPECT_GE(tallied.found, how == Cluster::kNoLastSync ? 1 : kSeeds) << static_cast<int>(how);
  }
}

}  // namespace
}  // namespace tilemoe::simulator_test
