// H of the fp8 recipe saved as codes: its bytes, what a call overwrites, and what is refused.
#include <functional>
#include <string>

#include "layer_support.h"

namespace tilemoe::verify {
namespace {

Experts experts() {
  return {.device = Device::kCpu,
          .dtype = DType::kBFloat16,
          .d = 512,
          .n = 320,
          .E = 8,
          .gate_layout = GateLayout::kSplit,
          .format_1 = Format::kFp8,
          .format_2 = Format::kFp8,
          .recipe = Recipe::kFp8,
          .format_H = Format::kFp8};
}
Experts with_H_in_16_bits() {
  Experts of = experts();
  of.format_H = Format::kNone;
  return of;
}

constexpr int64_t kTokens = 64, kRows = 128;  // of top 2
RoutingSpec spec() {
  return RoutingSpec::top_k(Device::kCpu, kTokens, 8, 2);
}

// ------------------------------------------------- memory

TEST(Fp8H, SavesAboutHalfOfTheBytes) {
  const tilemoe_saved_size codes = experts().saved_bytes(spec());
  const tilemoe_saved_size values = with_H_in_16_bits().saved_bytes(spec());
  EXPECT_EQ(values.H, size_t{kRows * 640 * 2});
  EXPECT_EQ(codes.H_scales, size_t{kRows * 3 * 2 * 4});
  EXPECT_EQ(codes.H, size_t{kRows * 640} + codes.H_scales);
  EXPECT_EQ(values.H_scales, 0u);
  EXPECT_EQ(values.total - codes.total, values.H - codes.H);
}

// Over the codes lie A', and then the codes of dH. Other modes keep both in the workspace.
TEST(Fp8H, OverwritesTheCodesInModeOverH) {
  const size_t A_scaled = size_t{kRows * 320 * 2}, dH_codes = size_t{kRows * (640 + 24)};
  const auto saved = [](BackwardMode mode, uint32_t gradients) {
    return with_H_in_16_bits().workspace_bytes(spec(), mode, gradients) -
           experts().workspace_bytes(spec(), mode, gradients);
  };
  EXPECT_EQ(saved(BackwardMode::kOverH, TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_S), A_scaled);
  EXPECT_EQ(saved(BackwardMode::kOverH, TILEMOE_GRADIENT_X), dH_codes);
  EXPECT_EQ(saved(BackwardMode::kRest, TILEMOE_GRADIENT_X), 0u);
  for (const BackwardMode mode : {BackwardMode::kWhole, BackwardMode::kFirst})
    EXPECT_EQ(saved(mode, TILEMOE_GRADIENT_X), 0u);
}

Case grouped_case(bool over_H) {
  Case one{.d = 208, .n = 336, .E = 4, .dtype = DType::kBFloat16};
  one.name = "grouped";
  one.gate_layout = GateLayout::kSplit;
  one.routing = RoutingKind::kGrouped, one.counts = {3, 0, 1, 5};
  one.format_1 = one.format_2 = one.format_H = Format::kFp8, one.recipe = Recipe::kFp8;
  one.dH_over_H = over_H;
  return one;
}

// All modes, and a pass in two calls, have the same bits; WHOLE leaves the codes as they are.
TEST(Fp8H, HasTheSameBitsInEveryMode) {
  Inputs inputs = make_inputs(grouped_case(false), 3);
  Problem whole(inputs);
  whole.run();
  EXPECT_EQ(whole.damage(), std::vector<std::string>());
  const Computed expected = whole.computed();
  whole.backward();
  EXPECT_EQ(first_difference(whole.computed()[kH], expected[kH]), -1);
  for (const bool over_H : {false, true})
    for (const bool in_two_calls : {false, true}) {
      inputs.test_case.dH_over_H = over_H, inputs.test_case.in_two_calls = in_two_calls;
      Problem other(inputs);
      other.run();
      EXPECT_EQ(other.damage(), std::vector<std::string>());
      const Computed got = other.computed();
      for (size_t output = 0; output < kOutputs; ++output)
        EXPECT_EQ(first_difference(got[output], expected[output]), -1)
            << output_name(static_cast<Output>(output)) << over_H << in_two_calls;
    }
}

// O does not depend on what is saved.
TEST(Fp8H, LeavesOAsItIs) {
  Inputs inputs = make_inputs(grouped_case(false), 4);
  Problem codes(inputs);
  codes.run(Passes::kForward);
  inputs.test_case.format_H = Format::kNone;
  Problem values(inputs);
  values.run(Passes::kForward);
  EXPECT_EQ(first_difference(codes.computed()[kO], values.computed()[kO]), -1);
  EXPECT_NE(first_difference(codes.computed()[kH], values.computed()[kH]), -1);
}

// ------------------------------------------------- errors

void expect_error(const std::function<void()>& call, Status status, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Fp8H, RefusesWhatItLacks) {
  const auto refused = [](const char* text, const std::function<void(Experts&)>& change,
                          Status status = Status::kUnsupported) {
    Experts of = experts();
    change(of);
    expect_error([&] { of.saved_bytes(spec()); }, status, text);
  };
  refused("recipe is fp8_forward", [](Experts& of) { of.recipe = Recipe::kFp8Forward; });
  refused("recipe is bf16", [](Experts& of) {
    of.recipe = Recipe::kBf16, of.format_1 = of.format_2 = Format::kNone;
  });
  refused("format_H is mxfp4", [](Experts& of) { of.format_H = Format::kMxfp4; });
  refused(
      "format_H is 9", [](Experts& of) { of.format_H = static_cast<Format>(9); },
      Status::kInvalidArgument);
}

TEST(Fp8H, ChecksTheMemoryOfACall) {
  const auto refused = [](const char* text, bool over_H, const std::function<void(Saved&)>& change,
                          bool forward = false) {
    Problem problem(make_inputs(grouped_case(over_H), 5));
    problem.run(Passes::kForward);
    const ForwardArgs forward_args = problem.forward_args();
    const BackwardArgs backward_args = problem.backward_args();
    if (forward) problem.saved().H = {};
    change(problem.saved());
    expect_error(
        [&] {
          forward ? problem.experts().forward(forward_args)
                  : problem.experts().backward(backward_args);
        },
        Status::kInvalidArgument, text);
  };
  const auto no_codes = [](Saved& saved) { saved.H_codes = nullptr; };
  const auto no_H = [](Saved& saved) { saved.H = {}; };
  refused("saved.H_codes or H_scales is null", false, no_codes);
  refused("saved.H_codes or H_scales is null", false, no_codes, true);
  refused("saved.H_codes or H_scales is null", false, [](Saved& of) { of.H_scales = nullptr; });
  refused("saved.H_codes is not aligned to 16 bytes", false, [](Saved& of) { ++of.H_codes; });
  refused("saved.H_scales is not aligned to 8 bytes", false, [](Saved& of) { ++of.H_scales; });
  refused("saved.H", true, no_H);
  alignas(16) static uint16_t memory[9 * 672];
  const auto some_H = [](Saved& saved) { saved.H = Tensor(memory, DType::kBFloat16, {9, 672}); };
  refused("saved.H is", false, some_H);
  refused("saved.H is", false, some_H, true);
  refused("shares memory with", true,
          [](Saved& of) { of.H_codes = static_cast<uint8_t*>(of.H.data); });
}

TEST(Fp8H, IsAbsentWithoutItsFormat) {
  Inputs inputs = make_inputs(grouped_case(false), 6);
  inputs.test_case.format_H = Format::kNone;
  Problem problem(inputs);
  problem.run(Passes::kForward);
  const BackwardArgs args = problem.backward_args();
  alignas(16) static uint8_t codes[16];
  problem.saved().H_codes = codes;
  expect_error([&] { problem.experts().backward(args); }, Status::kInvalidArgument,
               "experts.format_H is none");
}

}  // namespace
}  // namespace tilemoe::verify
