// Defects that the simulator must find and name, right kernels, in which it must find nothing, and
// exact replay of a seed.
#include "simulator/machine/machine.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "kernels.h"
#include "run_kernels.h"

namespace tilemoe::simulator_test {
namespace {

class Simulator : public testing::Test {
 protected:
  void SetUp() override { Machine::instance().set_device({"simulated", 8, 0, 163 * 1024, 3}); }
  void TearDown() override {
    Machine::instance().take_findings();
    Machine::instance().set_schedule(Schedule::kAny);
  }
};

// ---- of a block

std::vector<int32_t> numbers(size_t count) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), 100);
  return values;
}

Outcome run_mirror(Mirror how, int threads, uint64_t seed, std::vector<int32_t>* result = nullptr) {
  const auto count = static_cast<size_t>(2 * threads);
  const Array<int32_t> in(numbers(count)), out(count);
  const Outcome outcome = run_with(seed, [&] { mirror(how, out.data(), in.data(), threads); });
  if (result != nullptr) *result = out.read();
  return outcome;
}

TEST_F(Simulator, FindsNothingInARightKernel) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<int32_t> out;
    const Outcome outcome = run_mirror(Mirror::kRight, 96, seed, &out);
    ASSERT_EQ(outcome.error, cudaSuccess);
    ASSERT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
    for (size_t i = 0; i < 96; ++i) {
      ASSERT_EQ(out[i], 100 + static_cast<int>(95 - i));
      ASSERT_EQ(out[96 + i], 196 + static_cast<int>(95 - i));
    }
    ASSERT_EQ(run_mirror(Mirror::kWarpBarrier, 32, seed).findings.size(), 0u);
  }
}

TEST_F(Simulator, NamesAMissingSyncthreads) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run_mirror(Mirror::kNoBarrier, 64, seed);
    // Which of the two comes first is left to the seed.
    const Finding* const read = find(outcome, FindingKind::kReadBeforeWrite);
    const Finding* const unwritten = find(outcome, FindingKind::kNeverWritten);
    ASSERT_TRUE(read != nullptr || unwritten != nullptr) << all(outcome.findings);
    const Finding& finding = read != nullptr ? *read : *unwritten;
    EXPECT_TRUE(begins(finding.site, line_of("reads"))) << describe(finding);
    if (read != nullptr) {
      EXPECT_TRUE(begins(finding.other, line_of("writes"))) << describe(finding);
    }
    EXPECT_EQ(finding.kernel, "simulator_test::mirror_words");
    EXPECT_EQ(finding.block, "(0)");
    EXPECT_TRUE(begins(finding.address, "shared 0x")) << finding.address;
    const int thread = std::stoi(finding.thread);
    EXPECT_EQ(std::stoi(finding.address.substr(7), nullptr, 16), 1024 + 4 * (63 - thread));
  }
}

TEST_F(Simulator, NamesAMissingBarrierBeforeSharedMemoryIsUsedAgain) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run_mirror(Mirror::kNoSecondBarrier, 64, seed);
    const Finding* const over = find(outcome, FindingKind::kOverwrittenInUse);
    const Finding* const read = find(outcome, FindingKind::kReadBeforeWrite);
    ASSERT_TRUE(over != nullptr || read != nullptr) << all(outcome.findings);
    if (over != nullptr) {
      EXPECT_TRUE(begins(over->site, line_of("writes"))) << describe(*over);
      EXPECT_TRUE(begins(over->other, line_of("reads"))) << describe(*over);
    }
  }
}

TEST_F(Simulator, AShuffleIsNoBarrier) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run_mirror(Mirror::kOnlyAShuffle, 32, seed);
    const Finding* const read = find(outcome, FindingKind::kReadBeforeWrite);
    ASSERT_NE(read, nullptr) << all(outcome.findings);
    EXPECT_TRUE(begins(read->site, line_of("reads")));
    EXPECT_TRUE(begins(read->other, line_of("writes")));
  }
}

TEST_F(Simulator, NamesAReadOfWhatNobodyWrote) {
  const Outcome outcome = run_mirror(Mirror::kNeverWritten, 64, 1);
  ASSERT_EQ(outcome.findings.size(), 1u) << all(outcome.findings);
  EXPECT_EQ(outcome.findings[0].kind, FindingKind::kNeverWritten);
  EXPECT_TRUE(begins(outcome.findings[0].site, line_of("reads")));
}

