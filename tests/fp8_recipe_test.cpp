// The fp8 recipe on the CPU: its bits against arithmetic of its own, what they may depend on, its
// memory, and what it refuses.
#include <cstring>
#include <functional>
#include <string>

#include "layer_support.h"
#include "quantize_fp8_support.h"
#include "thin_factors.h"
#include "verify/number.h"

namespace tilemoe::verify {
namespace {

// Rows without scores, so that O is Y.
Case grouped_case(DType dtype = DType::kBFloat16) {
  Case one{.d = 208, .n = 336, .E = 4, .dtype = dtype};
  one.name = "grouped";
  one.gate_layout = GateLayout::kSplit, one.biases = true;
  one.routing = RoutingKind::kGrouped;
  one.counts = {3, 0, 1, 5}, one.row_scores = false;
  one.format_1 = one.format_2 = Format::kFp8, one.recipe = Recipe::kFp8;
  return one;
}

// ------------------------------------------------- the recipe in plain loops

struct Codes {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

Codes codes_of(const std::vector<float>& row, DType dtype, bool float_scales) {
  Codes made;
  for (size_t first = 0; first < row.size(); first += 128) {
    const size_t end = std::min(row.size(), first + 128);
    float amax = 0;
    for (size_t i = first; i < end; ++i) amax = std::max(amax, std::fabs(row[i]));
    const float factor = test::expected_factor(amax, dtype, float_scales);
    made.scales.push_back(1 / factor);
    for (size_t i = first; i < end; ++i) made.codes.push_back(test::nearest_e4m3(row[i] * factor));
  }
  return made;
}

double value_of(uint8_t code) {
  static const std::vector<double> magnitudes = test::e4m3_magnitudes();
  return (code & 0x80 ? -1 : 1) * magnitudes[code & 0x7f];
}
int exponent_of(uint8_t code) {
  return std::max(code >> 3 & 0xf, 1) - 7;
}

// sum + the products of 32 codes, as Hopper's tensor cores compute it.
float instruction(float sum, const uint8_t* a, const uint8_t* b, size_t count) {
  int top = sum == 0 ? -126 : std::ilogb(sum);
  for (size_t k = 0; k < 32; ++k) {
    const uint8_t left = k < count ? a[k] : 0, right = k < count ? b[k] : 0;
    top = std::max(top, exponent_of(left) + exponent_of(right));
  }
  const double unit = std::ldexp(1.0, top - 13);
  double units = std::trunc(sum / unit);
  for (size_t k = 0; k < count; ++k) units += std::trunc(value_of(a[k]) * value_of(b[k]) / unit);
  if (units == 0) return 0;
  const double last = std::ldexp(1.0, std::max(std::ilogb(units) - 13, 0));
  return static_cast<float>(std::trunc(units / last) * last * unit);
}

// `total` + a row of codes times row `row` of expert e of a weight.
float product(const Codes& a, const QuantizedArrays& weight, int64_t e, int64_t row,
              float total = 0) {
  const auto width = static_cast<size_t>(weight.C);
  const size_t across = (width + 127) / 128, down = static_cast<size_t>((weight.R + 127) / 128);
  const uint8_t* const b = weight.codes.data() + (e * weight.R + row) * weight.C;
  const size_t scales = (static_cast<size_t>(e) * down + static_cast<size_t>(row) / 128) * across;
  for (size_t block = 0; block < across; ++block) {
    float sum = 0;
    for (size_t k = block * 128; k < std::min(width, block * 128 + 128); k += 32)
      sum = instruction(sum, &a.codes[k], b + k, std::min<size_t>(32, width - k));
    total = std::fma(sum, a.scales[block] * weight.float_scales[scales + block], total);
  }
  return total;
}

struct Expected {
  std::vector<float> H, O, dX;
};

// The adapter's term of one column of a row's result. Each P and each column has one term, so that
// nothing is rounded.
float low_rank(const std::vector<float>& A, const std::vector<float>& B, int64_t e,
               const float* row, int64_t width, int64_t column, int64_t columns) {
  if (A.empty()) return 0;
  const int64_t rank = static_cast<int64_t>(A.size()) / (4 * width);  // of four experts
  float sum = 0;
  for (int64_t r = 0; r < rank; ++r) {
    float P = 0;
    for (int64_t k = 0; k < width; ++k)
      P += row[k] * A[static_cast<size_t>((e * rank + r) * width + k)];
    sum += P * B[static_cast<size_t>((e * columns + column) * rank + r)];
  }
  return sum;
}

// With ReGLU, whose bits need no exponential.
Expected compute(const Inputs& inputs) {
  const Case& one = inputs.test_case;
  Expected made;
  const QuantizedArrays gate = transposed(inputs.quantized.W1);
  const QuantizedArrays up = transposed(inputs.quantized.W1_up);
  const QuantizedArrays down = transposed(inputs.quantized.W2);
  const auto rounded = [&](float x) { return static_cast<float>(round_to(one.dtype, x)); };
  const auto d = static_cast<size_t>(one.d), n = static_cast<size_t>(one.n);
  size_t row = 0;
  for (int64_t e = 0; e < one.E; ++e)
    for (int64_t left = one.counts[static_cast<size_t>(e)]; left > 0; --left, ++row) {
      const auto first = inputs.X.begin() + static_cast<std::ptrdiff_t>(row * d);
      const Codes X = codes_of({first, first + one.d}, one.dtype, one.float_scales);
      std::vector<float> H, A, A_rounded;
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t j = 0; j < one.n; ++j)
          H.push_back((product(X, half ? inputs.quantized.W1_up : inputs.quantized.W1, e, j) +
                       low_rank(inputs.lora.A1, inputs.lora.B1, e, &*first, one.d, half * one.n + j,
                                2 * one.n)) +
                      inputs.weights.b1[static_cast<size_t>((e * 2 + half) * one.n + j)]);
      for (size_t j = 0; j < n; ++j) A.push_back(std::max(H[j], 0.f) * H[n + j]);
      const Codes of_A = codes_of(A, one.dtype, one.float_scales);
      for (const float a : A) A_rounded.push_back(rounded(a));
      // H as backward reads it.
      std::vector<float> H_saved = H;
      if (one.format_H == Format::kFp8)
        for (const size_t half_begin : {size_t{0}, n}) {
          const auto begin = H.begin() + static_cast<std::ptrdiff_t>(half_begin);
          const Codes half = codes_of({begin, begin + one.n}, one.dtype, one.float_scales);
          for (size_t j = 0; j < n; ++j)
            H_saved[half_begin + j] =
                static_cast<float>(value_of(half.codes[j])) * half.scales[j / 128];
        }
      for (float& h : H_saved) made.H.push_back(h = rounded(h));
      for (int64_t j = 0; j < one.d; ++j)
        made.O.push_back(rounded(rounded(
            (product(of_A, inputs.quantized.W2, e, j) +
             low_rank(inputs.lora.A2, inputs.lora.B2, e, A_rounded.data(), one.n, j, one.d)) +
            inputs.weights.b2[static_cast<size_t>(e * one.d + j)])));

      const auto of_dO = inputs.dO.begin() + static_cast<std::ptrdiff_t>(row * d);
      const Codes dO = codes_of({of_dO, of_dO + one.d}, one.dtype, one.float_scales);
      std::vector<float> d_gate, d_up;
      for (size_t j = 0; j < n; ++j) {
        const float dA = product(dO, down, e, static_cast<int64_t>(j)), g = H_saved[j];
        d_gate.push_back(rounded(g > 0 ? dA * H_saved[n + j] : 0.f));
        d_up.push_back(rounded(std::max(g, 0.f) * dA));
      }
      const Codes of_gate = codes_of(d_gate, one.dtype, one.float_scales);
      const Codes of_up = codes_of(d_up, one.dtype, one.float_scales);
      for (int64_t j = 0; j < one.d; ++j)
        made.dX.push_back(rounded(product(of_up, up, e, j, product(of_gate, gate, e, j))));
    }
  return made;
}

Computed results_of(const Inputs& inputs, Passes passes = Passes::kForward) {
  Problem problem(inputs);
  problem.run(passes);
  EXPECT_EQ(problem.damage(), std::vector<std::string>());
  return problem.computed();
}

// Of all dtypes and both kinds of scales.
void expect_bits_of_plain_loops(Format format_H, bool dH_over_H) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
    for (const bool float_scales : {false, true}) {
      Case one = grouped_case(dtype);
      one.format_H = format_H, one.dH_over_H = dH_over_H;
      one.activation = Activation::kReGLU, one.float_scales = float_scales;
      const Inputs inputs = make_inputs(one, 11);
      const Computed got = results_of(inputs, Passes::kAll);
      const Expected expected = compute(inputs);
      EXPECT_EQ(first_difference(got[kH], expected.H), -1);
      EXPECT_EQ(first_difference(got[kO], expected.O), -1);
      EXPECT_EQ(first_difference(got[kDX], expected.dX), -1);
    }
}
TEST(Fp8Recipe, HasTheBitsOfPlainLoops) {
  expect_bits_of_plain_loops(Format::kNone, false);
}
TEST(Fp8Recipe, HasTheBitsOfPlainLoopsWithHInFp8) {
  for (const bool over_H : {false, true}) expect_bits_of_plain_loops(Format::kFp8, over_H);
}

// Adapters of both weights, and of each alone: the up-projection then has A to store without one.
TEST(Fp8Recipe, AddsAdaptersInForward) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (const auto& [rank_1, rank_2] : {std::pair(8, 16), std::pair(16, 0), std::pair(0, 8)}) {
      Case one = grouped_case(dtype);
      one.activation = Activation::kReGLU, one.recipe = Recipe::kFp8Forward;
      one.lora.gate = one.lora.up = rank_1, one.lora.down = rank_2;
      one.lora.scale_1 = one.lora.scale_2 = 1;
      Inputs inputs = make_inputs(one, 19);
      test::thin_factors(inputs);
      const Computed got = results_of(inputs);
      const Expected expected = compute(inputs);
      EXPECT_EQ(first_difference(got[kH], expected.H), -1) << rank_1;
      EXPECT_EQ(first_difference(got[kO], expected.O), -1) << rank_2;
    }
}

