// A kernel with one defect, the finding that the simulator must report, and the test of it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "run_kernels.h"

namespace tilemoe::simulator_test {

template <class How>
struct Defect {
  How how;
  const char* name;
  FindingKind kind;
  const char* site;                        // a word of the kernel's source; null: any
  const char* other = nullptr;             // the same, for the other access
  std::vector<FindingKind> or_kinds = {};  // alternatives, if events happen in another order
};

template <class How>
void PrintTo(const Defect<How>& defect, std::ostream* out) {
  *out << defect.name;
}

// Expects run(seed) to find the defect with every seed, in this kernel and at these lines;
// line("word") is the line that a word marks.
template <class How, class Run, class Line>
void expect_named(const Defect<How>& defect, const char* kernel, const Run& run, const Line& line) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run(seed);
    const Finding* const found = find(outcome, defect.kind);
    const auto is_found = [&](FindingKind kind) {
      const Finding* const other = find(outcome, kind);
      // A read is at the same line, whether it comes too early or nobody has written yet.
      return other != nullptr && (kind != FindingKind::kNeverWritten || defect.site == nullptr ||
                                  names(other->site, line(defect.site)));
    };
    if (found == nullptr && std::ranges::any_of(defect.or_kinds, is_found)) continue;
    ASSERT_NE(found, nullptr) << "seed " << seed << "\n" << all(outcome.findings);
    EXPECT_EQ(found->kernel, kernel);
    if (defect.site != nullptr) {
      EXPECT_TRUE(names(found->site, line(defect.site))) << describe(*found);
    }
    if (defect.other != nullptr) {
      EXPECT_TRUE(names(found->other, line(defect.other))) << describe(*found);
    }
  }
}

// Expects run(seed) to find, with at least one seed, an arrival at a barrier of a block that has
// ended; the seed decides whether the block ends first.
template <class Run>
void expect_late_arrival(const Run& run, const std::string& site) {
  int found = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Outcome outcome = run(seed);
    const Finding* const late = find(outcome, FindingKind::kBarrierMisuse);
    if (late == nullptr) continue;
    ++found;
    EXPECT_TRUE(names(late->site, site)) << describe(*late);
  }
  EXPECT_GT(found, 0);
}

}  // namespace tilemoe::simulator_test
