// Codes of dH that the activation gradient writes: when a backward of the layer has them, the bits
// compared with the step that quantises dH, and the memory.
#include <algorithm>
#include <string>
#include <vector>

#include "layer/layer.h"
#include "layer/workspace.h"
#include "lora_problem.h"
#include "step_names.h"
#include "tilemoe/error.h"
#include "verify/problem.h"
#include "verify/registry.h"

namespace tilemoe::test {
namespace {

// ------------------------------------------------- steps and bits

// A layer whose codes of dH fit: 2 (n + n / 32) <= n + d. The last block of scales has 48 columns.
verify::Case fitting_case() {
  verify::Case one = *verify::find_case("fp8-recipe/bfloat16");
  one.d = 208, one.n = 176, one.gate_layout = GateLayout::kSplit;
  one.activation = Activation::kSwiGLU, one.clamp = one.alpha = one.up_shift = 0;
  one.dH_over_H = true, one.in_two_calls = one.in_parts = one.padded = one.addend = false;
  one.biases = true;
  return one;
}

struct Outcome {
  std::vector<uint64_t> bits;
  bool quantises = false;  // by a step
};

// Forward and backward, in one call if the case has one. Workspaces have the sizes of the queries.
Outcome run(const verify::Case& one) {
  const verify::Inputs inputs = verify::make_inputs(one, 1);
  verify::Problem problem(inputs, verify::cuda_memory());
  problem.poison();
  problem.route();
  problem.forward();
  StepNames names;
  if (one.in_two_calls || one.in_parts) {
    problem.backward();
    names.names.emplace_back(step::quantize_dH);
  } else {
    const BackwardArgs args = problem.backward_args();
    const tilemoe_experts experts = problem.experts().to_c();
    const tilemoe_weights weights = args.weights.to_c(), gradients = args.dweights.to_c();
    const tilemoe_lora dlora = args.dlora.to_c();
    const tilemoe_backward_args c_args = args.to_c(weights, gradients, dlora);
    backward(&experts, &c_args, &names);
  }
  expect_clean_run();
  EXPECT_EQ(problem.damage(), std::vector<std::string>());
  return {problem.fingerprints(), names.have(step::quantize_dH)};
}

TEST(Fp8DHCodes, HaveTheBitsOfTheQuantiser) {
  simulate("sm90");
  for (const bool float_scales : {false, true})
    for (const bool dH_over_H : {true, false}) {
      verify::Case one = fitting_case();
      one.dH_over_H = dH_over_H, one.float_scales = float_scales;
      const Outcome of_kernel = run(one);
      EXPECT_FALSE(of_kernel.quantises);
      one.in_two_calls = true;  // dX is absent in the first
      EXPECT_EQ(of_kernel.bits, run(one).bits);
      one.in_two_calls = false, one.in_parts = true;
      EXPECT_EQ(of_kernel.bits, run(one).bits);
    }
}
TEST(Fp8DHCodes, AreOfEveryRouting) {
  simulate("sm90");
  verify::Case grouped = *verify::find_case("fp8-recipe-grouped/bfloat16");
  grouped.activation = Activation::kSwiGLU;
  const Outcome of_kernel = run(grouped);
  EXPECT_FALSE(of_kernel.quantises);
  grouped.in_two_calls = true;
  EXPECT_EQ(of_kernel.bits, run(grouped).bits);
  verify::Case no_token = *verify::find_case("fp8-recipe-no-token/bfloat16");
  no_token.activation = Activation::kSwiGLU;
  EXPECT_FALSE(run(no_token).quantises);
}

// Each lacks one condition; the workspace of the query suffices for all.
TEST(Fp8DHCodes, AreLeftToTheQuantiser) {
  simulate("sm90");
  const auto quantises = [](const char* why, void (*change)(verify::Case&)) {
    SCOPED_TRACE(why);
    verify::Case one = fitting_case();
    change(one);
    EXPECT_TRUE(run(one).quantises);
  };
  quantises("dX is the memory of the addend", [](verify::Case& c) { c.addend = true; });
  quantises("dX has gaps between its rows", [](verify::Case& c) { c.padded = true; });
  quantises("no kernel of this dtype", [](verify::Case& c) { c.dtype = DType::kFloat16; });
  quantises("no kernel of this activation",
            [](verify::Case& c) { c.activation = Activation::kReGLU; });
  quantises("A' lies over the codes of H", [](verify::Case& c) { c.format_H = Format::kFp8; });
  quantises("too wide to lie next to A'", [](verify::Case& c) {
    c.n = 208, c.T = 230, c.E = c.K = 1;  // few weights
  });
}

// ------------------------------------------------- memory

BackwardPlan plan_of(const verify::Case& one, bool dX_is_free) {
  const tilemoe_experts experts = one.experts(Device::kCuda).to_c();
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCuda, one.T, one.E, one.K);
  tilemoe_routing_spec complete = spec;
  complete.capacity = complete.pairs = one.T * one.K;
  return {backend_for(TILEMOE_CUDA),
          experts,
          complete,
          {.mode = TILEMOE_BACKWARD_OVER_H,
           .dH_over_H = true,
           .dX_is_free = dX_is_free,
           .gradients = BackwardWork::kAll & ~uint32_t{TILEMOE_GRADIENT_LORA_2}}};
}

// Those of HaveTheBitsOfTheQuantiser lie so.
TEST(Fp8DHCodes, LieBeforeAScaledAndLeaveDXToOthers) {
  simulate("sm90");
  const BackwardPlan of_kernel = plan_of(fitting_case(), true);
  EXPECT_TRUE(of_kernel.writes_dH_codes && of_kernel.dW2_scratch_in_dX);
  EXPECT_GT(of_kernel.dW2_scratch.size, 0u);
  EXPECT_LT(of_kernel.dH_codes.scales, of_kernel.A_scaled);
  EXPECT_LT(of_kernel.dH_codes.scales, of_kernel.dX_rows);
  const BackwardPlan of_step = plan_of(fitting_case(), false);
  EXPECT_FALSE(of_step.writes_dH_codes || of_step.dW2_scratch_in_dX);
  EXPECT_GT(of_step.dO_codes.codes, of_step.A_scaled);
  EXPECT_GT(of_step.dH_codes.codes, of_step.dX_rows);
}

// The memory of a step of training above weights, X and dO, on an H100, as PyTorch runs it: dW1 is
// allocated when the workspace of dX is free.
size_t peak_of(const verify::Case& layer, Recipe recipe, Format format_H = Format::kNone,
               DType dtype = DType::kBFloat16) {
  Experts experts = layer.experts(Device::kCuda);
  experts.dtype = dtype, experts.recipe = recipe, experts.format_H = format_H;
  experts.gate_layout = GateLayout::kSplit;
  if (recipe != Recipe::kBf16) experts.format_1 = experts.format_2 = Format::kFp8;
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCuda, layer.T, layer.E, layer.K);
  const tilemoe_experts c_experts = experts.to_c();
  const auto workspace = [&](tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients) {
    tilemoe_workspace_query query{};
    query.struct_size = sizeof query, query.experts = &c_experts, query.routing = &spec;
    query.pass = pass, query.mode = mode, query.gradients = gradients;
    query.cuda_sms = 132, query.cuda_arch = "sm90";
    return workspace_bytes(&query);
  };
  const auto bytes = [](int64_t a, int64_t b, int64_t c = 1) {
    return static_cast<size_t>(a * b * c) * sizeof(uint16_t);
  };
  const uint32_t of_W1 = TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP;
  const size_t X = bytes(layer.T, layer.d), dW2 = bytes(layer.E, layer.d, layer.n), dW1 = 2 * dW2;
  const size_t H = experts.saved_bytes(spec).H;
  const size_t dH = bytes(layer.T * layer.K, 2, layer.n),
               new_dH = format_H == Format::kNone ? 0 : dH;
  const size_t forward = workspace(TILEMOE_PASS_FORWARD, TILEMOE_BACKWARD_WHOLE, 0);
  const size_t first = workspace(TILEMOE_PASS_BACKWARD, TILEMOE_BACKWARD_OVER_H,
                                 TILEMOE_GRADIENT_X | TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_W2);
  const size_t rest = workspace(TILEMOE_PASS_BACKWARD, TILEMOE_BACKWARD_REST, of_W1);
  return std::max({X + H + forward, X + H + new_dH + dW2 + first, X + dH + dW2 + dW1 + rest});
}

TEST(Fp8DHCodes, LeaveThePeakOfLayers) {
  simulate("sm90");
  int layers = 0;
  for (const verify::Case& layer : verify::bench_cases()) {
    if (layer.dtype != DType::kBFloat16 || layer.d % 16 != 0) continue;
    ++layers;
    const auto ratio = [&](Recipe recipe, Format format_H = Format::kNone,
                           DType dtype = DType::kBFloat16) {
      return static_cast<double>(peak_of(layer, recipe, format_H, dtype)) /
             static_cast<double>(peak_of(layer, Recipe::kBf16));
    };
    EXPECT_LE(ratio(Recipe::kFp8), 1.05) << layer.name;
    // The kernels of float16 write no codes of dH.
    EXPECT_EQ(ratio(Recipe::kFp8, Format::kFp8), ratio(Recipe::kFp8, Format::kFp8, DType::kFloat16))
        << layer.name;
  }
  EXPECT_GE(layers, 20);
}

}  // namespace
}  // namespace tilemoe::test