// ------------------------------------------------- what bits depend on

TEST(Fp8Recipe, KeepsATokenFromTheOthers) {
  const Case one = grouped_case();
  Inputs inputs = make_inputs(one, 12);
  const Computed before = results_of(inputs, Passes::kAll);
  const auto d = static_cast<std::ptrdiff_t>(one.d);
  for (auto* rows : {&inputs.X, &inputs.dO})
    for (auto value = rows->begin(); value != rows->end() - d; ++value) *value *= 1024;
  const Computed after = results_of(inputs, Passes::kAll);
  for (const Output output : {kO, kDX}) {
    EXPECT_TRUE(std::equal(after[output].end() - d, after[output].end(), before[output].end() - d));
    EXPECT_NE(first_difference(after[output], before[output]), -1);
  }
}

TEST(Fp8Recipe, HasZeroOfZeros) {
  Case one = grouped_case();
  one.biases = false;
  Inputs inputs = make_inputs(one, 13);
  std::fill(inputs.X.begin(), inputs.X.end(), 0.f);
  std::fill(inputs.dO.begin(), inputs.dO.end(), 0.f);
  const Computed got = results_of(inputs, Passes::kAll);
  for (const Output output : {kO, kDX})
    for (const float value : got[output]) EXPECT_EQ(value, 0);
}

