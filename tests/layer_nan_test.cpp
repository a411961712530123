// A NaN spoils what it must and changes no bit of anything else.
#include <cmath>
#include <limits>
#include <set>

#include "layer_support.h"

namespace tilemoe::verify {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The reach of a NaN: whole tokens of O and dX, pairs of H and ds, experts of weight gradients.
struct Reach {
  std::set<int64_t> tokens, pairs, experts;
};

struct Outcome {
  Computed computed;
  std::vector<Pair> pairs;
};

Outcome run(const Inputs& inputs) {
  Problem problem(inputs);
  problem.run();
  for (const std::string& line : problem.damage()) ADD_FAILURE() << line;
  return {problem.computed(), problem.pairs()};
}

// The part of an output that an element belongs to, and whether that part is within reach.
class Confinement {
 public:
  Confinement(const Case& test_case, const std::vector<Pair>& pairs, Reach reach)
      : case_(test_case), reach_(std::move(reach)) {
    for (const Pair& pair : pairs)
      if (reach_.pairs.count(pair.index)) rows_.insert(pair.row);
  }

  bool reaches(Output output, int64_t element) const {
    const int64_t d = case_.d, n = case_.n, h = case_.h_width();
    const int64_t rank_1 = case_.lora.rank_1(), rank_2 = case_.lora.rank_2();
    switch (output) {
      case kO:
      case kDX: return reach_.tokens.count(element / d) > 0;
      case kH: return rows_.count(element / h) > 0;
      case kDs: return reach_.pairs.count(element) > 0;
      case kDW1: return reach_.experts.count(element / (h * d)) > 0;
      case kDW2: return reach_.experts.count(element / (d * n)) > 0;
      case kDb1: return reach_.experts.count(element / h) > 0;
      case kDb2: return reach_.experts.count(element / d) > 0;
      case kDA1: return reach_.experts.count(element / (rank_1 * d)) > 0;
      case kDB1: return reach_.experts.count(element / (h * rank_1)) > 0;
      case kDA2: return reach_.experts.count(element / (rank_2 * n)) > 0;
      case kDB2: return reach_.experts.count(element / (d * rank_2)) > 0;
      case kOutputs: break;
    }
    return false;
  }

 private:
  Case case_;
  Reach reach_;
  std::set<int64_t> rows_;
};

// Expects equal bits outside the reach. Returns the number of outputs that the NaN reached.
int expect_confined(const Case& test_case, const Outcome& clean, const Outcome& spoiled,
                    Reach reach) {
  const Confinement confinement(test_case, clean.pairs, std::move(reach));
  int arrived = 0;
  for (int i = 0; i < kOutputs; ++i) {
    const auto output = static_cast<Output>(i);
    const std::vector<float>& a = clean.computed[output];
    const std::vector<float>& b = spoiled.computed[output];
    if (a.size() != b.size()) {
      ADD_FAILURE() << output_name(output) << " has another size";
      continue;
    }
    int64_t escaped = -1;
    bool found = false;
    for (size_t element = 0; element < a.size(); ++element) {
      if (std::memcmp(&a[element], &b[element], sizeof(float)) == 0) continue;
      found = found || std::isnan(b[element]);
      if (escaped < 0 && !confinement.reaches(output, static_cast<int64_t>(element)))
        escaped = static_cast<int64_t>(element);
    }
    EXPECT_EQ(escaped, -1) << output_name(output) << " changed outside the NaN's reach";
    arrived += found ? 1 : 0;
  }
  return arrived;
}

// The pairs that a condition selects, with their tokens and experts if requested.
template <class Condition>
Reach reach_of(const std::vector<Pair>& pairs, Condition&& condition) {
  Reach reach;
  for (const Pair& pair : pairs)
    if (condition(pair)) {
      reach.pairs.insert(pair.index);
      reach.tokens.insert(pair.token);
      reach.experts.insert(pair.expert);
    }
  return reach;
}

class LayerNaN : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    inputs_ = make_inputs(GetParam(), 5);
    clean_ = run(inputs_);
    ASSERT_FALSE(clean_.pairs.empty());
    const Pair& middle = clean_.pairs[clean_.pairs.size() / 2];
    token_ = middle.token, expert_ = middle.expert;
  }

  Reach of_token() const {
    return reach_of(clean_.pairs, [&](const Pair& pair) { return pair.token == token_; });
  }
  Reach of_expert() const {
    Reach reach = reach_of(clean_.pairs, [&](const Pair& pair) { return pair.expert == expert_; });
    reach.experts = {expert_};
    return reach;
  }
  void spoil_row(std::vector<float>& rows, int64_t row) const {
    const auto begin = rows.begin() + row * GetParam().d;
    std::fill(begin, begin + GetParam().d, kNaN);
  }
  void expect_confined_to(const Reach& reach, int min_outputs) {
    EXPECT_GE(expect_confined(GetParam(), clean_, run(inputs_), reach), min_outputs);
  }

  Inputs inputs_;
  Outcome clean_;
  int64_t token_ = 0, expert_ = 0;
};

