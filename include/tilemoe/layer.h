// The Mixture-of-Experts layer in C++: forward, backward, inference, and the memory each needs.
// Semantics, shapes and errors are documented at the functions of the same name in tilemoe.h; every
// call throws tilemoe::Error on a bad argument, before anything is written.
#pragma once

#include "tilemoe/routing.h"

namespace tilemoe {

enum class Activation : int {
#define TILEMOE_ACTIVATION(name, NAME, Name, gated, formula) k##Name = TILEMOE_##NAME,
#include "tilemoe/activations.inc"
#undef TILEMOE_ACTIVATION
};

enum class GateLayout : int {
  kConcatenated = TILEMOE_GATE_CONCATENATED,
  kInterleaved = TILEMOE_GATE_INTERLEAVED,
  kSplit = TILEMOE_GATE_SPLIT,
};

// How a checkpoint stores a quantised weight: see tilemoe_format.
enum class Format : int {
  kNone = TILEMOE_FORMAT_NONE,
  kFp8 = TILEMOE_FORMAT_FP8,
  kMxfp4 = TILEMOE_FORMAT_MXFP4,
  kNf4 = TILEMOE_FORMAT_NF4,
  kNf4Double = TILEMOE_FORMAT_NF4_DOUBLE,
  kNvfp4 = TILEMOE_FORMAT_NVFP4,
};

enum class Pass : int {
  kInference = TILEMOE_PASS_INFERENCE,
  kForward = TILEMOE_PASS_FORWARD,
};

// How a backward pass is divided, and where dH lies: see tilemoe_backward_mode.
enum class BackwardMode : int {
  kWhole = TILEMOE_BACKWARD_WHOLE,
  kOverH = TILEMOE_BACKWARD_OVER_H,
  kFirst = TILEMOE_BACKWARD_FIRST,
  kRest = TILEMOE_BACKWARD_REST,
};

// The shapes of the members of both are those of tilemoe_weights.
struct Weights {
  ConstTensor W1 = {}, W1_up = {}, W2 = {};
  ConstTensor b1 = {}, b1_up = {}, b2 = {};

  tilemoe_weights to_c() const { return {sizeof(tilemoe_weights), W1, W1_up, W2, b1, b1_up, b2}; }
};
struct WeightGradients {
  Tensor W1 = {}, W1_up = {}, W2 = {};
  Tensor b1 = {}, b1_up = {}, b2 = {};

  tilemoe_weights to_c() const { return {sizeof(tilemoe_weights), W1, W1_up, W2, b1, b1_up, b2}; }
};

// One quantised weight of all experts: see tilemoe_quantized.
struct Quantized {
  Format format = Format::kNone;
  bool transposed = false;
  const void* codes = nullptr;
  const void* scales = nullptr;
  const float* scale_map = nullptr;
  const float* scale_of_scales = nullptr;
  const float* scale_offset = nullptr;

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

// The quantised weights of a call, for ForwardArgs::quantized and BackwardArgs::quantized.
struct QuantizedWeights : tilemoe_quantized_weights {
  explicit QuantizedWeights(const Quantized& of_W1 = {}, const Quantized& of_W2 = {},
                            const Quantized& of_W1_up = {})
      : tilemoe_quantized_weights{sizeof(tilemoe_quantized_weights), of_W1, of_W1_up, of_W2} {}
};

// Writes the values of a weight to `out` (E, R, C), contiguous in the order of its codes.
inline void dequantize(Device device, const Quantized& weight, const Tensor& out,
                       void* stream = nullptr) {
  tilemoe_dequantize_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(device);
  args.weight = weight, args.out = out, args.stream = stream;
  check(tilemoe_dequantize(&args));
}

// Values (E, R, C) as e4m3 codes (E, R, C) with a scale per block of block_rows x 128 values.
struct QuantizeFp8 {
  Device device;
  ConstTensor values;         // (E, R, C)
  uint8_t* codes;             // (E, R, C)
  float* scales;              // (E, R / part_rows * (part_rows / block_rows), C / 128), rounded up
  int32_t block_rows = 1;     // or 128
  bool float_scales = false;  // not only powers of two
  int64_t part_rows = 0;      // rows that share blocks; 0: all
  void* stream = nullptr;
};
inline void quantize_fp8(const QuantizeFp8& given) {
  tilemoe_quantize_fp8_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(given.device);
  args.block_rows = given.block_rows, args.float_scales = given.float_scales;
  args.part_rows = given.part_rows, args.values = given.values;
  args.codes = given.codes, args.scales = given.scales, args.stream = given.stream;
  check(tilemoe_quantize_fp8(&args));
}

// Low-rank adapters of the weights, and their gradients. The shapes are those of tilemoe_lora.
struct Lora {
  ConstTensor A1 = {}, B1 = {};        // (E, r, d), (E, 2n, r)
  ConstTensor A1_up = {}, B1_up = {};  // (E, r, d), (E, n, r): a split gate's alone
  ConstTensor A2 = {}, B2 = {};        // (E, r, n), (E, d, r)
  float scale_1 = 1, scale_2 = 1;

