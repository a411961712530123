// The modes of forward and backward, compared with each other.
#include <algorithm>
#include <cmath>

#include "layer_support.h"

namespace tilemoe::verify {
namespace {

Computed run(const Case& test_case) {
  Problem problem(make_inputs(test_case, 3));
  problem.run();
  EXPECT_TRUE(problem.damage().empty());
  return problem.computed();
}

// Poisoned and routed.
struct Routed : Problem {
  explicit Routed(const Case& test_case) : Problem(make_inputs(test_case, 3)) {
    poison();
    route();
  }
};

class LayerModes : public testing::TestWithParam<Case> {};

TEST_P(LayerModes, InferenceGivesTheBitsOfTraining) {
  Routed problem(GetParam());
  problem.forward();
  const std::vector<float> O = problem.computed()[kO];
  problem.poison();
  problem.route();
  problem.infer();
  EXPECT_EQ(first_difference(problem.computed()[kO], O), -1);
  EXPECT_TRUE(problem.damage().empty());
  EXPECT_TRUE(problem.H_is_poisoned()) << "inference wrote H";
}

TEST_P(LayerModes, DHOverHGivesTheBitsOfTheOtherPath) {
  Case apart = GetParam(), over = GetParam();
  apart.dH_over_H = false, over.dH_over_H = true;
  expect_same_bits(run(apart), run(over));
}

// GEMMs of other shapes may be summed in another order, and then rounded differently.
TEST_P(LayerModes, ColumnBlocksGiveWhatTheWholeGives) {
  Case blocks = GetParam();
  blocks.column_blocks = 3;
  const Computed whole = run(GetParam()), cut = run(blocks);
  const double max_error = GetParam().dtype == DType::kFloat32 ? 1e-6 : 1e-3;
  for (Output output : {kO, kDX}) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < whole[output].size(); ++i) {
      error += std::pow(cut[output][i] - whole[output][i], 2);
      norm += std::pow(whole[output][i], 2);
    }
    EXPECT_TRUE(std::sqrt(error) <= max_error * std::sqrt(norm)) << output_name(output);
  }
}

TEST_P(LayerModes, DHOverHInTwoCallsGivesOnesBits) {
  Case over = GetParam();
  over.dH_over_H = true;
  const Computed one = run(over);
  Routed problem(over);
  problem.forward();
  BackwardArgs first = problem.backward_args(), second = first;
  first.dweights.W1 = first.dweights.W1_up = first.dweights.b1 = first.dweights.b1_up = {};
  first.dlora.A1 = first.dlora.B1 = first.dlora.A1_up = first.dlora.B1_up = {};
  second.mode = BackwardMode::kRest;
  second.dO = second.addend = {};
  second.dX = second.ds = second.dweights.W2 = second.dweights.b2 = {};
  second.dlora.A2 = second.dlora.B2 = {};
  second.workspace_bytes = problem.experts().workspace_bytes(
      problem.spec(), BackwardMode::kRest,
      TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP | TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP |
          TILEMOE_GRADIENT_LORA_1);
  EXPECT_LT(second.workspace_bytes, first.workspace_bytes);
  problem.experts().backward(first);
  problem.experts().backward(second);
  Computed two = problem.computed();
  two[kH] = one[kH];  // dH by now
  expect_same_bits(one, two);

  second.dweights.W2 = first.dweights.W2;  // which needs the absent dO
  EXPECT_THROW(problem.experts().backward(second), Error);
}

TEST_P(LayerModes, TwoCallsGiveTheBitsOfOne) {
  expect_the_bits_of_one_call(GetParam(), &Case::in_two_calls, host_memory());
}

TEST_P(LayerModes, PartsGiveTheBitsOfOne) {
  if (GetParam().routing == RoutingKind::kGrouped) return;  // it has no tokens
  expect_the_bits_of_one_call(GetParam(), &Case::in_parts, host_memory());
}