TEST_P(LayerNaN, InATokenOfXStaysWithIt) {
  spoil_row(inputs_.X, token_);
  expect_confined_to(of_token(), 6);  // H, O, dX, ds, dW1, dW2
}

TEST_P(LayerNaN, InATokenOfDOStaysWithIt) {
  spoil_row(inputs_.dO, token_);
  expect_confined_to(of_token(), 4);  // dX, ds, dW1, dW2
}

TEST_P(LayerNaN, InAnExpertsW1StaysWithItsTokens) {
  const auto size = static_cast<std::ptrdiff_t>(GetParam().h_width() * GetParam().d);
  const auto begin = inputs_.weights.W1.begin() + expert_ * size;
  std::fill(begin, begin + size, kNaN);
  expect_confined_to(of_expert(), 6);
}

TEST_P(LayerNaN, InAnExpertsW2StaysWithItsTokens) {
  const auto size = static_cast<std::ptrdiff_t>(GetParam().d * GetParam().n);
  const auto begin = inputs_.weights.W2.begin() + expert_ * size;
  std::fill(begin, begin + size, kNaN);
  expect_confined_to(of_expert(), 4);  // O, dX, ds, dW1
}

// All rows of one expert, as if a whole batch were NaN before it was sent to this rank.
TEST_P(LayerNaN, InAnExpertsTokensStaysWithThem) {
  const Reach rows = of_expert();
  for (int64_t token : rows.tokens) spoil_row(inputs_.X, token);
  const Reach reach =
      reach_of(clean_.pairs, [&](const Pair& pair) { return rows.tokens.count(pair.token) > 0; });
  expect_confined_to(reach, 6);
}

std::vector<Case> nan_cases() {
  return named_cases({"biases", "gpt-oss", "general", "grouped", "dW-added", "every-expert"},
                     {"float32", "bfloat16"});
}

INSTANTIATE_TEST_SUITE_P(, LayerNaN, testing::ValuesIn(nan_cases()), test_name);

// The token gets K distinct valid ids, so other experts than before may meet it.
TEST(LayerNaNLogits, SpoilTheirOwnToken) {
  for (const char* name : {"softmax-over-all/float32", "biases/float32", "sigmoid/bfloat16"}) {
    const Case test_case = named_case(name);
    constexpr int64_t kToken = 17;
    Inputs inputs = make_inputs(test_case, 5);
    const Outcome clean = run(inputs);
    inputs.logits[static_cast<size_t>(kToken * test_case.E + 1)] = kNaN;
    Outcome spoiled = run(inputs);

    const auto own = [](const Pair& pair) { return pair.token == kToken; };
    Reach reach = reach_of(clean.pairs, own);
    const Reach after = reach_of(spoiled.pairs, own);
    EXPECT_EQ(after.pairs.size(), static_cast<size_t>(test_case.K)) << "ids are not all valid";
    EXPECT_EQ(after.experts.size(), static_cast<size_t>(test_case.K)) << "ids are not distinct";
    for (const Pair& pair : spoiled.pairs) EXPECT_EQ(std::isnan(pair.score), own(pair));
    reach.experts.insert(after.experts.begin(), after.experts.end());
    // Rows of H move where the token's experts changed; its pairs are compared by ds.
    spoiled.computed[kH] = clean.computed[kH];
    expect_confined(test_case, clean, spoiled, reach);
    for (int64_t j = 0; j < test_case.d; ++j)
      EXPECT_TRUE(std::isnan(spoiled.computed[kO][static_cast<size_t>(kToken * test_case.d + j)]));
  }
}

}  // namespace
}  // namespace tilemoe::verify
