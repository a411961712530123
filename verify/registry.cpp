#include "registry.h"

#include <cstdlib>
#include <cstring>

#include "core/activation_kinds.h"
#include "lora_cases.h"
#include "quantized_cases.h"
#include "vary.h"

namespace tilemoe::verify {
namespace {

// Sizes: T, d, n, E and K are different from each other and no multiples of a tile size, unless an
// edge is tested.
std::vector<Case> activation_cases() {
  std::vector<Case> cases;
  for (tilemoe_activation activation : kActivations)
    cases.push_back({.name = tilemoe_activation_name(activation),
                     .T = 203,
                     .d = 136,
                     .n = 72,
                     .E = 7,
                     .K = 3,
                     .activation = static_cast<Activation>(activation),
                     .reduced = activation == TILEMOE_SWIGLU});
  return cases;
}

std::vector<Case> size_cases() {
  std::vector<Case> cases = {
      {.name = "no-token", .T = 0, .d = 24, .n = 40, .E = 5, .K = 2, .reduced = true},
      {.name = "one-token", .T = 1, .d = 40, .n = 24, .E = 6, .K = 3, .reduced = true},
      {.name = "smallest", .T = 1, .d = 8, .n = 8, .E = 1, .K = 1, .reduced = true},
      {.name = "every-expert", .T = 67, .d = 72, .n = 40, .E = 5, .K = 5, .reduced = true},
      {.name = "single-expert", .T = 161, .d = 56, .n = 88, .E = 1, .K = 1},
      {.name = "top-1", .T = 150, .d = 88, .n = 120, .E = 6, .K = 1},
      {.name = "more-experts-than-tokens", .T = 11, .d = 64, .n = 48, .E = 90, .K = 2},
      // A sum longer than any ring of stages, in tiles for small M.
      {.name = "few-rows-long-sum", .T = 37, .d = 904, .n = 72, .E = 19, .K = 2, .reduced = true},
      {.name = "many-pairs", .T = 3001, .d = 24, .n = 16, .E = 17, .K = 3},
      {.name = "narrow-d", .T = 333, .d = 8, .n = 136, .E = 5, .K = 3},
      {.name = "narrow-n", .T = 333, .d = 136, .n = 8, .E = 5, .K = 3},
      // Sums that are twice as long as any ring of stages.
      {.name = "long-sums", .T = 49, .d = 24, .n = 840, .E = 9, .K = 2, .reduced = true},
      {.name = "tall", .T = 1410, .d = 104, .n = 56, .E = 9, .K = 2},
  };
  for (Case& one : cases) one.biases = one.T < 2;
  // More columns than any tile has, with more rows in an expert than any tile has.
  const Case wide{.T = 67, .d = 520, .n = 264, .E = 4, .K = 2};
  cases.push_back(vary("wide", wide, [](Case& c) {
    c.T = 277, c.load = Load::kOneExpert, c.scoring = Scoring::kSigmoid, c.reduced = true;
  }));
  cases.push_back(vary("wide-transposed", wide, [](Case& c) {
    c.gate_layout = GateLayout::kInterleaved;
    c.W1_transposed = c.W2_transposed = c.biases = true;
  }));
  return cases;
}

std::vector<Case> layout_cases() {
  const Case shape{.T = 131, .d = 104, .n = 56, .E = 6, .K = 2};
  const auto transpose = [](Case& c) { c.W1_transposed = c.W2_transposed = true; };
  return {
      vary("biases", shape, [](Case& c) { c.biases = c.reduced = true; }),
      vary("interleaved", shape,
           [](Case& c) { c.gate_layout = GateLayout::kInterleaved, c.biases = true; }),
      vary("split", shape, [](Case& c) { c.gate_layout = GateLayout::kSplit, c.biases = true; }),
      vary("transposed", shape, [&](Case& c) { transpose(c), c.reduced = true; }),
      vary("transposed-W1", shape,
           [](Case& c) {
             c.activation = Activation::kSiLU;
             c.W1_transposed = c.biases = true;
           }),
      vary("transposed-W2", shape,
           [](Case& c) { c.gate_layout = GateLayout::kSplit, c.W2_transposed = true; }),
      vary("transposed-split", shape,
           [](Case& c) {
             c.gate_layout = GateLayout::kSplit;
             c.W1_transposed = c.biases = true;
           }),
      vary("gpt-oss", shape,
           [&](Case& c) {
             c.clamp = 1.5f, c.alpha = 1.702f, c.up_shift = 1;
             c.gate_layout = GateLayout::kInterleaved;
             transpose(c), c.biases = c.reduced = true;
           }),
      vary("padded", shape,
           [](Case& c) { c.padded = c.biases = c.addend = c.accumulate_dW = c.reduced = true; }),
      vary("padded-transposed", shape,
           [&](Case& c) {
             c.gate_layout = GateLayout::kInterleaved;
             transpose(c), c.padded = c.dH_over_H = true;
           }),
  };
}

std::vector<Case> top_k_cases() {
  const Case shape{.T = 173, .d = 72, .n = 56, .E = 11, .K = 4};
  return {
      vary("softmax-over-all", shape, [](Case& c) { c.scoring = Scoring::kSoftmaxOverAll; }),
      vary("softmax-renormalized", shape,
           [](Case& c) {
             c.scoring = Scoring::kSoftmaxRenormalized;
             c.id_dtype = DType::kInt64;
           }),
      vary("sigmoid", shape,
           [](Case& c) { c.scoring = Scoring::kSigmoid, c.score_dtype = DType::kBFloat16; }),
      vary("sigmoid-renormalized", shape,
           [](Case& c) {
             c.scoring = Scoring::kSigmoidRenormalized;
             c.score_dtype = DType::kFloat16;
           }),
      // More than 1024 rows each, so that several blocks of a GPU have parts of their sums.
      vary("long-experts", shape,
           [](Case& c) { c.T = 2417, c.E = 3, c.K = 2, c.biases = c.reduced = true; }),
      vary("zipf", shape, [](Case& c) { c.T = 607, c.E = 23, c.load = Load::kZipf; }),
      vary("one-expert-has-all", shape,
           [](Case& c) {
             c.T = 301, c.load = Load::kOneExpert;
             c.scoring = Scoring::kSigmoid;  // softmax would leave nothing to the others
           }),
      vary("half-of-the-experts-empty", shape,
           [](Case& c) { c.load = Load::kHalfEmpty, c.biases = c.reduced = true; }),
      vary("bad-ids", shape, [](Case& c) { c.biases = c.bad_ids = c.reduced = true; }),
      vary("over-capacity", shape, [](Case& c) { c.capacity = 501, c.biases = c.reduced = true; }),
      // Wide enough that ds has partial sums of several column tiles, each of them as long.
      vary("spare-capacity", shape, [](Case& c) { c.capacity = 1003, c.n = 264; }),
  };
}

std::vector<Case> other_routing_cases() {
  const Case general{.T = 157, .d = 72, .n = 88, .E = 6, .K = 3, .routing = RoutingKind::kGeneral};
  const Case rounded{.T = 405, .d = 56, .n = 40, .E = 9, .K = 2, .routing = RoutingKind::kRounded};
  const Case grouped{.d = 72, .n = 40, .routing = RoutingKind::kGrouped};
  const auto rule = [](Rounding rounding, int64_t m) {
    return [=](Case& c) { c.rounding = rounding, c.m = m; };
  };
  return {
      vary("general", general, [](Case& c) { c.biases = c.bad_ids = c.reduced = true; }),
      vary("general-over-capacity", general,
           [](Case& c) {
             c.load = Load::kZipf, c.capacity = 333, c.bad_ids = true;
             c.id_dtype = DType::kInt64, c.score_dtype = DType::kBFloat16;
           }),
      vary("rounded-nearest", rounded, rule(Rounding::kNearest, 32)),
      vary("rounded-up", rounded, rule(Rounding::kUp, 48)),
      vary("rounded-down", rounded, rule(Rounding::kDown, 16)),
      vary("rounded-stochastic", rounded, rule(Rounding::kStochastic, 64)),
      vary("rounded-balanced", rounded, rule(Rounding::kBalanced, 32)),
      // Counts on both sides of every tile height.
      vary("grouped", grouped,
           [](Case& c) {
             c.counts = {0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 0, 127, 128, 129, 257};
             c.E = 15, c.spare_rows = 37;
             c.biases = c.addend = c.reduced = true;
           }),
      vary("grouped-without-scores", grouped,
           [](Case& c) {
             c.counts = {191, 0, 193, 5};
             c.E = 4, c.spare_rows = 3, c.row_scores = false, c.id_dtype = DType::kInt64;
             c.biases = c.padded = true;
           }),
      vary("grouped-without-a-row", grouped,
           [](Case& c) {
             c.counts = {0, 0, 0};
             c.E = 3, c.spare_rows = 21, c.addend = true;
           }),
  };
}

std::vector<Case> gradient_cases() {
  const Case shape{.T = 145, .d = 88, .n = 64, .E = 7, .K = 3, .biases = true};
  const Gradients none{
      .dX = false, .dW1 = false, .dW2 = false, .db1 = false, .db2 = false, .ds = false};
  const auto only = [&](bool Gradients::*gradient) {
    return [=](Case& c) { c.wanted = none, c.wanted.*gradient = true; };
  };
  return {
      vary("dW-float32", shape, [](Case& c) { c.float32_dW = true; }),
      vary("dW-added", shape, [](Case& c) { c.accumulate_dW = c.reduced = true; }),
      vary("dW-added-float32", shape,
           [](Case& c) {
             c.accumulate_dW = c.float32_dW = true;
             c.load = Load::kHalfEmpty, c.gate_layout = GateLayout::kSplit;
           }),
      vary("addend", shape, [](Case& c) { c.addend = true; }),
      vary("dH-over-H", shape, [](Case& c) { c.dH_over_H = c.reduced = true; }),
      vary("two-calls", shape,
           [](Case& c) { c.in_two_calls = c.addend = c.padded = c.reduced = true; }),
      vary("two-calls-dH-over-H", shape,
           [](Case& c) {
             c.in_two_calls = c.addend = c.dH_over_H = true;
             c.d = 200, c.column_blocks = 3;
           }),
      vary("parts", shape, [](Case& c) { c.in_parts = c.addend = c.reduced = true; }),
      vary("parts-dH-over-H", shape,
           [](Case& c) {
             c.in_parts = c.dH_over_H = c.padded = true;
             c.d = 200, c.column_blocks = 3, c.load = Load::kHalfEmpty;
           }),
      vary("column-blocks", shape,
           [](Case& c) {
             c.d = 200, c.column_blocks = 3;  // of 128 columns, and one of the rest
             c.addend = c.padded = c.reduced = true;
           }),
      vary("column-blocks-transposed", shape,
           [](Case& c) {
             c.d = 264, c.column_blocks = 2, c.dH_over_H = true;
             c.gate_layout = GateLayout::kInterleaved;
             c.W1_transposed = c.W2_transposed = true;
           }),
      vary("column-blocks-split", shape,
           [](Case& c) { c.d = 424, c.column_blocks = 2, c.gate_layout = GateLayout::kSplit; }),
      vary("dX-only", shape, only(&Gradients::dX)),
      vary("dW1-only", shape, only(&Gradients::dW1)),
      vary("dW2-only", shape, only(&Gradients::dW2)),
      vary("db1-only", shape, only(&Gradients::db1)),
      vary("db2-only", shape, only(&Gradients::db2)),
      vary("ds-only", shape, only(&Gradients::ds)),
      vary("frozen-experts", shape,
           [&](Case& c) { c.wanted = none, c.wanted.dX = c.wanted.ds = c.reduced = true; }),
      vary("no-gradient", shape, [&](Case& c) { c.wanted = none; }),
  };
}

// gathered_mm and combine_mm, with the identity between them.
std::vector<Case> mm_cases() {
  const Case shape{.T = 145,
                   .d = 88,
                   .n = 72,
                   .E = 7,
                   .K = 3,
                   .activation = Activation::kIdentity,
                   .biases = true,
                   .gemms_apart = true};
  return {
      vary("mm", shape, [](Case& c) { c.addend = c.reduced = true; }),
      vary("mm-transposed", shape,
           [](Case& c) {
             c.W1_transposed = c.W2_transposed = c.padded = c.reduced = true;
             c.accumulate_dW = c.float32_dW = true;
           }),
      vary("mm-column-blocks", shape,
           [](Case& c) { c.d = 200, c.column_blocks = 3, c.addend = true, c.biases = false; }),
      vary("mm-spare-capacity", shape, [](Case& c) { c.capacity = 503, c.bad_ids = true; }),
      vary("mm-over-capacity", shape, [](Case& c) { c.capacity = 401, c.load = Load::kHalfEmpty; }),
      vary("mm-no-token", shape, [](Case& c) { c.T = 0; }),
      vary("mm-general", shape,
           [](Case& c) { c.routing = RoutingKind::kGeneral, c.bad_ids = true; }),
      vary("mm-grouped", shape,
           [](Case& c) {
             c.routing = RoutingKind::kGrouped;
             c.T = c.K = 0, c.counts = {0, 65, 1, 129, 0, 16, 33}, c.spare_rows = 21;
             c.addend = c.reduced = true;
           }),
      vary("mm-frozen", shape,
           [](Case& c) { c.wanted.dW1 = c.wanted.dW2 = c.wanted.db1 = c.wanted.db2 = false; }),
      vary("mm-second-alone", shape,
           [](Case& c) { c.wanted.dX = c.wanted.dW1 = c.wanted.db1 = false; }),
  };
}

// Cases whose bits a simulation of a GPU must reproduce (verify/digest.h). Scores are given, since
// those of top-K result from approximate instructions; and the weight gradients are float32, which
// shows every bit of a sum.
std::vector<Case> calibration_cases() {
  const Case shape{.T = 151,
                   .d = 200,
                   .n = 136,
                   .E = 3,
                   .K = 2,
                   .routing = RoutingKind::kGeneral,
                   .load = Load::kZipf,
                   .float32_dW = true};
  return {
      vary("calibration-identity", shape,
           [](Case& c) { c.activation = Activation::kIdentity, c.addend = true; }),
      vary("calibration-relu", shape,
           [](Case& c) {
             c.activation = Activation::kReLU;
             c.W1_transposed = c.W2_transposed = c.biases = true;
           }),
      vary("calibration-reglu", shape, [](Case& c) { c.activation = Activation::kReGLU; }),
      vary("calibration-reglu-transposed", shape,
           [](Case& c) {
             c.activation = Activation::kReGLU;
             c.W1_transposed = c.W2_transposed = c.biases = true;
             c.gate_layout = GateLayout::kInterleaved;
           }),
      vary("calibration-grouped", shape,
           [](Case& c) {
             c.activation = Activation::kReGLU;
             c.routing = RoutingKind::kGrouped, c.load = Load::kRandom;
             c.T = c.K = 0, c.counts = {131, 0, 67, 17}, c.E = 4, c.spare_rows = 9;
           }),
      // Its exponentials are approximate: only H is equal.
      vary("calibration-swiglu", shape, [](Case&) {}),
  };
}

// Rows times width exceeds 2^31 in the (M, d) tensors, then in the (M, 2n) ones, in which each
// of a small T of tokens has many pairs, so that X and O stay small; then in the weights.
std::vector<Case> make_huge_cases() {
  const Case shape{
      .T = 97, .E = 3, .dtype = DType::kBFloat16, .routing = RoutingKind::kGeneral, .huge = true};
  return {
      vary("huge-rows", shape, [](Case& c) { c.d = 2056, c.n = 8, c.K = 12500; }),
      vary("huge-hidden", shape, [](Case& c) { c.d = 8, c.n = 2056, c.K = 6300; }),
      vary("deepseek-v3.2", shape,
           [](Case& c) {
             c.T = 32768, c.d = 7168, c.n = 2048, c.E = 256, c.K = 8;
             c.too_large = true;
           }),
  };
}

std::vector<Case> make_bench_cases() {
  std::vector<Case> cases = {
#define LAYER(name_, device, T_, d_, n_, E_, K_) \
  {.name = name_,                                \
   .T = T_,                                      \
   .d = d_,                                      \
   .n = n_,                                      \
   .E = E_,                                      \
   .K = K_,                                      \
   .dtype = std::string_view(device) == "cuda" ? DType::kBFloat16 : DType::kFloat32},
#include "layers.inc"
#undef LAYER
  };
  const Case cpu{.T = 4096, .d = 512, .n = 256, .E = 32, .K = 4};
  const std::vector<Case> for_cpu = {
      vary("cpu-zipf", cpu, [](Case& c) { c.load = Load::kZipf; }),
      vary("cpu-rounded", cpu,
           [](Case& c) {
             c.routing = RoutingKind::kRounded, c.rounding = Rounding::kNearest, c.m = 128;
           }),
  };
  cases.insert(cases.end(), for_cpu.begin(), for_cpu.end());
  for (Case& one : cases) one.data = Data::kBench;
  return cases;
}

// In every dtype.
std::vector<Case> make_all_verification_cases() {
  std::vector<Case> cases;
  for (const auto& group :
       {activation_cases(), size_cases(), layout_cases(), top_k_cases(), other_routing_cases(),
        gradient_cases(), mm_cases(), calibration_cases(), lora_cases(), quantized_cases()})
    for (const Case& one : group)
      for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        cases.push_back(one);
        cases.back().dtype = dtype;
        cases.back().name += std::string("/") + tilemoe_dtype_name(to_c(dtype));
      }
  return cases;
}
const std::vector<Case>& all_verification_cases() {
  static const std::vector<Case> cases = make_all_verification_cases();
  return cases;
}

std::vector<Case> requested(std::vector<Case> cases) {
  if (reduced_run()) std::erase_if(cases, [](const Case& one) { return !one.reduced; });
  return cases;
}

}  // namespace