TEST_F(Simulator, NamesAnAccessOutOfBounds) {
  const Outcome shared = run_mirror(Mirror::kPastTheEnd, 64, 1);
  EXPECT_EQ(shared.error, cudaErrorLaunchFailure);
  const Finding* const past_end = find(shared, FindingKind::kOutOfBounds);
  ASSERT_NE(past_end, nullptr) << all(shared.findings);
  EXPECT_TRUE(begins(past_end->site, line_of("reads")));
  EXPECT_EQ(past_end->thread, "0");
  EXPECT_EQ(past_end->address, "shared 0x500");

  const Outcome global = run_mirror(Mirror::kPastTheArray, 64, 1);
  EXPECT_EQ(global.error, cudaErrorLaunchFailure);
  const Finding* const past_array = find(global, FindingKind::kOutOfBounds);
  ASSERT_NE(past_array, nullptr) << all(global.findings);
  EXPECT_TRUE(begins(past_array->site, line_of("stores")));
  EXPECT_EQ(past_array->thread, "63");
  EXPECT_NE(past_array->address.find("(512 bytes) + 512"), std::string::npos)
      << past_array->address;
}

// A variable that nobody set would be 0 on a fresh stack, which looks right.
TEST_F(Simulator, NamesAnIndexThatNobodySet) {
  constexpr int kThreads = 64;
  const Array<int32_t> in(numbers(kThreads)), out(kThreads);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const auto run = [&](bool set) {
      return run_with(seed, [&] { look_up(set, out.data(), in.data(), kThreads); });
    };
    EXPECT_TRUE(run(true).findings.empty());
    EXPECT_EQ(out.read(), numbers(kThreads));
    const Outcome outcome = run(false);
    const Finding* const found = find(outcome, FindingKind::kOutOfBounds);
    ASSERT_NE(found, nullptr) << "seed " << seed << "\n" << all(outcome.findings);
    EXPECT_TRUE(begins(found->site, line_of("looks up")));
  }
}

TEST_F(Simulator, ContinuesAfterALaunchThatItEnded) {
  EXPECT_EQ(run_mirror(Mirror::kPastTheEnd, 64, 1).error, cudaErrorLaunchFailure);
  const Outcome outcome = run_mirror(Mirror::kRight, 64, 1);
  EXPECT_EQ(outcome.error, cudaSuccess);
  EXPECT_EQ(outcome.findings.size(), 0u);
}

// ---- of copies and barriers in shared memory

Outcome run_pipeline(Pipeline how, uint64_t seed, bool* right = nullptr) {
  const auto count = static_cast<size_t>(kPipelineSteps * kPipelineThreads * 4);
  const Array<int32_t> in(numbers(count)), out(kPipelineThreads);
  const Outcome outcome = run_with(seed, [&] { pipeline(how, out.data(), in.data()); });
  if (right != nullptr) {
    *right = true;
    const std::vector<int32_t> sums = out.read();
    for (int thread = 0; thread < kPipelineThreads; ++thread) {
      int32_t sum = 0;
      for (int step = 0; step < kPipelineSteps; ++step)
        for (int i = 0; i < 4; ++i) sum += 100 + (step * kPipelineThreads + (thread ^ 1)) * 4 + i;
      *right = *right && sums[static_cast<size_t>(thread)] == sum;
    }
  }
  return outcome;
}

TEST_F(Simulator, FindsNothingInARightPipeline) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    bool right = false;
    const Outcome outcome = run_pipeline(Pipeline::kRight, seed, &right);
    ASSERT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
    ASSERT_TRUE(right);
  }
}

TEST_F(Simulator, NamesAReadThatDoesNotWaitForItsCopy) {
  for (Pipeline how : {Pipeline::kNoFullWait, Pipeline::kWrongParity})
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const Outcome outcome = run_pipeline(how, seed);
      const Finding* const read = find(outcome, FindingKind::kReadBeforeWrite);
      const Finding* const unwritten = find(outcome, FindingKind::kNeverWritten);
      ASSERT_TRUE(read != nullptr || unwritten != nullptr) << all(outcome.findings);
      const Finding& finding = read != nullptr ? *read : *unwritten;
      EXPECT_TRUE(names(finding.site, line_of("uses"))) << describe(finding);
      if (read != nullptr) {
        EXPECT_TRUE(names(read->other, line_of("fills")) || begins(read->other, "copy.h"))
            << describe(*read);
        EXPECT_NE(read->other_thread.find("cp.async of thread"), std::string::npos);
      }
    }
}

TEST_F(Simulator, NamesACopyOverWhatOthersRead) {
  for (Pipeline how : {Pipeline::kNoEmptyWait, Pipeline::kArrivesEarly})
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const Outcome outcome = run_pipeline(how, seed);
      const Finding* const over = find(outcome, FindingKind::kOverwrittenInUse);
      ASSERT_NE(over, nullptr) << all(outcome.findings);
      EXPECT_TRUE(names(over->other, line_of("uses"))) << describe(*over);
      EXPECT_NE(over->site.find("copy.h"), std::string::npos) << describe(*over);
    }
}