TEST(Fp8Recipe, IsNearTheExactOutput) {
  for (const char* name : {"fp8-recipe/bfloat16", "fp8-recipe-split/bfloat16"}) {
    const Inputs inputs = make_inputs(named_case(name), 14);
    Problem problem(inputs);
    problem.run(Passes::kAll);
    const Results exact = evaluate(inputs, problem.pairs(), Precision::kExact);
    for (const Output output : {kO, kDX}) {
      const Figures off =
          measure(problem.computed()[output], exact[output], inputs.test_case.d, kSmallRow);
      EXPECT_LE(off.frobenius, 0.072);
      EXPECT_GE(off.frobenius, 0.01) << "nothing was rounded to e4m3";
    }
  }
}

// The gradients of FP8_FORWARD are those of dequantised weights from the H of this forward.
TEST(Fp8Recipe, DequantisesInTheBackwardOfFp8Forward) {
  Inputs inputs = make_inputs(named_case("fp8-forward/bfloat16"), 17);
  inputs.test_case.wanted.dW1 = inputs.test_case.wanted.dW2 = false;
  Problem problem(inputs);
  problem.run(Passes::kAll);
  const Computed got = problem.computed();
  inputs.test_case.recipe = Recipe::kBf16;
  Problem other(inputs);
  other.run(Passes::kForward);
  EXPECT_NE(first_difference(other.computed()[kH], got[kH]), -1);
  const size_t bytes = got[kH].size() * sizeof(uint16_t);
  std::memcpy(other.saved().H.data, problem.saved().H.data, bytes);
  other.experts().backward(other.backward_args());
  for (const Output output : {kDX, kDs})
    EXPECT_EQ(first_difference(other.computed()[output], got[output]), -1);
}

