// Each planted defect (simulator/defects.inc) in its case: no finding while the defect is switched
// off, and its finding, or wrong outputs, while it is on.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulator/router_cases.h"
#include "simulator/run_case.h"
#include "verify/registry.h"

namespace tilemoe::simulator {
namespace {

struct Defect {
  int number;
  std::string name, test_case, device;
  uint64_t seed;
  std::optional<FindingKind> kind;  // none: an output is wrong
};

std::string all(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) text += describe(finding) + "\n";
  return text;
}

void PrintTo(const Defect& defect, std::ostream* out) {
  *out << defect.name;
}

// The defects of the archs that are simulated.
std::vector<Defect> defects() {
  using enum FindingKind;
  constexpr std::optional<FindingKind> kWrongValues;
  std::vector<Defect> all;
  int number = 0;
#define DEFECT(name, file, text, replacement, test_case, device, seed, kind) \
  all.push_back({++number, #name, test_case, device, seed, kind});
#include "simulator/defects.inc"
#undef DEFECT
  // fp8_projections_test and fp8_gradients_test have the cases of these.
  std::erase_if(all, [](const Defect& one) {
    return one.test_case == "fp8" || one.test_case == "fp8-gradients";
  });
#ifdef TILEMOE_WITHOUT_SM100
  std::erase_if(all, [](const Defect& one) { return one.device.starts_with("sm100"); });
#endif
  return all;
}

// A process has one value of TILEMOE_2CTA.
class PlantedDefect : public testing::TestWithParam<Defect> {
 protected:
  void SetUp() override {
    const Setting& setting = setting_of(GetParam().device);
    for (const verify::Case& one : verify::verification_cases())
      if (one.name == GetParam().test_case)
        layer_.emplace(Job{&setting, one, 1, GetParam().seed, 1});
    for (const RouterCase& one : router_cases())
      if (one.name == GetParam().test_case) router_ = &one;
    ASSERT_TRUE(layer_ || router_) << "no case has this name";
    Machine::instance().set_device(setting.device);
  }
  void TearDown() override { Machine::instance().plant(0); }

  struct Outcome {
    std::vector<Finding> findings;
    std::string wrong;
  };
  Outcome run(int defect) {
    Machine::instance().plant(defect);
    Machine::instance().set_seed(GetParam().seed);
    if (layer_) {
      const SeedOutcome outcome = layer_->run(GetParam().seed);
      return {outcome.findings, outcome.wrong};
    }
    std::string wrong;
    try {
      wrong = compare_devices(*router_, 1);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    return {Machine::instance().take_findings(), wrong};
  }

 private:
  std::optional<CaseRun> layer_;
  const RouterCase* router_ = nullptr;
};

TEST_P(PlantedDefect, IsFound) {
  const Outcome without = run(0), with = run(GetParam().number);
  EXPECT_TRUE(without.findings.empty()) << all(without.findings);
  EXPECT_EQ(without.wrong, "");
  if (!GetParam().kind) {
    EXPECT_TRUE(with.findings.empty()) << all(with.findings);
    EXPECT_NE(with.wrong, "");
    return;
  }
  EXPECT_TRUE(std::ranges::any_of(with.findings, [](const Finding& one) {
    return one.kind == *GetParam().kind;
  })) << all(with.findings);
}

INSTANTIATE_TEST_SUITE_P(, PlantedDefect, testing::ValuesIn(defects()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace tilemoe::simulator
