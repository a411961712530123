/// @file
/// The Mixture-of-Experts layer in C++: forward, backward, inference, and the memory of each. The
/// functions of the same name in tilemoe.h document semantics, shapes and errors; every call throws
/// tilemoe::Error on a bad argument, before it writes anything.
#pragma once

#include "tilemoe/routing.h"

namespace tilemoe {

/// Activation of the experts, see tilemoe_activation.
enum class Activation : int {
#define TILEMOE_ACTIVATION(name, NAME, Name, gated, formula) k##Name = TILEMOE_##NAME,
#include "tilemoe/activations.inc"
#undef TILEMOE_ACTIVATION
};

/// Position of W1's gate and up rows, see tilemoe_gate_layout.
enum class GateLayout : int {
  kConcatenated = TILEMOE_GATE_CONCATENATED,
  kInterleaved = TILEMOE_GATE_INTERLEAVED,
  kSplit = TILEMOE_GATE_SPLIT,
};

/// Format of a quantised weight in a checkpoint, see tilemoe_format.
enum class Format : int {
  kNone = TILEMOE_FORMAT_NONE,
  kFp8 = TILEMOE_FORMAT_FP8,
  kMxfp4 = TILEMOE_FORMAT_MXFP4,
  kNf4 = TILEMOE_FORMAT_NF4,
  kNf4Double = TILEMOE_FORMAT_NF4_DOUBLE,
  kNvfp4 = TILEMOE_FORMAT_NVFP4,
};

/// How the GEMMs of the experts compute, see tilemoe_recipe.
enum class Recipe : int {
  kBf16 = TILEMOE_RECIPE_BF16,
  kFp8 = TILEMOE_RECIPE_FP8,
  kFp8Forward = TILEMOE_RECIPE_FP8_FORWARD,
};

/// A forward pass, see tilemoe_pass.
enum class Pass : int {
  kInference = TILEMOE_PASS_INFERENCE,
  kForward = TILEMOE_PASS_FORWARD,
};

/// Division of a backward pass and place of dH, see tilemoe_backward_mode.
enum class BackwardMode : int {
  kWhole = TILEMOE_BACKWARD_WHOLE,
  kOverH = TILEMOE_BACKWARD_OVER_H,
  kFirst = TILEMOE_BACKWARD_FIRST,
  kRest = TILEMOE_BACKWARD_REST,
};

/// Weights of the experts, see tilemoe_weights.
struct Weights {
  ConstTensor W1 = {};     ///< (E, 2n, d), or (E, n, d) if split or not gated
  ConstTensor W1_up = {};  ///< (E, n, d) if split, else absent
  ConstTensor W2 = {};     ///< (E, d, n)
  ConstTensor b1 = {};     ///< (E, 2n), or (E, n) if split or not gated; optional
  ConstTensor b1_up = {};  ///< (E, n) if split and biased, else absent
  ConstTensor b2 = {};     ///< (E, d); optional

  /// Returns the C struct.
  tilemoe_weights to_c() const { return {sizeof(tilemoe_weights), W1, W1_up, W2, b1, b1_up, b2}; }
};
/// Gradients of the weights, each with its weight's shape. An absent gradient is not computed.
struct WeightGradients {
  Tensor W1 = {};     ///< out, W1's shape
  Tensor W1_up = {};  ///< out, W1_up's shape
  Tensor W2 = {};     ///< out, W2's shape
  Tensor b1 = {};     ///< out, b1's shape
  Tensor b1_up = {};  ///< out, b1_up's shape
  Tensor b2 = {};     ///< out, b2's shape

  /// Returns the C struct.
  tilemoe_weights to_c() const { return {sizeof(tilemoe_weights), W1, W1_up, W2, b1, b1_up, b2}; }
};

/// A quantised weight of all experts, see tilemoe_quantized.
struct Quantized {
  Format format = Format::kNone;           ///< kNone: absent
  bool transposed = false;                 ///< true: the values are (E, columns, rows)
  const void* codes = nullptr;             ///< one narrow number per value
  const void* scales = nullptr;            ///< one number per block of values
  const float* scale_map = nullptr;        ///< kNf4Double: (256)
  const float* scale_of_scales = nullptr;  ///< kNf4Double: (E*R*C/64/256); kNvfp4: (E)
  const float* scale_offset = nullptr;     ///< kNf4Double: (1)