// X as codes, in inference and with a saved H.
TEST(Fp8Recipe, ReadsXAsCodes) {
  const Case one = grouped_case();
  const Inputs inputs = make_inputs(one, 15);
  Problem problem(inputs);
  problem.run(Passes::kForward);
  const std::vector<float> expected = problem.computed()[kO];
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  for (auto at = inputs.X.begin(); at != inputs.X.end(); at += one.d) {
    const Codes row = codes_of({at, at + one.d}, one.dtype, false);
    codes.insert(codes.end(), row.codes.begin(), row.codes.end());
    scales.insert(scales.end(), row.scales.begin(), row.scales.end());
  }
  for (const bool saves : {false, true}) {
    problem.poison();
    problem.route();
    ForwardArgs args = problem.forward_args();
    args.X = {}, args.X_codes = codes.data(), args.X_scales = scales.data();
    if (!saves) args.saved = nullptr;
    problem.experts().forward(args);
    EXPECT_EQ(first_difference(problem.computed()[kO], expected), -1);
  }
}

TEST(Fp8Recipe, ChecksXAsCodes) {
  const Case one = grouped_case();
  Problem problem(make_inputs(one, 16));
  problem.route();
  const std::vector<uint8_t> codes(static_cast<size_t>(one.outer_rows() * one.d) + 1);
  const std::vector<float> scales(static_cast<size_t>(one.outer_rows() * 2));
  const auto expect = [&](const char* text, const std::function<void(ForwardArgs&)>& change) {
    ForwardArgs args = problem.forward_args();
    args.X = {}, args.X_codes = codes.data(), args.X_scales = scales.data();
    change(args);
    try {
      problem.experts().forward(args);
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  expect("X is", [&](ForwardArgs& args) { args.X = problem.forward_args().X; });
  expect("X_scales is null", [](ForwardArgs& args) { args.X_scales = nullptr; });
  expect("X_codes is not aligned to 16 bytes", [](ForwardArgs& args) { ++args.X_codes; });
  expect("without X_codes", [](ForwardArgs& args) { args.X_codes = nullptr; });
  expect("shares memory with",
         [&](ForwardArgs& args) { args.X_codes = static_cast<const uint8_t*>(args.workspace); });
}

TEST(Fp8Recipe, ReadsXForAnAdapter) {
  Case one = grouped_case();
  one.recipe = Recipe::kFp8Forward, one.lora.up = 8;
  Problem problem(make_inputs(one, 20));
  problem.run(Passes::kForward);
  ForwardArgs args = problem.forward_args();
  alignas(16) const uint8_t codes[16] = {};
  const float scale = 1;
  args.X = {}, args.X_codes = codes, args.X_scales = &scale;
  try {
    problem.experts().forward(args);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("an adapter of W1 reads X"), std::string::npos)
        << error.what();
  }
}

// ------------------------------------------------- memory and errors

Experts experts() {
  return {.device = Device::kCpu,
          .dtype = DType::kBFloat16,
          .d = 512,
          .n = 256,
          .E = 8,
          .format_1 = Format::kFp8,
          .format_2 = Format::kFp8,
          .recipe = Recipe::kFp8};
}

TEST(Fp8Recipe, HasCodesInTheWorkspace) {
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, 64, 8, 2);
  Experts dense = experts(), fp8 = experts();
  dense.format_1 = dense.format_2 = Format::kNone, dense.recipe = Recipe::kBf16;
  const size_t A = 2 * 128 * 256, A_codes = 128 * 256 + 128 * 2 * 4;
  const size_t Y = 2 * 128 * 512, X_codes = 64 * 512 + 64 * 4 * 4;
  EXPECT_EQ(fp8.workspace_bytes(spec, Pass::kForward),
            dense.workspace_bytes(spec, Pass::kForward) - A + A_codes);
  // Y is a block of 128 columns, less than the codes of X
  dense.column_blocks = fp8.column_blocks = 8;
  EXPECT_EQ(
      fp8.workspace_bytes(spec, Pass::kForward),
      dense.workspace_bytes(spec, Pass::kForward) - A - Y / 8 + A_codes + std::max(X_codes, Y / 4));
}

// P1 and P2, and A in 16 bits for P2.
TEST(Fp8Recipe, HasAOfAnAdapterInTheWorkspace) {
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, 64, 8, 2);
  Experts of = experts();
  of.recipe = Recipe::kFp8Forward;
  const size_t before = of.workspace_bytes(spec, Pass::kInference);
  of.rank_1 = 8;
  EXPECT_EQ(of.workspace_bytes(spec, Pass::kInference), before + 2 * 128 * 8);
  of.rank_1 = 0, of.rank_2 = 16;
  EXPECT_EQ(of.workspace_bytes(spec, Pass::kInference), before + 2 * 128 * (16 + 256));
}