bool reduced_run() {
  const char* subset = std::getenv("TILEMOE_CASES");
  return subset && std::strcmp(subset, "reduced") == 0;
}

const std::vector<Case>& verification_cases() {
  static const std::vector<Case> cases = requested(all_verification_cases());
  return cases;
}
bool arch_computes(std::string_view arch, const Case& one) {
  return one.recipe == Recipe::kBf16 || arch.starts_with("sm90");
}
const std::vector<Case>& bench_cases() {
  static const std::vector<Case> cases = make_bench_cases();
  return cases;
}
const std::vector<Case>& huge_cases() {
  static const std::vector<Case> cases = make_huge_cases();
  return cases;
}

const Case* find_case(std::string_view name) {
  for (const auto* cases : {&all_verification_cases(), &bench_cases(), &huge_cases()})
    for (const Case& one : *cases)
      if (one.name == name) return &one;
  return nullptr;
}

bool has_integer_form(const Case& original) {
  constexpr int64_t kMaxWidth = 640;  // `wide` has 520
  return original.routing != RoutingKind::kRounded && original.recipe == Recipe::kBf16 &&
         !original.huge && original.d <= kMaxWidth;
}

Case integer_form(Case original) {
  original.data = Data::kIntegers;
  original.clamp = original.alpha = original.up_shift = 0;
  original.lora.scale_1 = 2, original.lora.scale_2 = -1;
  switch (original.activation) {
    case Activation::kReGLU:
    case Activation::kReLU:
    case Activation::kReLUSquared:
    case Activation::kIdentity: break;
    default: original.activation = original.gated() ? Activation::kReGLU : Activation::kReLU;
  }
  return original;
}

}  // namespace tilemoe::verify