TEST_F(Simulator, NamesADeadlock) {
  for (Pipeline how : {Pipeline::kTooFewArrivals, Pipeline::kTooManyExpected}) {
    const Outcome outcome = run_pipeline(how, 1);
    EXPECT_EQ(outcome.error, cudaErrorLaunchFailure);
    const Finding* const deadlock = find(outcome, FindingKind::kDeadlock);
    ASSERT_NE(deadlock, nullptr) << all(outcome.findings);
    EXPECT_TRUE(names(deadlock->site, line_of("awaits_empty"))) << describe(*deadlock);
  }
  const Outcome stuck = run_mirror(Mirror::kNotAllArrive, 64, 1);
  EXPECT_EQ(stuck.error, cudaErrorLaunchFailure);
  EXPECT_NE(find(stuck, FindingKind::kOutOfBounds), nullptr) << all(stuck.findings);
}

TEST_F(Simulator, NamesACopyThatArrivesOnceTooOften) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run_pipeline(Pipeline::kOneMoreArrives, seed);
    EXPECT_EQ(outcome.error, cudaErrorLaunchFailure);
    EXPECT_NE(find(outcome, FindingKind::kBarrierMisuse), nullptr) << all(outcome.findings);
  }
}

TEST_F(Simulator, NamesABarrierThatIsUsedBeforeAllKnowOfIt) {
  int found = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run_pipeline(Pipeline::kNoInitBarrier, seed);
    if (find(outcome, FindingKind::kBarrierMisuse) != nullptr ||
        find(outcome, FindingKind::kReadBeforeWrite) != nullptr)
      ++found;
  }
  EXPECT_EQ(found, kSeeds);
}

// ---- of several blocks

Outcome run_last_block(LastBlock how, uint64_t seed, int32_t* sum = nullptr) {
  constexpr int kBlocks = 7;
  const Array<int32_t> partial(kBlocks * 32), out(32);
  const Array<uint32_t> counter(1);
  const Outcome outcome =
      run_with(seed, [&] { last_block(how, partial.data(), out.data(), counter.data(), kBlocks); });
  if (sum != nullptr) *sum = out.read()[31];
  return outcome;
}

TEST_F(Simulator, KnowsWhatFencesAndAtomicsOrderBetweenBlocks) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    int32_t sum = 0;
    const Outcome outcome = run_last_block(LastBlock::kRight, seed, &sum);
    ASSERT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
    ASSERT_EQ(sum, 21);
    const Outcome no_fence = run_last_block(LastBlock::kNoFence, seed);
    const Finding* const read = find(no_fence, FindingKind::kReadBeforeWrite);
    ASSERT_NE(read, nullptr) << all(no_fence.findings);
    EXPECT_TRUE(begins(read->site, line_of("collects")));
    EXPECT_TRUE(begins(read->other, line_of("part")));
    const Outcome no_atomic = run_last_block(LastBlock::kNoAtomic, seed);
    const Finding* const count = find(no_atomic, FindingKind::kReadBeforeWrite);
    ASSERT_NE(count, nullptr) << all(no_atomic.findings);
    EXPECT_TRUE(begins(count->site, line_of("counts"))) << describe(*count);
  }
}

TEST_F(Simulator, NamesTwoBlocksThatWriteOneAddress) {
  const Array<int32_t> out(1);
  const Outcome outcome = run_with(3, [&] { all_write_one(out.data(), 5); });
  const Finding* const write = find(outcome, FindingKind::kWriteOverWrite);
  ASSERT_NE(write, nullptr) << all(outcome.findings);
  EXPECT_TRUE(begins(write->site, line_of("same")));
  EXPECT_TRUE(begins(write->other, line_of("same")));
  EXPECT_NE(write->other_thread.find("block ("), std::string::npos);
  EXPECT_NE(write->other_thread.find("block " + write->block + ","), 0u);
}

