// `tilemoe check --arch A --against B` with a simulated GPU in place of one.
#include <gtest/gtest.h>

#include "arch_run.h"
#include "device.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"
#include "verify/registry.h"

namespace tilemoe::app {
namespace {

ArchRun run(const std::string& setting_name) {
  const simulator::Setting& setting = simulator::setting_of(setting_name);
  return run_arch(
      {.arch = setting.arch,
       .cases = {*verify::find_case("smallest/bfloat16"), *verify::find_case("biases/float16")},
       .select =
           [&](const std::string& arch) {
             simulator::Machine::instance().set_device(setting.device);
             return why_no_arch(arch);
           },
       .memory = verify::cuda_memory});
}

TEST(ComparedArchs, HaveTheSameBitsOnOneGpu) {
  const ArchRun sm90 = run("sm90"), sm80 = run("sm80-on-90");
  for (const ArchRun* one : {&sm90, &sm80}) {
    EXPECT_EQ(one->skipped, "");
    EXPECT_EQ(one->failures, std::vector<std::string>());
    EXPECT_EQ(one->cases, 2u);
    EXPECT_NE(one->device.find("a simulated H100"), std::string::npos) << one->device;
  }
  EXPECT_GE(tensors_compared(sm90, sm80), 30u);
  EXPECT_EQ(differences(sm90, sm80), std::vector<std::string>());
}

TEST(ComparedArchs, DifferIfTheTensorCoresDo) {
  const ArchRun sm90 = run("sm90"), a100 = run("sm80");
  EXPECT_EQ(a100.failures, std::vector<std::string>());
  const std::vector<std::string> lines = differences(sm90, a100);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].rfind("biases/float16: ", 0), 0u) << lines[0];
}

TEST(ComparedArchs, ThatTheGpuDoesNotRunAreSkipped) {
  const simulator::Setting& a100 = simulator::setting_of("sm80");
  const ArchRun run = run_arch({.arch = "sm90",
                                .cases = {*verify::find_case("smallest/bfloat16")},
                                .select =
                                    [&](const std::string& arch) {
                                      simulator::Machine::instance().set_device(a100.device);
                                      return why_no_arch(arch);
                                    },
                                .memory = verify::cuda_memory});
  EXPECT_NE(run.skipped.find("the arch sm90, set by TILEMOE_ARCH, requires 9.0"), std::string::npos)
      << run.skipped;
}

}  // namespace
}  // namespace tilemoe::app