  /// Returns the C struct.
  operator tilemoe_quantized() const {
    return {static_cast<tilemoe_format>(format),
            transposed,
            codes,
            scales,
            scale_map,
            scale_of_scales,
            scale_offset};
  }
};

/// Quantised weights of a call, for ForwardArgs::quantized and BackwardArgs::quantized.
struct QuantizedWeights : tilemoe_quantized_weights {
  /// Takes the quantised weights; the default is absent.
  explicit QuantizedWeights(const Quantized& of_W1 = {}, const Quantized& of_W2 = {},
                            const Quantized& of_W1_up = {})
      : tilemoe_quantized_weights{
            sizeof(tilemoe_quantized_weights), of_W1, of_W1_up, of_W2, {}, {}, {}} {}
  /// Adds the same weights transposed, which the backward of Recipe::kFp8 reads.
  QuantizedWeights& transposed(const Quantized& of_W1, const Quantized& of_W2,
                               const Quantized& of_W1_up = {}) {
    W1_transposed = of_W1, W1_up_transposed = of_W1_up, W2_transposed = of_W2;
    return *this;
  }
};

/// Writes the values of a weight to `out` (E, R, C), contiguous, in the order of its codes.
inline void dequantize(Device device, const Quantized& weight, const Tensor& out,
                       void* stream = nullptr) {
  tilemoe_dequantize_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(device);
  args.weight = weight, args.out = out, args.stream = stream;
  check(tilemoe_dequantize(&args));
}

/// Arguments of quantize_fp8(), see tilemoe_quantize_fp8_args.
struct QuantizeFp8 {
  Device device;
  ConstTensor values;         ///< (E, R, C)
  uint8_t* codes;             ///< out (E, R, C)
  float* scales;              ///< out (E, S, C/128 rounded up)
  int32_t block_rows = 1;     ///< 1 or 128
  bool float_scales = false;  ///< scales are not only powers of two
  int64_t part_rows = 0;      ///< rows of a part; 0: all
  void* stream = nullptr;
  uint8_t* transposed_codes = nullptr;  ///< out (E, C, R); optional
  float* transposed_scales = nullptr;   ///< out (E, C/128 rounded up, S)
};
/// Quantises values to e4m3 with one scale per block, see tilemoe_quantize_fp8().
inline void quantize_fp8(const QuantizeFp8& given) {
  tilemoe_quantize_fp8_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(given.device);
  args.block_rows = given.block_rows, args.float_scales = given.float_scales;
  args.part_rows = given.part_rows, args.values = given.values;
  args.codes = given.codes, args.scales = given.scales, args.stream = given.stream;
  args.transposed_codes = given.transposed_codes, args.transposed_scales = given.transposed_scales;
  check(tilemoe_quantize_fp8(&args));
}

/// Low-rank adapters of the weights, see tilemoe_lora.
struct Lora {
  ConstTensor A1 = {};     ///< (E, r, d)
  ConstTensor B1 = {};     ///< (E, 2n, r), or (E, n, r) if split or not gated
  ConstTensor A1_up = {};  ///< (E, r, d), only if split
  ConstTensor B1_up = {};  ///< (E, n, r), only if split
  ConstTensor A2 = {};     ///< (E, r, n)
  ConstTensor B2 = {};     ///< (E, d, r)
  float scale_1 = 1;       ///< factor of B1 A1 and of B1_up A1_up
  float scale_2 = 1;       ///< factor of B2 A2

  /// Returns the C struct.
  tilemoe_lora to_c() const {
    return {sizeof(tilemoe_lora), A1, B1, A1_up, B1_up, A2, B2, scale_1, scale_2};
  }
};
/// Gradients of the adapters, each with its factor's shape. An absent gradient is not computed.
struct LoraGradients {
  Tensor A1 = {};     ///< out (E, r, d)
  Tensor B1 = {};     ///< out (E, 2n, r), or (E, n, r) if split or not gated
  Tensor A1_up = {};  ///< out (E, r, d), only if split
  Tensor B1_up = {};  ///< out (E, n, r), only if split
  Tensor A2 = {};     ///< out (E, r, n)
  Tensor B2 = {};     ///< out (E, d, r)