TEST_F(Simulator, NamesALaunchThatReadsBeforeTheOneBeforeIsDone) {
  Machine::instance().set_device({"simulated", 9, 0, 227 * 1024, 3});
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Array<int32_t> data(64), out(64);
    const Outcome waits =
        run_with(seed, [&] { overlapping_launches(true, data.data(), out.data()); });
    ASSERT_EQ(waits.findings.size(), 0u) << all(waits.findings);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(out.read()[static_cast<size_t>(i)], i + 1);
    const Array<int32_t> data_again(64), out_again(64);
    const Outcome early =
        run_with(seed, [&] { overlapping_launches(false, data_again.data(), out_again.data()); });
    ASSERT_GE(early.findings.size(), 1u);
    const Finding& finding = early.findings[0];
    const std::string sites = finding.site + " " + finding.other + " ";
    EXPECT_NE(sites.find(line_of("early") + " "), std::string::npos) << describe(finding);
    EXPECT_NE(sites.find(line_of("numbers") + " "), std::string::npos) << describe(finding);
  }
}

// ---- of a warp's matrices

uint16_t bfloat16_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

TEST_F(Simulator, MultipliesWhatLdmatrixLoads) {
  std::vector<uint16_t> a(256), b(128);
  const auto value_of = [](size_t i) { return static_cast<float>(i * 7 % 13) - 6; };
  for (size_t i = 0; i < a.size(); ++i) a[i] = bfloat16_of(value_of(i));
  for (size_t i = 0; i < b.size(); ++i) b[i] = bfloat16_of(value_of(i + 5));
  const Array<uint16_t> A(a), B(b);
  const Array<float> D(128);
  const Outcome outcome = run_with(1, [&] { multiply(D.data(), A.data(), B.data()); });
  EXPECT_EQ(outcome.findings.size(), 0u) << all(outcome.findings);
  const std::vector<float> d = D.read();
  for (size_t row = 0; row < 16; ++row)
    for (size_t column = 0; column < 8; ++column) {
      float sum = 0;
      for (size_t k = 0; k < 16; ++k) sum += value_of(row * 16 + k) * value_of(column * 16 + k + 5);
      EXPECT_EQ(d[row * 8 + column], sum) << row << ", " << column;
    }
}

// ---- of the seed and the schedule

TEST_F(Simulator, ReplaysASeed) {
  std::set<uint64_t> traces;
  constexpr Schedule kSchedules[] = {Schedule::kAny, Schedule::kByRank, Schedule::kInStep};
  for (const Schedule schedule : kSchedules) {
    Machine::instance().set_schedule(schedule);
    for (uint64_t seed = 0; seed < 5; ++seed) {
      uint64_t first = 0;
      for (int turn = 0; turn < 2; ++turn) {
        Machine::instance().trace().clear();
        run_pipeline(Pipeline::kRight, seed);
        run_last_block(LastBlock::kRight, seed);
        const uint64_t digest = Machine::instance().trace().digest();
        if (turn == 0) first = digest;
        EXPECT_EQ(digest, first);
      }
      traces.insert(first);
    }
  }
  EXPECT_EQ(traces.size(), 15u) << "seeds and schedules make a difference";
}

// Threads in step behave as if the barrier were there; another schedule shows that it is missing.
TEST_F(Simulator, KeepsThreadsInStep) {
  const auto no_barrier = [](uint64_t seed, bool& right) {
    std::vector<int32_t> out, expected;
    const Outcome outcome = run_mirror(Mirror::kNoBarrier, 64, seed, &out);
    run_mirror(Mirror::kRight, 64, seed, &expected);
    right = out == expected;
    return outcome;
  };
  const auto no_wait = [](uint64_t seed, bool& right) {
    return run_pipeline(Pipeline::kNoFullWait, seed, &right);
  };
  for (const Tally in_step :
       {tally(Schedule::kInStep, no_barrier), tally(Schedule::kInStep, no_wait)}) {
    EXPECT_EQ(in_step.right, kSeeds);
    EXPECT_EQ(in_step.found, kSeeds);
  }
  EXPECT_LT(tally(Schedule::kAny, no_barrier).right, kSeeds);
  EXPECT_LT(tally(Schedule::kAny, no_wait).right, kSeeds);
}

TEST_F(Simulator, FindsNothingInRightKernelsInAnySchedule) {
  for (const Schedule schedule : {Schedule::kByRank, Schedule::kInStep}) {
    const Tally pipelines = tally(schedule, [](uint64_t seed, bool& right) {
      return run_pipeline(Pipeline::kRight, seed, &right);
    });
    EXPECT_EQ(pipelines.right, kSeeds);
    EXPECT_EQ(pipelines.found, 0);
    const Tally blocks = tally(schedule, [](uint64_t seed, bool& right) {
      int32_t sum = 0;
      const Outcome outcome = run_last_block(LastBlock::kRight, seed, &sum);
      right = sum == 21;
      return outcome;
    });
    EXPECT_EQ(blocks.right, kSeeds);
    EXPECT_EQ(blocks.found, 0);
  }
}

}  // namespace
}  // namespace tilemoe::simulator_test