  tilemoe_lora to_c() const {
    return {sizeof(tilemoe_lora), A1, B1, A1_up, B1_up, A2, B2, scale_1, scale_2};
  }
};
struct LoraGradients {
  Tensor A1 = {}, B1 = {}, A1_up = {}, B1_up = {}, A2 = {}, B2 = {};

  tilemoe_lora to_c() const { return {sizeof(tilemoe_lora), A1, B1, A1_up, B1_up, A2, B2, 0, 0}; }
};

// What forward keeps for backward. The library keeps its state here.
struct Saved : tilemoe_saved {
  Saved() : tilemoe_saved{} { struct_size = sizeof(tilemoe_saved); }
  // H (capacity, 2n), or (capacity, n) if the activation is not gated
  explicit Saved(const Tensor& pre_activation) : Saved() { H = pre_activation; }
  // P1 (capacity, rank_1) and P2 (capacity, rank_2), each absent without its adapter
  Saved(const Tensor& pre_activation, const Tensor& low_rank_1, const Tensor& low_rank_2)
      : Saved(pre_activation) {
    P1 = low_rank_1, P2 = low_rank_2;
  }
};

struct ForwardArgs {
  const tilemoe_routing* routing = nullptr;
  Weights weights = {};
  ConstTensor X = {};       // (T, d); grouped: (capacity, d)
  Tensor O = {};            // out, X's shape
  ConstTensor addend = {};  // X's shape; optional
  Saved* saved = nullptr;   // null: inference, H is not written
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
  int block_turns = 0;
  const tilemoe_part* part = nullptr;
  const tilemoe_packed_lora* lora = nullptr;  // from Experts::pack_lora(); null without adapters
  const tilemoe_quantized_weights* quantized = nullptr;  // QuantizedWeights; null without any

  // The C struct, valid as long as `c_weights` exists.
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
    return args;
  }
};

struct BackwardArgs {
  BackwardMode mode = BackwardMode::kWhole;
  bool accumulate = false;  // dweights are added to instead of written
  const tilemoe_routing* routing = nullptr;
  Weights weights = {};
  ConstTensor X = {};
  ConstTensor dO = {};  // absent in kRest
  Saved* saved = nullptr;
  Tensor dX = {};           // out, X's shape; as all below, computed if it is given
  ConstTensor addend = {};  // added to dX; optional
  WeightGradients dweights = {};
  Tensor ds = {};  // (pairs) float32, or (T, K) for top-K
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
  int block_turns = 0;
  const tilemoe_part* part = nullptr;
  const tilemoe_packed_lora* lora = nullptr;
  LoraGradients dlora = {};
  const tilemoe_quantized_weights* quantized = nullptr;

  // The C struct, valid as long as the weights and gradients exist.
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

// The function of the experts, and their device. A value without resources:
//   const Experts experts{.device = Device::kCpu, .d = 256, .n = 128, .E = 16};
struct Experts {
  Required<Device> device;
  DType dtype = DType::kFloat32;
  int64_t d = 0, n = 0, E = 0;
  Activation activation = Activation::kSwiGLU;
  GateLayout gate_layout = GateLayout::kConcatenated;
  float clamp = 0, alpha = 0, up_shift = 0;
  int32_t column_blocks = 0;
  int32_t rank_1 = 0, rank_2 = 0;                             // of adapters
  Format format_1 = Format::kNone, format_2 = Format::kNone;  // of quantised weights
  int32_t weight_blocks = 0;

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
    return experts;
  }

  bool gated() const {
    return tilemoe_activation_gated(static_cast<tilemoe_activation>(activation)) != 0;
  }
  // Columns of H: 2n, or n if the activation is not gated.
  int64_t h_width() const { return gated() ? 2 * n : n; }

  tilemoe_saved_size saved_bytes(const tilemoe_routing_spec& routing) const {
    const tilemoe_experts experts = to_c();
    tilemoe_saved_size size{};
    size.struct_size = sizeof size;
    check(tilemoe_saved_bytes(&experts, &routing, &size));
    return size;
  }
  size_t workspace_bytes(const tilemoe_routing_spec& routing, Pass pass) const {
    return bytes_of(routing, static_cast<tilemoe_pass>(pass), TILEMOE_BACKWARD_WHOLE, 0);
  }
  // `gradients` are TILEMOE_GRADIENT_ bits; 0 stands for all that the mode has.
  size_t workspace_bytes(const tilemoe_routing_spec& routing, BackwardMode mode,
                         uint32_t gradients = 0) const {
    return bytes_of(routing, TILEMOE_PASS_BACKWARD, static_cast<tilemoe_backward_mode>(mode),
                    gradients);
  }
  size_t packed_lora_bytes() const {
    const tilemoe_experts experts = to_c();
    size_t size = 0;
    check(tilemoe_packed_lora_bytes(&experts, &size));
    return size;
  }
  // Packs adapters into `memory`, of packed_lora_bytes() bytes or more, for forward() and backward()
  // with weights of these strides.
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

  void forward(const ForwardArgs& args) const {
    const tilemoe_experts experts = to_c();
    const tilemoe_weights weights = args.weights.to_c();
    const tilemoe_forward_args c_args = args.to_c(weights);
    check(tilemoe_forward(&experts, &c_args));
  }
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
