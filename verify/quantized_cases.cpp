#include "quantized_cases.h"

#include "vary.h"

namespace tilemoe::verify {

// Each format as W1 and as W2, with and without adapters; each layout of the gate and major; blocks
// of experts, and what divides a pass.
std::vector<Case> quantized_cases() {
  const Gradients frozen{.dW1 = false, .dW2 = false, .db1 = false, .db2 = false};
  // Rows that are no multiple of a tile of FP8, blocks of NF4 that two experts share.
  const Case shape{.T = 83, .d = 96, .n = 160, .E = 6, .K = 2, .wanted = frozen};
  const auto formats = [](Case& c, Format of_W1, Format of_W2) {
    c.format_1 = of_W1, c.format_2 = of_W2;
  };
  const auto compute_in_fp8 = [&](Case& c) {
    formats(c, Format::kFp8, Format::kFp8), c.recipe = Recipe::kFp8;
    c.d = 208, c.n = 128, c.wanted = {};
  };
  const auto save_H_in_fp8 = [&](Case& c) { compute_in_fp8(c), c.format_H = Format::kFp8; };
  const auto transpose = [](Case& c) { c.W1_transposed = c.W2_transposed = true; };
  const auto adapt = [](Case& c) { c.lora.gate = 16, c.lora.down = 8; };
  const auto group = [](Case& c) {
    c.routing = RoutingKind::kGrouped;
    c.T = c.K = 0, c.counts = {67, 0, 1, 35, 33}, c.E = 5, c.spare_rows = 9;
  };
  return {
      vary("fp8", shape,
           [&](Case& c) {
             formats(c, Format::kFp8, Format::kFp8), adapt(c);
             c.load = Load::kHalfEmpty, c.reduced = true;
           }),
      vary("fp8-transposed", shape,
           [&](Case& c) {
             formats(c, Format::kFp8, Format::kFp8), transpose(c);
             c.biases = c.wanted.db1 = c.wanted.db2 = true;
           }),
      vary("mxfp4", shape,
           [&](Case& c) {
             formats(c, Format::kMxfp4, Format::kMxfp4), adapt(c);
             c.gate_layout = GateLayout::kInterleaved;
             c.clamp = 1.5f, c.alpha = 1.702f, c.up_shift = 1, c.biases = true;
           }),
      vary("mxfp4-transposed", shape,
           [&](Case& c) {
             formats(c, Format::kMxfp4, Format::kMxfp4), transpose(c), adapt(c);
             c.gate_layout = GateLayout::kInterleaved, c.addend = true;
           }),
      vary("nf4", shape,
           [&](Case& c) {
             formats(c, Format::kNf4, Format::kNf4);
             c.d = 72, c.n = 56, c.E = 8, c.load = Load::kHalfEmpty, c.dH_over_H = true;
           }),
      vary("nf4-split", shape,
           [&](Case& c) {
             formats(c, Format::kNf4, Format::kNf4), adapt(c);
             c.gate_layout = GateLayout::kSplit, c.lora.up = 24, c.weight_blocks = 4;
             c.biases = c.reduced = true;
           }),
      vary("nf4-double", shape,
           [&](Case& c) {
             formats(c, Format::kNf4Double, Format::kNf4Double), adapt(c);
             c.in_two_calls = c.addend = true;
           }),
      vary("nf4-double-plain", shape,
           [&](Case& c) {
             formats(c, Format::kNf4Double, Format::kNf4), transpose(c);
             c.activation = Activation::kReLUSquared, c.weight_blocks = 2;
           }),
      // Rows that are whole blocks: a GEMM of forward may read the codes itself.
      vary("nf4-whole-blocks", shape,
           [&](Case& c) {
             formats(c, Format::kNf4, Format::kNf4), adapt(c);
             c.d = 128, c.n = 64, c.biases = c.reduced = true;
           }),
      vary("nf4-double-whole-blocks", shape,
           [&](Case& c) {
             formats(c, Format::kNf4Double, Format::kNf4Double);
             c.gate_layout = GateLayout::kSplit, c.d = 192, c.n = 128, c.column_blocks = 3;
           }),
      vary("plain-codes", shape,
           [&](Case& c) {
             formats(c, Format::kMxfp4, Format::kFp8), adapt(c);
             c.activation = Activation::kReLUSquared, c.load = Load::kHalfEmpty;
           }),
      vary("nvfp4", shape, [&](Case& c) { formats(c, Format::kNvfp4, Format::kNvfp4), adapt(c); }),
      vary("nvfp4-split-transposed", shape,
           [&](Case& c) {
             formats(c, Format::kNvfp4, Format::kMxfp4), transpose(c);
             c.gate_layout = GateLayout::kSplit;
           }),
      // One of the weights alone; the other one has a gradient.
      vary("quantized-W1", shape,
           [&](Case& c) {
             formats(c, Format::kMxfp4, Format::kNone), adapt(c);
             c.wanted.dW2 = c.padded = true, c.weight_blocks = 3;
           }),
      vary("quantized-W2", shape,
           [&](Case& c) {
             formats(c, Format::kNone, Format::kFp8);
             c.wanted.dW1 = c.accumulate_dW = true;
           }),
      // Blocks of experts within blocks of columns.
      vary("quantized-blocks", shape,
           [&](Case& c) {
             formats(c, Format::kNf4, Format::kNvfp4), adapt(c);
             c.d = 192, c.column_blocks = 3, c.weight_blocks = 4, c.addend = true;
           }),
      vary("quantized-column-blocks", shape,
           [&](Case& c) {
             formats(c, Format::kFp8, Format::kMxfp4), transpose(c);
             c.d = 192, c.column_blocks = 2, c.dH_over_H = true;
           }),
      vary("quantized-parts", shape,
           [&](Case& c) {
             formats(c, Format::kMxfp4, Format::kNf4Double), adapt(c);
             c.in_parts = true, c.weight_blocks = 2, c.load = Load::kHalfEmpty;
           }),
      vary("quantized-parts-over-H", shape,
           [&](Case& c) {
             formats(c, Format::kNf4, Format::kFp8);
             c.in_parts = c.dH_over_H = true;
           }),
      vary("quantized-grouped", shape,
           [&](Case& c) {
             formats(c, Format::kNvfp4, Format::kMxfp4), adapt(c), group(c);
             c.weight_blocks = 8;  // more than experts
           }),
      vary("quantized-general", shape,
           [&](Case& c) {
             formats(c, Format::kMxfp4, Format::kMxfp4);
             c.routing = RoutingKind::kGeneral, c.load = Load::kZipf, c.capacity = 107;
             c.bad_ids = true;
           }),
      vary("quantized-no-token", shape,
           [&](Case& c) { formats(c, Format::kFp8, Format::kNf4), c.T = 0; }),
      // Blocks of X and of A are ragged; so are experts, and half of them are empty.
      vary("fp8-recipe", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.reduced = true;
             c.load = Load::kHalfEmpty, c.biases = c.padded = true;
           }),
      vary("fp8-recipe-split", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.d = 272, c.n = 336, c.T = 131;
             c.gate_layout = GateLayout::kSplit, c.biases = c.addend = c.float_scales = true;
             c.clamp = 7, c.alpha = 1.702f, c.up_shift = 1;
           }),
      vary("fp8-recipe-blocks", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.d = 400, c.column_blocks = 3, c.weight_blocks = 2;
             c.activation = Activation::kGeGLU, c.dH_over_H = true;
           }),
      vary("fp8-recipe-parts", shape,
           [&](Case& c) { compute_in_fp8(c), c.in_parts = c.in_two_calls = true; }),
      // An expert has one row, whose part of ds is smaller than the recipe's error.
      vary("fp8-recipe-grouped", shape,
           [&](Case& c) { compute_in_fp8(c), group(c), c.wanted.ds = false; }),
      vary("fp8-recipe-frozen", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.wanted = frozen, c.n = 256;
             c.dH_over_H = c.in_two_calls = true;
           }),
      vary("fp8-forward", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.recipe = Recipe::kFp8Forward;
             c.weight_blocks = 2, c.biases = c.accumulate_dW = true;
           }),
      vary("fp8-forward-adapters", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.recipe = Recipe::kFp8Forward, c.wanted = frozen, adapt(c);
             c.load = Load::kHalfEmpty, c.biases = c.in_two_calls = c.reduced = true;
           }),
      vary("fp8-forward-adapters-split", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.recipe = Recipe::kFp8Forward, c.wanted = frozen;
             c.d = 272, c.n = 336, c.lora.up = 72, c.lora.down = 80, c.column_blocks = 2;
             c.gate_layout = GateLayout::kSplit, c.clamp = 7, c.alpha = 1.702f, c.up_shift = 1;
           }),
      // The up-projection has no adapter, but stores A for that of W2.
      vary("fp8-forward-adapter-of-W2", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.recipe = Recipe::kFp8Forward, c.wanted = frozen;
             c.lora.down = 16, c.in_parts = c.dH_over_H = true;
           }),
      vary("fp8-recipe-general", shape,
           [&](Case& c) {
             compute_in_fp8(c), c.routing = RoutingKind::kGeneral, c.load = Load::kZipf;
             c.activation = Activation::kReGLU, c.capacity = 107, c.bad_ids = true;
             c.wanted.ds = false;  // as with grouped rows
           }),
      vary("fp8-recipe-no-token", shape, [&](Case& c) { compute_in_fp8(c), c.T = 0; }),
      vary("fp8-H", shape,
           [&](Case& c) {
             save_H_in_fp8(c), c.reduced = true;
             c.load = Load::kHalfEmpty, c.biases = c.padded = true;
           }),
      // The last block of scales has 80 columns.
      vary("fp8-H-split", shape,
           [&](Case& c) {
             save_H_in_fp8(c), c.d = 272, c.n = 336, c.T = 131;
             c.gate_layout = GateLayout::kSplit, c.biases = c.addend = c.float_scales = true;
             c.clamp = 7, c.alpha = 1.702f, c.up_shift = 1, c.dH_over_H = c.in_two_calls = true;
           }),
      vary("fp8-H-blocks", shape,
           [&](Case& c) {
             save_H_in_fp8(c), c.d = 400, c.column_blocks = 3, c.weight_blocks = 2;
             c.activation = Activation::kGeGLU, c.dH_over_H = c.reduced = true;
           }),
      vary("fp8-H-parts", shape,
           [&](Case& c) { save_H_in_fp8(c), c.in_parts = c.dH_over_H = true; }),
      vary("fp8-H-grouped", shape,
           [&](Case& c) { save_H_in_fp8(c), group(c), c.wanted.ds = false; }),
      vary("fp8-H-no-token", shape,
           [&](Case& c) { save_H_in_fp8(c), c.T = 0, c.dH_over_H = true; }),
  };
}

}  // namespace tilemoe::verify
