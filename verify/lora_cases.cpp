#include "lora_cases.h"

#include "vary.h"

namespace tilemoe::verify {

// Each combination that can fail alone: which weights have an adapter, the ranks, the order of
// H's columns with the major of the weights, and all that shares memory with P and Q.
std::vector<Case> lora_cases() {
  const Case shape{.T = 131, .d = 104, .n = 56, .E = 6, .K = 2, .lora = {.gate = 16, .down = 8}};
  const Gradients frozen{.dW1 = false, .dW2 = false, .db1 = false, .db2 = false};
  const Gradients none{.dX = false,
                       .dW1 = false,
                       .dW2 = false,
                       .db1 = false,
                       .db2 = false,
                       .ds = false,
                       .lora_1 = false,
                       .lora_2 = false};
  const auto transpose = [](Case& c) { c.W1_transposed = c.W2_transposed = true; };
  const auto ranks = [](Case& c, int32_t gate, int32_t up, int32_t down) {
    c.lora.gate = gate, c.lora.up = up, c.lora.down = down;
  };
  const auto group = [](Case& c) {
    c.routing = RoutingKind::kGrouped;
    c.T = c.K = 0, c.counts = {67, 0, 1, 129, 33}, c.E = 5, c.spare_rows = 9;
  };
  return {
      vary("lora", shape, [](Case& c) { c.biases = c.reduced = true; }),
      vary("lora-frozen-experts", shape,
           [&](Case& c) {
             c.wanted = frozen, c.load = Load::kHalfEmpty;
             c.lora.float32_factors = c.biases = c.reduced = true;
           }),
      vary("lora-W1-only", shape, [&](Case& c) { ranks(c, 64, 0, 0), c.wanted = frozen; }),
      vary("lora-W2-only", shape,
           [&](Case& c) { ranks(c, 0, 0, 64), c.W2_transposed = c.biases = true; }),
      vary("lora-plain", shape,
           [&](Case& c) {
             c.activation = Activation::kSiLU, ranks(c, 8, 0, 24);
             c.biases = c.lora.transposed = true;
           }),
      vary("lora-plain-transposed", shape,
           [&](Case& c) { c.activation = Activation::kReLUSquared, transpose(c); }),
      vary("lora-transposed", shape, [&](Case& c) { transpose(c), c.lora.transposed = true; }),
      vary("lora-interleaved", shape,
           [](Case& c) {
             c.gate_layout = GateLayout::kInterleaved;
             c.biases = c.padded = c.lora.transposed = true;
           }),
      vary("lora-interleaved-transposed", shape,
           [&](Case& c) {
             c.gate_layout = GateLayout::kInterleaved;
             c.clamp = 1.5f, c.alpha = 1.702f, c.up_shift = 1;
             transpose(c), c.biases = c.accumulate_dW = c.reduced = true;
           }),
      vary("lora-split", shape,
           [&](Case& c) {
             c.gate_layout = GateLayout::kSplit, ranks(c, 8, 24, 16);
             c.biases = c.float32_dW = c.lora.float32_factors = c.reduced = true;
           }),
      vary("lora-split-gate-only", shape,
           [&](Case& c) {
             c.gate_layout = GateLayout::kSplit, ranks(c, 16, 0, 8);
             c.accumulate_dW = c.float32_dW = true;
           }),
      vary("lora-up-only-transposed", shape,
           [&](Case& c) {
             c.gate_layout = GateLayout::kSplit, ranks(c, 0, 16, 0);
             transpose(c), c.lora.transposed = true;
           }),
      vary("lora-split-transposed", shape,
           [&](Case& c) {
             c.gate_layout = GateLayout::kSplit, ranks(c, 16, 8, 8);
             transpose(c), c.wanted = frozen;
           }),
      vary("lora-gradients-1-only", shape,
           [&](Case& c) { c.wanted = none, c.wanted.lora_1 = true; }),
      vary("lora-gradients-2-only", shape,
           [&](Case& c) { c.wanted = none, c.wanted.lora_2 = true; }),
      vary("lora-dX-only", shape, [&](Case& c) { c.wanted = none, c.wanted.dX = true; }),
      // Blocks of the rows of B2 and of the columns of A1.
      vary("lora-column-blocks", shape,
           [&](Case& c) {
             c.d = 200, c.column_blocks = 3, c.dH_over_H = c.addend = c.padded = true;
           }),
      vary("lora-blocks-transposed", shape,
           [&](Case& c) { c.d = 200, c.column_blocks = 2, transpose(c), c.biases = true; }),
      vary("lora-two-calls", shape,
           [](Case& c) { c.in_two_calls = c.addend = c.biases = c.reduced = true; }),
      vary("lora-parts", shape, [](Case& c) { c.in_parts = c.addend = c.reduced = true; }),
      vary("lora-parts-dH-over-H", shape,
           [](Case& c) { c.in_parts = c.dH_over_H = true, c.load = Load::kHalfEmpty; }),
      // More rows than one block of a sum over rows, and the largest rank.
      vary("lora-long-experts", shape,
           [&](Case& c) {
             c.T = 1607, c.d = 72, c.E = 3, c.activation = Activation::kGELU;
             ranks(c, 256, 0, 256);
           }),
      // Ranks whose gradients are sums of their own, and those that come with Q, by slices of columns
      // and chunks of rows.
      vary("lora-wide-ranks", shape,
           [&](Case& c) { ranks(c, 40, 0, 64), c.wanted = frozen, c.biases = c.reduced = true; }),
      vary("lora-slices", shape,
           [&](Case& c) { c.T = 1203, c.d = 1032, c.E = 3, ranks(c, 32, 0, 24); }),
      vary("lora-general", shape,
           [](Case& c) {
             c.routing = RoutingKind::kGeneral, c.load = Load::kZipf;
             c.capacity = 203, c.bad_ids = true;
           }),
      vary("lora-rounded", shape,
           [](Case& c) {
             c.routing = RoutingKind::kRounded, c.rounding = Rounding::kNearest;
             c.T = 405, c.m = 32;
           }),
      vary("lora-grouped", shape, [&](Case& c) { group(c), c.biases = c.reduced = true; }),
      vary("lora-grouped-without-scores", shape, [&](Case& c) { group(c), c.row_scores = false; }),
      vary("lora-no-token", shape, [](Case& c) { c.T = 0, c.reduced = true; }),
  };
}

}  // namespace tilemoe::verify