  /// Returns the C struct.
  tilemoe_lora to_c() const { return {sizeof(tilemoe_lora), A1, B1, A1_up, B1_up, A2, B2, 0, 0}; }
};

/// State that forward saves for backward, see tilemoe_saved. The library updates it.
struct Saved : tilemoe_saved {
  /// Makes an empty state.
  Saved() : tilemoe_saved{} { struct_size = sizeof(tilemoe_saved); }
  /// Takes the memory of H (capacity, 2n), or (capacity, n) if the activation is not gated.
  explicit Saved(const Tensor& pre_activation) : Saved() { H = pre_activation; }
  /// Takes the memory of H, P1 (capacity, rank_1) and P2 (capacity, rank_2). P1 or P2 is absent
  /// without its adapter.
  Saved(const Tensor& pre_activation, const Tensor& low_rank_1, const Tensor& low_rank_2)
      : Saved(pre_activation) {
    P1 = low_rank_1, P2 = low_rank_2;
  }
  /// Takes the memory of H as codes and scales, with Experts::format_H FP8. Backward in mode OVER_H
  /// also requires `H`, the memory of dH (capacity, 2n).
  Saved(uint8_t* codes, float* scales) : Saved() { H_codes = codes, H_scales = scales; }
};

/// Arguments of Experts::forward(), see tilemoe_forward_args.
struct ForwardArgs {
  const tilemoe_routing* routing = nullptr;   ///< the routing of the batch
  Weights weights = {};                       ///< the weights
  ConstTensor X = {};                         ///< (T, d); grouped: (capacity, d)
  Tensor O = {};                              ///< out, X's shape
  ConstTensor addend = {};                    ///< X's shape; optional
  Saved* saved = nullptr;                     ///< null: inference, H is not written
  void* workspace = nullptr;                  ///< any contents
  size_t workspace_bytes = 0;                 ///< at least Experts::workspace_bytes()
  void* stream = nullptr;                     ///< cudaStream_t
  int block_turns = 0;                        ///< CUDA: CTAs per SM of a GEMM; 0 stands for 1
  const tilemoe_part* part = nullptr;         ///< null: the whole pass
  const tilemoe_packed_lora* lora = nullptr;  ///< from Experts::pack_lora(); null without adapters
  const tilemoe_quantized_weights* quantized = nullptr;  ///< QuantizedWeights; null without any
  const uint8_t* X_codes = nullptr;  ///< FP8 recipes: X as codes, X's shape; X is then absent
  const float* X_scales = nullptr;   ///< with X_codes: (T, d/128 rounded up)

  /// Returns the C struct, valid as long as `c_weights` exists.
  tilemoe_forward_args to_c(const tilemoe_weights& c_weights) const {
    tilemoe_forward_args args{};
    args.struct_size = sizeof args;
    args.routing = routing, args.weights = &c_weights;
    args.X = X, args.O = O, args.addend = addend;
    args.saved = saved;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    args.block_turns = block_turns;
    args.part = part;
    args.lora = lora;
    args.quantized = quantized;
    args.X_codes = X_codes, args.X_scales = X_scales;
    return args;
  }
};

/// Arguments of Experts::backward(), see tilemoe_backward_args. The gradient of an absent output is
/// not computed.
struct BackwardArgs {
  BackwardMode mode = BackwardMode::kWhole;   ///< division of the pass
  bool accumulate = false;                    ///< true: add to dweights and dlora
  const tilemoe_routing* routing = nullptr;   ///< as in forward
  Weights weights = {};                       ///< as in forward
  ConstTensor X = {};                         ///< as in forward
  ConstTensor dO = {};                        ///< X's shape; not read in kRest
  Saved* saved = nullptr;                     ///< the state that forward saved
  Tensor dX = {};                             ///< out, X's shape
  ConstTensor addend = {};                    ///< added to dX; X's shape; optional
  WeightGradients dweights = {};              ///< out
  Tensor ds = {};                             ///< out (pairs) float32, or (T, K) for top-K
  void* workspace = nullptr;                  ///< any contents; kRest after kFirst: kFirst's
  size_t workspace_bytes = 0;                 ///< at least Experts::workspace_bytes()
  void* stream = nullptr;                     ///< cudaStream_t
  int block_turns = 0;                        ///< as in forward
  const tilemoe_part* part = nullptr;         ///< null: the whole call
  const tilemoe_packed_lora* lora = nullptr;  ///< as in forward
  LoraGradients dlora = {};                   ///< out
  const tilemoe_quantized_weights* quantized = nullptr;  ///< as in forward