TEST(LayerModesOfGemms, GemmsApartGiveTheBitsOfTheIdentity) {
  for (const char* name : {"mm", "mm-transposed", "mm-column-blocks", "mm-spare-capacity",
                           "mm-over-capacity", "mm-general", "mm-grouped"})
    for (const char* dtype : {"/float32", "/bfloat16", "/float16"}) {
      Case one = named_case((std::string(name) + dtype).c_str());
      ASSERT_TRUE(one.gemms_apart);
      one.gemms_apart = false;
      expect_the_bits_of_one_call(one, &Case::gemms_apart, host_memory());
    }
}

TEST_P(LayerModes, APartWritesItsOwnTokensAlone) {
  if (GetParam().routing == RoutingKind::kGrouped) return;
  const std::vector<float> all = run(GetParam())[kO];
  Routed problem(GetParam());
  const Parts parts = problem.parts();
  const tilemoe_part part = parts.in_order({2})[0];
  ForwardArgs args = problem.forward_args();
  args.part = &part;
  problem.experts().forward(args);
  const Computed computed = problem.computed();
  const std::vector<float>& O = computed[kO];
  const int64_t d = problem.experts().d;
  ASSERT_GT(part.tokens, 0);
  int64_t rows = 0;
  for (int64_t e = 0; e < problem.spec().E; ++e) rows += part.ends[e] - part.begins[e];
  const auto written = std::count_if(computed[kH].begin(), computed[kH].end(),
                                     [](float value) { return !std::isnan(value); });
  EXPECT_EQ(written, rows * GetParam().h_width());
  for (size_t i = 0; i < O.size(); ++i) {
    const int64_t t = static_cast<int64_t>(i) / d - part.first_token;
    const bool own = t >= 0 && t < part.tokens;
    ASSERT_TRUE(own ? std::memcmp(&O[i], &all[i], sizeof(float)) == 0 : std::isnan(O[i])) << i;
  }
}

// A call of mode REST leaves dH as it was.
TEST_P(LayerModes, DHServesManyCalls) {
  const Computed all = run(GetParam());
  Routed problem(GetParam());
  problem.forward();
  auto [first, rest] = problem.backward_calls();
  problem.experts().backward(first);
  BackwardArgs dX = rest, dW1 = rest;
  dX.dweights = {};
  dW1.dX = {}, dW1.addend = {};
  for (const BackwardArgs& call : {dX, dW1, rest, dW1, dX}) problem.experts().backward(call);
  expect_same_bits(all, problem.computed());
  EXPECT_TRUE(problem.damage().empty());

  problem.forward();  // dH no longer belongs to the last forward
  EXPECT_THROW(problem.experts().backward(rest), Error);
}

TEST_P(LayerModes, ConsumedStateIsRefused) {
  Case over = GetParam();
  over.dH_over_H = true;
  Problem problem(make_inputs(over, 3));
  problem.run();
  const Computed before = problem.computed();
  for (const BackwardMode mode :
       {BackwardMode::kWhole, BackwardMode::kOverH, BackwardMode::kFirst}) {
    BackwardArgs args = problem.backward_args();
    args.mode = mode;
    try {
      problem.experts().backward(args);
      ADD_FAILURE() << "a second backward ran on consumed state";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("consumed"), std::string::npos) << error.what();
    }
  }
  expect_same_bits(before, problem.computed());
  problem.forward();
  problem.backward();  // forward made the state whole again
  expect_same_bits(before, problem.computed());
}

