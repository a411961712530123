#include "simulator/run_case.h"

#include <cstdlib>
#include <ctime>
#include <optional>
#include <stdexcept>

#include "simulator/machine/machine.h"
#include "tilemoe/tilemoe.h"
#include "verify/check.h"
#include "verify/digest.h"

namespace tilemoe::simulator {
namespace {

uint64_t mixed(const std::vector<uint64_t>& fingerprints) {
  uint64_t bits = 0xcbf29ce484222325;
  for (const uint64_t one : fingerprints) bits = (bits ^ one) * 0x100000001b3, bits ^= bits >> 29;
  return bits;
}

std::string describe(const verify::Report& report) {
  std::string text;
  for (const verify::TensorReport& tensor : report.tensors)
    if (!tensor.passed)
      text += std::string("\n  ") + verify::output_name(tensor.output) + ": " +
              verify::describe(tensor.figures, tensor.limit);
  return text;
}

void compare_with_gpu(const Job& job, const verify::Inputs& inputs,
                      const verify::Computed& computed, SeedOutcome& outcome) {
  if (!job.expected || !job.expected->has(job.test_case.name)) return;
  const ExpectedDigests::Comparison compared = job.expected->compare(
      job.test_case, job.data_seed, verify::digests_of(inputs, computed, verify::Passes::kAll));
  outcome.equal_to_gpu = compared.equal;
  for (const std::string& line : compared.differences) outcome.wrong += "\n  " + line;
}

}  // namespace

struct CaseRun::State {
  Job job;
  verify::Inputs inputs;
  std::optional<uint64_t> right_bits;
};

CaseRun::CaseRun(const Job& job)
    : state_(new State{job, verify::make_inputs(job.test_case, job.data_seed), {}}) {
  Machine::instance().set_device(job.setting->device);
  Machine::instance().set_schedule(job.schedule);
  if (tilemoe_set_cuda_arch(job.setting->arch) != TILEMOE_SUCCESS)
    throw std::runtime_error(tilemoe_last_error());
  setenv("TILEMOE_2CTA", job.setting->two_ctas ? "1" : "0", 1);
}
CaseRun::~CaseRun() = default;

SeedOutcome CaseRun::run(uint64_t seed) {
  Machine& machine = Machine::instance();
  machine.take_findings();
  machine.set_seed(seed);
  machine.trace().clear();
  const std::clock_t begin = std::clock();
  SeedOutcome outcome{};
  outcome.seed = seed;
  try {
    // A new problem for each seed: in memory that an earlier seed wrote, a read before the first
    // write would not be found.
    verify::Problem problem(state_->inputs, verify::memory_of(Device::kCuda));
    problem.run();
    outcome.bits = mixed(problem.fingerprints());
    for (const std::string& line : problem.damage()) outcome.wrong += "\n  " + line;
    if (!state_->right_bits) {
      const verify::Computed computed = problem.computed();
      outcome.wrong +=
          describe(verify::judge(state_->inputs, problem.pairs(), computed, verify::Passes::kAll));
      compare_with_gpu(state_->job, state_->inputs, computed, outcome);
      if (outcome.wrong.empty()) state_->right_bits = outcome.bits;
    } else if (outcome.bits != *state_->right_bits) {
      outcome.wrong += "\n  other bits than with an earlier seed";
    }
  } catch (const std::exception& error) {
    outcome.wrong += std::string("\n  ") + error.what();
  }
  outcome.findings = machine.take_findings();
  outcome.trace = machine.trace().digest();
  outcome.seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  return outcome;
}

}  // namespace tilemoe::simulator