  /// Returns the C struct, valid as long as the weights and gradients exist.
  tilemoe_backward_args to_c(const tilemoe_weights& c_weights, const tilemoe_weights& c_dweights,
                             const tilemoe_lora& c_dlora) const {
    tilemoe_backward_args args{};
    args.struct_size = sizeof args;
    args.mode = static_cast<tilemoe_backward_mode>(mode);
    args.accumulate = accumulate;
    args.routing = routing, args.weights = &c_weights;
    args.X = X, args.dO = dO;
    args.saved = saved;
    args.dX = dX, args.addend = addend;
    args.dweights = &c_dweights;
    args.ds = ds;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    args.block_turns = block_turns;
    args.part = part;
    args.lora = lora;
    args.dlora = &c_dlora;
    args.quantized = quantized;
    return args;
  }
};

/// Sizes and function of the experts, see tilemoe_experts. A value without resources:
///
///     const Experts experts{.device = Device::kCpu, .d = 256, .n = 128, .E = 16};
struct Experts {
  Required<Device> device;                             ///< device of the arrays
  DType dtype = DType::kFloat32;                       ///< dtype of X, O, weights, biases and H
  int64_t d = 0;                                       ///< width of a token
  int64_t n = 0;                                       ///< width inside an expert
  int64_t E = 0;                                       ///< experts
  Activation activation = Activation::kSwiGLU;         ///< activation of the experts
  GateLayout gate_layout = GateLayout::kConcatenated;  ///< position of W1's gate and up rows
  float clamp = 0;                  ///< SwiGLU only, as alpha and up_shift: bound of gate and up
  float alpha = 0;                  ///< factor inside the sigmoid
  float up_shift = 0;               ///< addend of up
  int32_t column_blocks = 0;        ///< column blocks of Y and dX~; 0 or 1: all columns at once
  int32_t rank_1 = 0;               ///< rank of W1's adapter; 0: none
  int32_t rank_2 = 0;               ///< rank of W2's adapter; 0: none
  Format format_1 = Format::kNone;  ///< format of W1 and W1_up
  Format format_2 = Format::kNone;  ///< format of W2
  int32_t weight_blocks = 0;        ///< blocks of experts to dequantise; 0 or 1: all at once
  Recipe recipe = Recipe::kBf16;    ///< how the GEMMs compute
  bool float_scales = false;        ///< FP8 recipes: scales of rows are not only powers of two
  Format format_H = Format::kNone;  ///< format of the saved H: kNone or kFp8

  /// Returns the C struct.
  tilemoe_experts to_c() const {
    tilemoe_experts experts{};
    experts.struct_size = sizeof experts;
    experts.device = tilemoe::to_c(device);
    experts.dtype = tilemoe::to_c(dtype);
    experts.d = d, experts.n = n, experts.E = E;
    experts.activation = static_cast<tilemoe_activation>(activation);
    experts.gate_layout = static_cast<tilemoe_gate_layout>(gate_layout);
    experts.clamp = clamp, experts.alpha = alpha, experts.up_shift = up_shift;
    experts.column_blocks = column_blocks;
    experts.rank_1 = rank_1, experts.rank_2 = rank_2;
    experts.format_1 = static_cast<tilemoe_format>(format_1);
    experts.format_2 = static_cast<tilemoe_format>(format_2);
    experts.weight_blocks = weight_blocks;
    experts.recipe = static_cast<tilemoe_recipe>(recipe);
    experts.float_scales = float_scales;
    experts.format_H = static_cast<tilemoe_format>(format_H);
    return experts;
  }