// Expects the call to be refused with a message that contains `text`, and the outputs unchanged.
void expect_refused(Problem& problem, const BackwardArgs& args, const char* text) {
  const std::vector<uint64_t> before = problem.fingerprints();
  try {
    problem.experts().backward(args);
    ADD_FAILURE() << "ran, expected an error that says: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
  EXPECT_EQ(problem.outputs_other_than(before), std::vector<std::string>());
}

// Once a part's dH lies over H, any call that would read it as H is refused.
TEST_P(LayerModes, AnInterruptedPassEndsRight) {
  if (GetParam().routing == RoutingKind::kGrouped) return;
  Case over = GetParam();
  over.dH_over_H = over.in_parts = true;
  const Computed right = run(over);
  for (size_t done = 1; done < 4; ++done) {
    SCOPED_TRACE(std::to_string(done) + " of 4 parts");
    Routed problem(over);
    problem.forward();
    const Parts parts = problem.parts();
    std::vector<tilemoe_part> order = parts.in_order({3, 0, 2, 1});  // 1 has no token
    std::swap(order[2], order[3]), std::swap(order[2].last, order[3].last);
    BackwardArgs args = problem.backward_args();
    for (size_t p = 0; p < done; ++p) {
      args.part = &order[p];
      problem.experts().backward(args);
    }
    for (const BackwardMode mode :
         {BackwardMode::kWhole, BackwardMode::kOverH, BackwardMode::kFirst, BackwardMode::kRest}) {
      BackwardArgs whole = args;
      whole.part = nullptr, whole.mode = mode;
      if (mode == BackwardMode::kRest)
        whole.dO = {},
        whole.ds = whole.dweights.W2 = whole.dweights.b2 = whole.dlora.A2 = whole.dlora.B2 = {};
      whole.workspace_bytes = problem.experts().workspace_bytes(problem.spec(), mode);
      expect_refused(problem, whole, "incomplete backward");
    }
    BackwardArgs other_mode = args;
    other_mode.mode = BackwardMode::kWhole;
    other_mode.part = &order[3];
    expect_refused(problem, other_mode, "incomplete backward");
    tilemoe_part early = order[1];
    early.tokens = 0, early.last = 1;
    args.part = &early;
    expect_refused(problem, args, "part is the last");

    // The rest of the pass continues as if nothing had been refused.
    for (size_t p = done; p < order.size(); ++p) {
      args.part = &order[p];
      problem.experts().backward(args);
    }
    Computed computed = problem.computed();
    computed[kH] = right[kH];
    expect_same_bits(right, computed);
  }
}

// A pass that was interrupted and restarted has tokens twice.
TEST_P(LayerModes, APassThatRestartsIsRefused) {
  if (GetParam().routing == RoutingKind::kGrouped) return;
  Case over = GetParam();
  over.dH_over_H = over.in_parts = true;
  const Computed right = run(over);
  Routed problem(over);
  problem.forward();
  const Parts parts = problem.parts();
  const std::vector<tilemoe_part> order = parts.in_order({3, 0, 1, 2});
  BackwardArgs args = problem.backward_args();
  args.part = &order[1];
  problem.experts().backward(args);
  for (size_t p = 0; p + 1 < order.size(); ++p) {
    args.part = &order[p];
    problem.experts().backward(args);
  }
  args.part = &order.back();
  expect_refused(problem, args, "was repeated");

  problem.poison();
  problem.route();
  problem.forward();  // H again
  problem.backward();
  Computed computed = problem.computed();
  computed[kH] = right[kH];
  expect_same_bits(right, computed);
}

TEST_P(LayerModes, BackwardCanBeRepeated) {
  Problem problem(make_inputs(GetParam(), 3));
  problem.run();
  const Computed first = problem.computed();
  problem.backward();
  expect_same_bits(first, problem.computed());
}

// Each gradient alone has the bits that it has together with all others.
TEST_P(LayerModes, AnAbsentGradientChangesNoOther) {
  const Computed all = run(GetParam());
  const Gradients none{.dX = false,
                       .dW1 = false,
                       .dW2 = false,
                       .db1 = false,
                       .db2 = false,
                       .ds = false,
                       .lora_1 = false,
                       .lora_2 = false};
  for (bool Gradients::*gradient :
       {&Gradients::dX, &Gradients::dW1, &Gradients::dW2, &Gradients::db1, &Gradients::db2,
        &Gradients::ds, &Gradients::lora_1, &Gradients::lora_2}) {
    Case one = GetParam();
    one.wanted = none, one.wanted.*gradient = true;
    const Computed alone = run(one);
    for (size_t output = 0; output < kOutputs; ++output) {
      if (alone[output].empty()) continue;
      EXPECT_EQ(first_difference(alone[output], all[output]), -1)
          << output_name(static_cast<Output>(output));
    }
  }
}

std::vector<Case> mode_cases() {
  return named_cases(
      {"biases", "gpt-oss", "general", "grouped", "zipf", "silu", "lora", "lora-split"},
      {"float32", "bfloat16"});
}

INSTANTIATE_TEST_SUITE_P(, LayerModes, testing::ValuesIn(mode_cases()), test_name);

// The gate's or the up half's gradient may be wanted alone.
TEST(LayerSplit, AFrozenHalfChangesNotTheOther) {
  const Case split = named_case("split/float32");
  Problem problem(make_inputs(split, 3));
  problem.run();
  const Computed both = problem.computed();
  const size_t half = both[kDW1].size() / static_cast<size_t>(2 * split.E);
  for (bool keeps_up : {false, true}) {
    problem.poison();
    problem.route();
    problem.forward();
    BackwardArgs args = problem.backward_args();
    (keeps_up ? args.dweights.W1 : args.dweights.W1_up) = {};
    problem.experts().backward(args);
    const std::vector<float> dW1 = problem.computed()[kDW1];
    for (size_t i = 0; i < dW1.size(); ++i) {
      const bool is_up = i / half % 2 == 1;
      const bool same = std::memcmp(&dW1[i], &both[kDW1][i], sizeof(float)) == 0;
      ASSERT_TRUE(is_up == keeps_up ? same : std::isnan(dW1[i])) << "at " << i;
    }
  }
}

// accumulate: the previous values are added in float32 and rounded once; for experts with no row,
// one row and many rows; also if the gradients' rows alternate.
TEST(LayerAccumulation, AddsToThePreviousValues) {
  const Case routed = integer_form(named_case("biases/float32"));
  const Case interleaved = integer_form(named_case("interleaved/float32"));
  Case grouped = routed;
  grouped.routing = RoutingKind::kGrouped;
  grouped.T = grouped.K = 0;
  grouped.counts = {1, 0, 40, 1, 2, 300};
  grouped.E = std::ssize(grouped.counts);
  for (const Case& plain : {routed, interleaved, grouped}) {
    SCOPED_TRACE(plain.name);
    Case added = plain;
    added.accumulate_dW = true;
    const Inputs inputs = make_inputs(added, 3);
    Problem problem(inputs);
    problem.run();
    const Computed sums = problem.computed(), gradients = run(plain);
    const auto expect_sum = [&](Output output, const std::vector<float>& before) {
      EXPECT_FALSE(before.empty());
      for (size_t i = 0; i < before.size(); ++i)
        ASSERT_EQ(sums[output][i], before[i] + gradients[output][i])
            << output_name(output) << " at " << i;
    };
    expect_sum(kDW1, inputs.dW_before.W1), expect_sum(kDW2, inputs.dW_before.W2);
    expect_sum(kDb1, inputs.dW_before.b1), expect_sum(kDb2, inputs.dW_before.b2);
  }
}

TEST(LayerCapacity, CountsWhatDoesNotFitAndBadIds) {
  for (Case bounded :
       named_cases({"over-capacity", "general-over-capacity", "bad-ids", "general"}, {"float32"})) {
    const Inputs inputs = make_inputs(bounded, 3);
    Problem problem(inputs);
    problem.run();
    EXPECT_TRUE(problem.damage().empty());
    bounded.capacity = 0;
    Problem unbounded(make_inputs(bounded, 3));
    unbounded.run();
    const auto fits = static_cast<int64_t>(problem.pairs().size());
    const auto valid = static_cast<int64_t>(unbounded.pairs().size());
    const int32_t* counters = problem.routing().counters;
    EXPECT_EQ(counters[TILEMOE_COUNT_OVER_CAPACITY], valid - fits) << bounded.name;
    EXPECT_EQ(counters[TILEMOE_COUNT_BAD_IDS], inputs.pairs() - valid) << bounded.name;
    EXPECT_EQ(problem.routing().offsets[bounded.E], fits) << bounded.name;
  }
}

}  // namespace
}  // namespace tilemoe::verify
