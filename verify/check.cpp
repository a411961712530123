#include "check.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "large.h"
#include "spoil.h"

namespace tilemoe::verify {
namespace {

Precision plain_precision(const Case& test_case) {
  return test_case.dtype == DType::kFloat32 ? Precision::kFloat32 : Precision::kRounded;
}

bool of_forward(Output output) {
  return output == kH || output == kO;
}

// Whether an integer case keeps what it promises: no sum passes what float32 holds exactly, even if
// all terms had one sign, and nothing overflows the case's dtype. Values are multiples of 1/2.
bool is_exact(Inputs inputs, std::vector<Pair> pairs, const Results& truth) {
  constexpr double kLargest = 1 << 23;
  ExpertValues& weights = inputs.weights;
  ExpertValues& before = inputs.dW_before;
  for (auto* values :
       {&inputs.X, &inputs.dO, &inputs.O_addend, &inputs.dX_addend, &weights.W1, &weights.W2,
        &weights.b1, &weights.b2, &before.W1, &before.W2, &before.b1, &before.b2})
    for (float& value : *values) value = std::fabs(value);
  for (Pair& pair : pairs) pair.score = std::fabs(pair.score);
  const auto below = [](double limit) {
    return [=](const std::vector<double>& values) {
      return std::all_of(values.begin(), values.end(),
                         [=](double value) { return std::fabs(value) < limit; });
    };
  };
  const Results bound = evaluate(inputs, pairs, Precision::kExact);
  return std::all_of(bound.begin(), bound.end(), below(kLargest)) &&
         std::all_of(truth.begin(), truth.end(), below(std::numeric_limits<double>::infinity()));
}

// Without a pair everything is zero; one token's tensors have a row that none can be swapped with.
bool may_be_impossible(Spoiling spoiling, const Case& test_case, const std::vector<Pair>& pairs) {
  return pairs.empty() || (spoiling == Spoiling::kTwoRowsSwapped && test_case.outer_rows() == 1);
}

}  // namespace

bool Report::passed() const {
  return damage.empty() && std::all_of(tensors.begin(), tensors.end(), [](const TensorReport& one) {
           return one.passed && one.missed_spoilings.empty();
         });
}

Report judge(const Inputs& inputs, const std::vector<Pair>& pairs, const Computed& computed,
             Passes passes) {
  const Case& test_case = inputs.test_case;
  const bool exact = test_case.data == Data::kIntegers;
  const Results truth = evaluate(inputs, pairs, exact ? Precision::kRounded : Precision::kExact);
  const Results plain = exact ? truth : evaluate(inputs, pairs, plain_precision(test_case));
  const Spoiler spoiler(inputs, pairs);

  Report report;
  if (exact && !is_exact(inputs, pairs, truth))
    report.damage.emplace_back("the case is no integer case: its sums are not exact");
  for (int i = 0; i < kOutputs; ++i) {
    const auto output = static_cast<Output>(i);
    if (!wanted(test_case, output)) continue;
    if (passes == Passes::kForward && !of_forward(output)) continue;
    const int64_t width = row_width(test_case, output);
    const auto off = [&](const auto& values) {
      return measure(values, truth[output], width, small_row(test_case.dtype));
    };
    const Figures figures = off(computed[output]);
    const Limit limit =
        exact ? kEqual : limit_for(test_case.dtype, off(plain[output]), truth[output].size());
    TensorReport tensor{.output = output,
                        .figures = figures,
                        .limit = limit,
                        .passed = within(figures, limit),
                        .spoilings_tried = 0,
                        .impossible_spoilings = {},
                        .missed_spoilings = {}};
    for (Spoiling spoiling : kSpoilings) {
      const auto spoiled = spoiler.spoil(spoiling, output, computed[output]);
      if (!spoiled) {
        // By the case alone: what was computed must not decide whether it is put to the test.
        if (may_be_impossible(spoiling, test_case, pairs))
          tensor.impossible_spoilings.emplace_back(spoiling_name(spoiling));
        else
          tensor.missed_spoilings.push_back(std::string(spoiling_name(spoiling)) + " (not tried)");
        continue;
      }
      ++tensor.spoilings_tried;
      if (within(off(*spoiled), limit))
        tensor.missed_spoilings.emplace_back(spoiling_name(spoiling));
    }
    report.tensors.push_back(tensor);
  }
  return report;
}

Report check_case(const Case& test_case, uint64_t seed, Memory& memory, Passes passes) {
  if (test_case.too_large) return check_large(test_case, seed, memory, passes);
  const Inputs inputs = make_inputs(test_case, seed);
  Problem problem(inputs, memory);
  problem.run(passes);
  Report report = judge(inputs, problem.pairs(), problem.computed(), passes);
  const std::vector<std::string> damage = problem.damage();
  report.damage.insert(report.damage.begin(), damage.begin(), damage.end());
  return report;
}

int64_t find_other_bits(const Case& test_case, uint64_t seed, int64_t repeats, Memory& memory,
                        Passes passes) {
  Problem problem(make_inputs(test_case, seed), memory);
  const std::unique_ptr<OtherWork> other_work = memory.do_other_work();
  std::vector<uint64_t> first;
  for (int64_t run = 0; run < repeats; ++run) {
    problem.run(passes);
    const std::vector<uint64_t> outputs = problem.fingerprints();
    if (run == 0) first = outputs;
    if (outputs != first) return run;
  }
  return -1;
}

}  // namespace tilemoe::verify
