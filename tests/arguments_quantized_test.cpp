// Quantised weights: each argument of forward, backward, the sizes and a dequantisation wrong.
#include <limits>

#include "arguments_layer_problem.h"
#include "tilemoe/layer.h"

namespace tilemoe::arguments {
namespace {

// A layer whose W1 is NF4_DOUBLE, and W2 NVFP4.
template <bool kBackward, bool kSplit = false>
struct QuantizedPass : Pass<kBackward, kSplit> {
  tilemoe_quantized_weights quantized{};

  QuantizedPass() {
    constexpr int64_t kW1 = kE * (kSplit ? kN : 2 * kN) * kD;
    quantized.struct_size = sizeof quantized;
    quantized.W1 = new_weight(*this, TILEMOE_FORMAT_NF4_DOUBLE, kW1, kE);
    if (kSplit) quantized.W1_up = new_weight(*this, TILEMOE_FORMAT_NF4_DOUBLE, kW1, kE);
    quantized.W2 = new_weight(*this, TILEMOE_FORMAT_NVFP4, kE * kD * kN, kE);
    W1 = this->weights.W1, W2 = this->weights.W2;
    this->weights.W1 = this->weights.W1_up = this->weights.W2 = {};
    this->dweights.W1 = this->dweights.W1_up = this->dweights.W2 = {};
    this->experts.format_1 = TILEMOE_FORMAT_NF4_DOUBLE;
    this->experts.format_2 = TILEMOE_FORMAT_NVFP4;
    this->forward.quantized = this->backward.quantized = &quantized;
    const size_t needed =
        std::max(this->forward_workspace(), this->backward_workspace(TILEMOE_BACKWARD_WHOLE));
    this->forward.workspace = this->backward.workspace = shared_workspace.take(needed);
    this->forward.workspace_bytes = this->backward.workspace_bytes = needed;
  }
  tilemoe_tensor W1, W2;  // those of a layer that is not quantised
};

const void* after(const void* pointer, int bytes) {
  return static_cast<const char*>(pointer) + bytes;
}
template <class Element>
void move(const Element*& pointer, int bytes) {
  pointer = static_cast<const Element*>(after(pointer, bytes));
}
template <class Element>
Element* writable(const Element* pointer) {
  return const_cast<Element*>(pointer);
}

template <class P>
Cases<P> pass_cases() {
  Cases<P> cases = {
    BAD(p.args().quantized = nullptr, "quantized is null", "format_1 is nf4_double", "nvfp4"),
    BAD(p.experts.format_1 = p.experts.format_2 = TILEMOE_FORMAT_NONE, "quantized is given",
        "format_1 is none"),
    BAD(p.quantized.struct_size = 8, "quantized.struct_size"),
    BAD(p.quantized.W1.format = TILEMOE_FORMAT_NF4, "quantized.W1.format is nf4,",
        "expected nf4_double"),
    BAD(p.quantized.W1 = {}, "quantized.W1.format is none", "expected nf4_double"),
    BAD(p.quantized.W2.format = tilemoe_format(6), "quantized.W2.format is unknown format",
        "expected nvfp4"),
    BAD(p.experts.format_2 = TILEMOE_FORMAT_FP8, "quantized.W2.format is nvfp4", "expected fp8"),
    BAD(p.experts.format_2 = TILEMOE_FORMAT_NONE, "quantized.W2.format is nvfp4", "expected none"),
    BAD(p.experts.format_2 = TILEMOE_FORMAT_NONE; p.quantized.W2 = {}, "weights.W2 is absent"),
    BAD(p.weights.W1 = p.W1, "weights.W1", "expected none", "quantised"),
    BAD(p.weights.W2 = p.W2, "weights.W2", "expected none", "quantised"),
    BAD(p.quantized.W1.transposed = 2, "quantized.W1.transposed is 2"),
    BAD(p.quantized.W1.codes = nullptr, "quantized.W1.codes is 0", "an array"),
    BAD(p.quantized.W2.scales = nullptr, "quantized.W2.scales is 0", "an array"),
    BAD(p.quantized.W1.scale_map = nullptr, "quantized.W1.scale_map is 0", "an array"),
    BAD(p.quantized.W1.scale_offset = nullptr, "quantized.W1.scale_offset is 0", "an array"),
    BAD(p.quantized.W1.scale_of_scales = nullptr, "quantized.W1.scale_of_scales is 0"),
    BAD(p.quantized.W2.scale_of_scales = nullptr, "quantized.W2.scale_of_scales is 0"),
    BAD(p.quantized.W2.scale_map = p.quantized.W1.scale_map, "quantized.W2.scale_map",
        "expected null", "nvfp4"),
    BAD(p.quantized.W2.scale_offset = p.quantized.W1.scale_map, "quantized.W2.scale_offset",
        "expected null"),
    BAD(p.quantized.W1.codes = after(p.quantized.W1.codes, 8), "quantized.W1.codes",
        "not aligned to 16 bytes"),
    BAD(move(p.quantized.W2.scale_of_scales, 2), "quantized.W2.scale_of_scales",
        "not aligned to 4 bytes"),
    // A row of MXFP4 has 24 values, and is not transposed.
    BAD(p.experts.format_1 = p.quantized.W1.format = TILEMOE_FORMAT_MXFP4;
        p.quantized.W1_up.format = TILEMOE_FORMAT_MXFP4, "quantized.W1 is mxfp4 of (5,",
        "24) values", "multiple of 32"),
    BAD(p.experts.reserved = 1, "experts.reserved is 1"),
    BAD(p.args().workspace_bytes = p.needed() - 1, "workspace has"),
  };
  BAD_VALUES(cases, "format_1", p.experts.format_1 = tilemoe_format(v), -1, 6, INT32_MAX);
  BAD_VALUES(cases, "format_2", p.experts.format_2 = tilemoe_format(v), -1, 6, INT32_MIN);
  BAD_VALUES(cases, "weight_blocks", p.experts.weight_blocks = int32_t(v), -1, INT32_MIN);
  return cases;
}

#define ALIAS(output, other, ...) BAD(__VA_ARGS__, output, other, "shares memory with")

template <bool kSplit>
void run_forward_cases() {
  using P = QuantizedPass<false, kSplit>;
  auto cases = pass_cases<P>();
  append<P>(
      cases,
      {ALIAS("O", "quantized.W1", p.forward.O.data = const_cast<void*>(p.quantized.W1.codes)),
       ALIAS("O", "quantized.W2", p.forward.O.data = writable(p.quantized.W2.scale_of_scales)),
       ALIAS("workspace", "quantized.W2", p.quantized.W2.codes = p.forward.workspace)});
  if (kSplit)
    append<P>(cases, {BAD(p.quantized.W1_up = {}, "quantized.W1_up.format is none"),
                      BAD(p.weights.W1_up = p.W1, "weights.W1_up", "quantised"),
                      BAD(p.quantized.W1_up.transposed = 1, "quantized.W1.transposed is 0",
                          "W1_up's is 1")});
  else
    append<P>(cases, {BAD(p.quantized.W1_up.transposed = 1, "quantized.W1_up.transposed is 1",
                          "format is none"),
                      BAD(p.quantized.W1_up = p.quantized.W1,
                          "quantized.W1_up.format is nf4_double", "expected none"),
                      BAD(p.quantized.W1_up.codes = p.quantized.W1.codes, "quantized.W1_up.codes",
                          "expected null")});
  run_cases(cases);
}

template <bool kSplit>
void run_backward_cases() {
  using P = QuantizedPass<true, kSplit>;
  auto cases = pass_cases<P>();
  append<P>(cases, {BAD(p.dweights.W1 = p.W1, "dweights.W1", "quantised", "no gradient"),
                    BAD(p.dweights.W2 = p.W2, "dweights.W2", "quantised", "no gradient"),
                    ALIAS("dX", "quantized.W1",
                          p.backward.dX.data = const_cast<void*>(p.quantized.W1.scales))});
  if (kSplit) append<P>(cases, {BAD(p.dweights.W1_up = p.W1, "dweights.W1_up", "no gradient")});
  run_cases(cases);
}

TEST(QuantizedArguments, Forward) {
  run_forward_cases<false>();
}
TEST(QuantizedArguments, ForwardSplit) {
  run_forward_cases<true>();
}
TEST(QuantizedArguments, Backward) {
  run_backward_cases<false>();
}
TEST(QuantizedArguments, BackwardSplit) {
  run_backward_cases<true>();
}

// Gradients in the workspace query are those of the weights that have one.
TEST(QuantizedArguments, WorkspaceOfGradients) {
  const QuantizedPass<true> p;
  tilemoe_workspace_query query{};
  query.struct_size = sizeof query;
  query.experts = &p.experts, query.routing = &p.spec;
  query.pass = TILEMOE_PASS_BACKWARD;
  size_t bytes = 77;
  for (const uint32_t gradient :
       {TILEMOE_GRADIENT_W1, TILEMOE_GRADIENT_W1_UP, TILEMOE_GRADIENT_W2}) {
    query.gradients = gradient;
    expect_refused(tilemoe_workspace_bytes(&query, &bytes),
                   "expected no bits of quantised weights");
    EXPECT_EQ(bytes, 77u);
  }
}

// An absent weight has the strides of a contiguous one.
TEST(QuantizedArguments, AdaptersOfAnAbsentWeight) {
  QuantizedPass<false> p;
  p.experts.rank_1 = p.experts.rank_2 = 8;
  tilemoe_packed_lora absent{}, present{};
  absent.struct_size = present.struct_size = sizeof absent;
  size_t bytes = 0;
  require(tilemoe_packed_lora_bytes(&p.experts, &bytes));
  void* const memory = p.arena.take(bytes);
  require(tilemoe_packed_lora_bind(&p.experts, &p.weights, memory, bytes, &absent));
  p.weights.W1 = p.W1, p.weights.W2 = p.W2;
  require(tilemoe_packed_lora_bind(&p.experts, &p.weights, memory, bytes, &present));
  EXPECT_EQ(std::memcmp(&absent, &present, sizeof absent), 0);
  EXPECT_EQ(absent.A1.stride[2], 1);
  std::swap(p.weights.W1.stride[1], p.weights.W1.stride[2]);
  require(tilemoe_packed_lora_bind(&p.experts, &p.weights, memory, bytes, &present));
  EXPECT_EQ(present.A1.stride[1], 1);
}

// ------------------------------------------------- a whole weight

TEST(QuantizedArguments, Dequantize) {
  using P = Dequantizing;
  Cases<P> cases {
    BAD(p.args_pointer = nullptr, "args is null"), BAD(p.args.struct_size = 8, "args.struct_size"),
        BAD(p.args.reserved = 1, "reserved is 1"),
        BAD(p.args.device = tilemoe_device(2), "device is 2"), BAD(p.args.out = {}, "out"),
        BAD(p.args.out.ndim = 2, "out is float32 (5, 16)", "(E, R, C)"),
        BAD(p.args.out.data = nullptr, "out", "null"),
        BAD(p.args.out.dtype = TILEMOE_INT32, "out", "int32"),
        BAD(p.args.out.stride[0] *= 2, "out", "contiguous"),
        BAD(p.args.out.shape[2] = 12, "out", "12", "multiple of 8"),
        BAD(p.args.out.shape[0] = 0, "E is 0"), BAD(p.args.out.shape[1] = -1, "R is -1"),
        BAD(p.args.out.shape[2] = int64_t{1} << 25, "C is 33554432"),
        BAD(p.args.out.shape[0] = INT32_MAX - 1;
            p.args.out.shape[1] = p.args.out.shape[2] = int64_t{1} << 24, ""),
        BAD(p.args.out.shape[0] = 1;
            p.args.out.shape[1] = 1, "weight is nf4_double", "a multiple of 64"),
        BAD(p.args.weight.codes = nullptr, "weight.codes is 0"),
        BAD(p.args.weight.scale_map = nullptr, "weight.scale_map is 0"),
        BAD(p.args.out.data = const_cast<void*>(p.args.weight.codes), "out", "weight",
            "shares memory with"),
  };
  BAD_VALUES(cases, "format", p.args.weight.format = tilemoe_format(v), -1, 0, 6);
  run_cases(cases);
}

}  // namespace
}  // namespace tilemoe::arguments
