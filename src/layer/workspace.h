// The memory plan of the layer: where each tensor lies in the caller's workspace, and its size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/backend.h"

namespace tilemoe {

// Columns of H: 2n, or n without a gate.
int64_t h_width(const tilemoe_experts& experts);

// Bytes of a (capacity, width) matrix.
size_t row_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec, int64_t width);

// The maximum number of rows of an expert; more than all rows if it is unknown.
int64_t rows_of_an_expert(const tilemoe_routing_spec& spec);

// Whether a backward that computes dX lets the activation gradient write the codes of dH, so that no
// step reads dH to quantise it. The codes then live next to A': both, each with its float32 numbers,
// must fit in the place that A and Y have in the forward pass of bf16. Not if H is saved as codes:
// over them lies A' first.
bool writes_dH_codes(const Backend& backend, const tilemoe_experts& experts);

// Columns of Y in memory at a time. In the fp8 recipe blocks have whole blocks of scales.
int64_t output_block_columns(const tilemoe_experts& experts);
// The same of dX~. If dH lies over H, dX~ has the whole place that A and Y had in the forward pass:
// the fewest blocks that fit there, of whole tiles of 256 if possible. In fp8_forward A was smaller,
// but the dequantised weights outweigh that. In the recipe fp8 dX~ and the codes of dH together have
// the place of dX~, or that of dW1, which is computed afterwards, if it is larger, and 1/32 more; dX~
// has at least a quarter of its columns.
int64_t input_block_columns(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                            bool dH_over_H);

// The scratch of a step while it runs.
struct ScratchRegion {
  size_t place = 0, size = 0;
};

// Which of the two GEMMs a forward runs: with one of them, A is the caller's.
enum class Gemms { kBoth, kFirst, kSecond };

// Rows as codes (Fp8Rows) in a workspace.
struct Fp8Region {
  size_t codes = 0, scales = 0;
};

// A lives until the last block of Y is made, a block of Y until the combine. P1 and P2 are here if
// the call saves nothing. Dequantised weights of a block of experts: W1 and W1_up live while A is
// made, in the place that Y and W2 have then. In the fp8 recipes A is its codes, and for an adapter of
// W2 its values too; the codes of X live while A is made; no weight is dequantised.
struct ForwardPlan {
  size_t A, Y, P1, P2, W1, W2, total;
  Fp8Region A_codes, X_codes;
  int64_t block_columns;  // of Y
  ScratchRegion scratch;

  ForwardPlan(const Backend& backend, const tilemoe_experts& experts,
              const tilemoe_routing_spec& spec, bool saves, const KernelPlan& kernels = {},
              Gemms gemms = Gemms::kBoth);
};

// Intermediate results of a backward.
struct BackwardWork {
  tilemoe_backward_mode mode = TILEMOE_BACKWARD_WHOLE;
  bool dH_over_H = false;  // OVER_H, and REST after it
  // A call without an addend and parts, whose dX has no gaps: codes may lie there until dX is written.
  // The size of a query suffices for both.
  bool dX_is_free = false;
  uint32_t gradients = 0;  // TILEMOE_GRADIENT_ bits

  bool wants(uint32_t any_of) const { return (gradients & any_of) != 0; }
  bool from_dH() const { return mode == TILEMOE_BACKWARD_REST; }
  // Whether dH has to be computed, for this call or for those that follow.
  bool needs_dH() const {
    return mode != TILEMOE_BACKWARD_WHOLE || wants(TILEMOE_GRADIENT_X | kOfW1);
  }
  // Whether dA' has to be computed.
  bool needs_activation_gradient() const {
    return !from_dH() && (needs_dH() || wants(kNeedsAScaled | TILEMOE_GRADIENT_S));
  }

  // Whether Q1 has to be computed.
  bool needs_Q1(const tilemoe_experts& experts) const {
    return experts.rank_1 > 0 && wants(TILEMOE_GRADIENT_X | TILEMOE_GRADIENT_LORA_1);
  }

  // A' is summed over.
  static constexpr uint32_t kNeedsAScaled = TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_LORA_2;
  static constexpr uint32_t kOfW1 = TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP |
                                    TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP |
                                    TILEMOE_GRADIENT_LORA_1;
  static constexpr uint32_t kFromDH = TILEMOE_GRADIENT_X | kOfW1;
  static constexpr uint32_t kAll =
      kFromDH | TILEMOE_GRADIENT_S | kNeedsAScaled | TILEMOE_GRADIENT_B2;
};

// Whether the backward overwrites the codes of H: A' of 16 bits lies over them until the gradients
// of W2 exist, and then the codes of dH, which are as many.
inline bool consumes_codes(const tilemoe_experts& experts, const BackwardWork& work) {
  return saves_fp8_H(experts) && work.mode == TILEMOE_BACKWARD_OVER_H;
}
inline bool A_scaled_over_codes(const tilemoe_experts& experts, const BackwardWork& work) {
  return consumes_codes(experts, work) && experts.dtype != TILEMOE_FLOAT32;
}

// dH lives from the activation gradient to the last step, and until calls of mode REST: it lies
// first, and nothing shares its place. The rest of the workspace holds, one after another in time:
// A' and Q2 with the partial sums of ds and the dequantised W2, then with the scratch of dW2 and of
// dA2 and dB2; Q1, with dX~ and the dequantised W1, then with the scratch of dW1, of the bias
// gradients and of dA1 and dB1. A tensor that is not requested has no place, so less work never
// needs more memory. In the fp8 recipe codes of dO and dH have the places of W2 and W1; if the
// activation gradient writes the codes of dH, they lie next to dH, and those of dO in dX, then the
// scratch of dW2 if it fits.
struct BackwardPlan {
  size_t dH = 0, A_scaled = 0, Q2 = 0, Q1 = 0, dX_rows = 0, ds_partial = 0, W1 = 0, W2 = 0;
  bool writes_dH_codes = false;  // the activation gradient does
  bool dW2_scratch_in_dX = false;
  Fp8Region dO_codes, dH_codes;
  size_t total = 0;
  int64_t block_columns = 0;  // of dX~
  ScratchRegion Q2_scratch, activation_scratch, dW2_scratch, lora_2_scratch;
  ScratchRegion Q1_scratch, dX_scratch, dW1_scratch, lora_1_scratch, bias_scratch;

  BackwardPlan(const Backend& backend, const tilemoe_experts& experts,
               const tilemoe_routing_spec& spec, const BackwardWork& work,
               const KernelPlan& kernels = {});
};

}  // namespace tilemoe
