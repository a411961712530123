#include "check.h"

#include <algorithm>

#include "problem.h"
#include "spoil.h"

namespace tilemoe::verify {
namespace {

Precision plain_precision(const Case& test_case) {
  return test_case.dtype == DType::kFloat32 ? Precision::kFloat32 : Precision::kRounded;
}

}  // namespace

bool Report::passed() const {
  return damage.empty() && std::all_of(tensors.begin(), tensors.end(), [](const TensorReport& one) {
           return one.passed && one.missed_spoilings.empty();
         });
}

Report check_case(const Case& test_case, uint64_t seed, Memory& memory) {
  const Inputs inputs = make_inputs(test_case, seed);
  Problem problem(inputs, memory);
  problem.run();
  const std::vector<Pair> pairs = problem.pairs();
  const Computed computed = problem.computed();
  const bool exact = test_case.data == Data::kIntegers;
  const Results truth = evaluate(inputs, pairs, exact ? Precision::kRounded : Precision::kExact);
  const Results plain = exact ? truth : evaluate(inputs, pairs, plain_precision(test_case));
  const Spoiler spoiler(inputs, pairs);

  Report report;
  report.damage = problem.damage();
  for (int i = 0; i < kOutputs; ++i) {
    const auto output = static_cast<Output>(i);
    if (!wanted(test_case, output)) continue;
    const int64_t width = row_width(test_case, output);
    const Figures figures = measure(computed[output], truth[output], width);
    const Limit limit =
        exact ? kEqual : limit_for(test_case.dtype, measure(plain[output], truth[output], width));
    TensorReport tensor{.output = output,
                        .figures = figures,
                        .limit = limit,
                        .passed = within(figures, limit),
                        .missed_spoilings = {}};
    for (Spoiling spoiling : kSpoilings) {
      const auto spoiled = spoiler.spoil(spoiling, output, computed[output]);
      if (spoiled && within(measure(*spoiled, truth[output], width), limit))
        tensor.missed_spoilings.emplace_back(spoiling_name(spoiling));
    }
    report.tensors.push_back(tensor);
  }
  return report;
}

}  // namespace tilemoe::verify