// A' next to the codes of dO, then dX~ next to the codes of dH. Many tokens: in blocks of 256 columns,
// so that both have the bytes of all 512; few: all columns, because dW1 has more bytes.
TEST(Fp8Recipe, HasCodesInTheWorkspaceOfBackward) {
  Experts dense = experts(), fp8 = experts();
  dense.format_1 = dense.format_2 = Format::kNone, dense.recipe = Recipe::kBf16;
  const auto bytes = [&](const Experts& of, int64_t tokens, uint32_t gradients) {
    return of.workspace_bytes(RoutingSpec::top_k(Device::kCpu, tokens, 8, 2), BackwardMode::kOverH,
                              gradients);
  };
  const size_t dO_codes = 64 * 512 + 64 * 4 * 4, dH_codes = 2 * (128 * 256 + 128 * 2 * 4);
  EXPECT_EQ(bytes(fp8, 64, TILEMOE_GRADIENT_S), bytes(dense, 64, TILEMOE_GRADIENT_S) + dO_codes);
  EXPECT_EQ(bytes(fp8, 64, TILEMOE_GRADIENT_X), bytes(dense, 64, TILEMOE_GRADIENT_X) + dH_codes);
  EXPECT_EQ(bytes(fp8, 64 * 1024, TILEMOE_GRADIENT_X),
            bytes(dense, 64 * 1024, TILEMOE_GRADIENT_X) - 128 * 1024 * 256 * 2 + 1024 * dH_codes);
  // Without W2 and W1 in 16 bits.
  fp8.recipe = Recipe::kFp8Forward;
  EXPECT_EQ(bytes(fp8, 64, TILEMOE_GRADIENT_X),
            bytes(dense, 64, TILEMOE_GRADIENT_X) + 2 * size_t{8} * 512 * 512);
}

void expect_refused(const std::function<void(Experts&)>& change, Status status, const char* text) {
  Experts of = experts();
  change(of);
  try {
    of.workspace_bytes(RoutingSpec::top_k(Device::kCpu, 64, of.E, 2), Pass::kForward);
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Fp8Recipe, RefusesWhatItLacks) {
  const auto refused = [](const char* text, const std::function<void(Experts&)>& change) {
    expect_refused(change, Status::kUnsupported, text);
  };
  refused("format_1 is none", [](Experts& of) { of.format_1 = Format::kNone; });
  refused("format_2 is mxfp4", [](Experts& of) { of.format_2 = Format::kMxfp4; });
  refused("activation is silu", [](Experts& of) { of.activation = Activation::kSiLU; });
  refused("d to be a multiple of 16", [](Experts& of) { of.d = 264; });
  refused("n to be a multiple of 16", [](Experts& of) { of.n = 136; });
  refused("n to be a multiple of 128", [](Experts& of) { of.n = 144; });
  refused("gate_layout interleaved",
          [](Experts& of) { of.gate_layout = GateLayout::kInterleaved; });
  refused("rank_1 is 8 and rank_2 is 0; use fp8_forward", [](Experts& of) { of.rank_1 = 8; });
  expect_refused([](Experts& of) { of.recipe = static_cast<Recipe>(3); }, Status::kInvalidArgument,
                 "recipe is 3");
  expect_refused([](Experts& of) { of.recipe = Recipe::kBf16, of.float_scales = true; },
                 Status::kInvalidArgument, "requires the recipe fp8");
}

TEST(Fp8Recipe, ChecksTheTransposedWeights) {
  const auto refused = [](Recipe recipe, const char* text,
                          const std::function<void(QuantizedWeights&)>& change) {
    Case one = grouped_case();
    one.recipe = recipe;
    Problem problem(make_inputs(one, 18));
    problem.run(Passes::kForward);
    BackwardArgs args = problem.backward_args();
    QuantizedWeights weights(*static_cast<const QuantizedWeights*>(args.quantized));
    change(weights);
    args.quantized = &weights;
    try {
      problem.experts().backward(args);
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused(Recipe::kFp8, "use the recipe fp8_forward",
          [](QuantizedWeights& of) { of.W1_transposed = {}; });
  refused(Recipe::kFp8, "W2_transposed.format is none",
          [](QuantizedWeights& of) { of.W2_transposed = {}; });
  refused(Recipe::kFp8, "W1_up_transposed.transposed is 0",
          [](QuantizedWeights& of) { of.W1_up_transposed.transposed = 0; });
  refused(Recipe::kFp8, "W2_transposed.scales",
          [](QuantizedWeights& of) { of.W2_transposed.scales = nullptr; });
  refused(Recipe::kFp8Forward, "W1_transposed.format is fp8",
          [](QuantizedWeights& of) { of.W1_transposed = of.W1; });
}

}  // namespace
}  // namespace tilemoe::verify