  /// Returns whether W1 has gate and up rows.
  bool gated() const {
    return tilemoe_activation_gated(static_cast<tilemoe_activation>(activation)) != 0;
  }
  /// Returns the columns of H: 2n, or n if the activation is not gated.
  int64_t h_width() const { return gated() ? 2 * n : n; }

  /// Returns the bytes that must be kept from forward to backward, see tilemoe_saved_bytes().
  tilemoe_saved_size saved_bytes(const tilemoe_routing_spec& routing) const {
    const tilemoe_experts experts = to_c();
    tilemoe_saved_size size{};
    size.struct_size = sizeof size;
    check(tilemoe_saved_bytes(&experts, &routing, &size));
    return size;
  }
  /// Returns the bytes of the workspace of a forward pass, see tilemoe_workspace_bytes().
  size_t workspace_bytes(const tilemoe_routing_spec& routing, Pass pass) const {
    return bytes_of(routing, static_cast<tilemoe_pass>(pass), TILEMOE_BACKWARD_WHOLE, 0);
  }
  /// Returns the bytes of the workspace of a backward call. `gradients` are tilemoe_gradient bits;
  /// 0 stands for all of the mode.
  size_t workspace_bytes(const tilemoe_routing_spec& routing, BackwardMode mode,
                         uint32_t gradients = 0) const {
    return bytes_of(routing, TILEMOE_PASS_BACKWARD, static_cast<tilemoe_backward_mode>(mode),
                    gradients);
  }
  /// Returns the bytes of the memory of packed adapters.
  size_t packed_lora_bytes() const {
    const tilemoe_experts experts = to_c();
    size_t size = 0;
    check(tilemoe_packed_lora_bytes(&experts, &size));
    return size;
  }
  /// Packs adapters into `memory`, which has at least packed_lora_bytes() bytes, for forward() and
  /// backward() with weights of these strides, see tilemoe_pack_lora().
  tilemoe_packed_lora pack_lora(const Lora& lora, const Weights& weights, void* memory,
                                size_t bytes, void* stream = nullptr) const {
    const tilemoe_experts experts = to_c();
    const tilemoe_lora c_lora = lora.to_c();
    const tilemoe_weights c_weights = weights.to_c();
    tilemoe_pack_lora_args args{};
    args.struct_size = sizeof args;
    args.lora = &c_lora, args.weights = &c_weights;
    args.memory = memory, args.bytes = bytes, args.stream = stream;
    tilemoe_packed_lora packed{};
    packed.struct_size = sizeof packed;
    check(tilemoe_pack_lora(&experts, &args, &packed));
    return packed;
  }

  /// Computes the forward pass, or inference without a saved state, see tilemoe_forward().
  void forward(const ForwardArgs& args) const {
    const tilemoe_experts experts = to_c();
    const tilemoe_weights weights = args.weights.to_c();
    const tilemoe_forward_args c_args = args.to_c(weights);
    check(tilemoe_forward(&experts, &c_args));
  }
  /// Computes the gradients, see tilemoe_backward().
  void backward(const BackwardArgs& args) const {
    const tilemoe_experts experts = to_c();
    const tilemoe_weights weights = args.weights.to_c(), gradients = args.dweights.to_c();
    const tilemoe_lora dlora = args.dlora.to_c();
    const tilemoe_backward_args c_args = args.to_c(weights, gradients, dlora);
    check(tilemoe_backward(&experts, &c_args));
  }

 private:
  size_t bytes_of(const tilemoe_routing_spec& routing, tilemoe_pass pass,
                  tilemoe_backward_mode mode, uint32_t gradients) const {
    const tilemoe_experts experts = to_c();
    tilemoe_workspace_query query{};
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &routing;
    query.pass = pass, query.mode = mode, query.gradients = gradients;
    size_t size = 0;
    check(tilemoe_workspace_bytes(&query, &size));
    return size;
  }
};

}  // namespace tilemoe
