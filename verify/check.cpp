#include "check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "digest.h"
#include "large.h"
#include "spoil.h"

namespace tilemoe::verify {
namespace {

// The errors of plain evaluations in the case's own precision.
class PlainErrors {
 public:
  PlainErrors(const Inputs& inputs, const std::vector<Pair>& pairs) {
    const Case& test_case = inputs.test_case;
    // In a 16-bit layer float32's own error counts for outputs with no 16-bit intermediate.
    if (test_case.dtype == DType::kFloat32 || test_case.dW_dtype() == DType::kFloat32)
      for (SumOrder order : {SumOrder::kAscending, SumOrder::kDescending})
        float32_.push_back(evaluate(inputs, pairs, Precision::kFloat32, order));
    if (test_case.dtype != DType::kFloat32 || test_case.recipe != Recipe::kBf16)
      rounded_ = evaluate(inputs, pairs, Precision::kRounded);
  }

  // `off` measures the error of an array of values.
  template <class Off>
  Limit limit(Output output, const Off& off) const {
    Figures of_float32, of_rounding;
    for (const Results& results : float32_) of_float32 = worse(of_float32, off(results[output]));
    if (rounded_) of_rounding = off((*rounded_)[output]);
    return limit_for(of_float32, of_rounding);
  }

 private:
  std::vector<Results> float32_;  // a few elements may be nearly exact in one order by luck
  std::optional<Results> rounded_;
};

// Whether an integer case is exact: no sum exceeds what float32 represents exactly, even if all
// terms had one sign, and nothing overflows the case's dtype. Values are multiples of 1/2.
bool is_exact(Inputs inputs, std::vector<Pair> pairs, const Results& truth) {
  constexpr double kLargest = 1 << 23;
  ExpertValues& weights = inputs.weights;
  ExpertValues& before = inputs.dW_before;
  for (auto* values : {&inputs.X,
                       &inputs.dO,
                       &inputs.O_addend,
                       &inputs.dX_addend,
                       &weights.W1,
                       &weights.W2,
                       &weights.b1,
                       &weights.b2,
                       &before.W1,
                       &before.W2,
                       &before.b1,
                       &before.b2,
                       &inputs.lora.A1,
                       &inputs.lora.B1,
                       &inputs.lora.A2,
                       &inputs.lora.B2,
                       &inputs.dlora_before.A1,
                       &inputs.dlora_before.B1,
                       &inputs.dlora_before.A2,
                       &inputs.dlora_before.B2})
    for (float& value : *values) value = std::fabs(value);
  for (Pair& pair : pairs) pair.score = std::fabs(pair.score);
  Adapters& lora = inputs.test_case.lora;
  lora.scale_1 = std::fabs(lora.scale_1), lora.scale_2 = std::fabs(lora.scale_2);
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
  std::optional<PlainErrors> plain;
  if (!exact) plain.emplace(inputs, pairs);
  const Spoiler spoiler(inputs, pairs, truth);

  Report report;
  if (exact && !is_exact(inputs, pairs, truth))
    report.damage.emplace_back("the case is not an integer case: its sums are not exact");
  for (int i = 0; i < kOutputs; ++i) {
    const auto output = static_cast<Output>(i);
    if (!wanted(test_case, output)) continue;
    if (passes == Passes::kForward && !of_forward(output)) continue;
    const int64_t width = row_width(test_case, output);
    const auto off = [&](const auto& values) {
      return measure(values, truth[output], width, kSmallRow);
    };
    const Figures figures = off(computed[output]);
    const Limit limit = exact ? kEqual : plain->limit(output, off);
    TensorReport tensor{.output = output,
                        .figures = figures,
                        .limit = limit,
                        .passed = within(figures, limit),
                        .bits = digest_of(computed[output]),
                        .spoilings_tried = 0,
                        .impossible_spoilings = {},
                        .missed_spoilings = {}};
    for (Spoiling spoiling : kSpoilings) {
      if (!spoiler.concerns(spoiling, output)) continue;
      if (!spoiler.applies(spoiling, output)) {
        tensor.impossible_spoilings.emplace_back(spoiling_name(spoiling));
        continue;
      }
      ++tensor.spoilings_tried;
      const auto spoiled = spoiler.spoil(spoiling, output, computed[output]);
      if (!spoiled || within(off(*spoiled), limit))
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

std::vector<std::string> outputs_changed_by(const std::function<void()>& change,
                                            const Case& test_case, uint64_t seed, Memory& memory,
                                            Passes passes) {
  Problem problem(make_inputs(test_case, seed), memory);
  problem.run(passes);
  const std::vector<uint64_t> before = problem.fingerprints();
  change();
  problem.run(passes);
  return problem.outputs_other_than(before);
}

}  // namespace tilemoe::verify
