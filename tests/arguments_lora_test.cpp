// Low-rank adapters: each argument of packing wrong, and of forward and backward with adapters.
#include <cstring>
#include <limits>

#include "arguments_layer_problem.h"
#include "tilemoe/layer.h"

namespace tilemoe::arguments {
namespace {

constexpr int64_t kRank = 8, kRankUp = 16, kRankDown = 8;

// A layer with adapters of W1 and W2, in float32, packed.
template <bool kBackward, bool kSplit = false>
struct LoraPass : Pass<kBackward, kSplit> {
  tilemoe_lora factors{}, dlora{};
  tilemoe_packed_lora lora{};
  tilemoe_pack_lora_args packing{};

  LoraPass() {
    this->experts.rank_1 = kSplit ? kRank + kRankUp : kRank, this->experts.rank_2 = kRankDown;
    factors = new_factors(), dlora = new_factors();
    factors.scale_1 = 0.5f, factors.scale_2 = 2;
    require(tilemoe_packed_lora_bytes(&this->experts, &packing.bytes));
    packing.struct_size = sizeof packing;
    packing.lora = &factors, packing.weights = &this->weights;
    packing.memory = this->arena.take(packing.bytes);
    lora.struct_size = sizeof lora;
    require(tilemoe_pack_lora(&this->experts, &packing, &lora));
    const int64_t capacity = this->routing.spec.capacity;
    this->saved.P1 = this->integers({capacity, this->experts.rank_1}, TILEMOE_FLOAT32);
    this->saved.P2 = this->integers({capacity, kRankDown}, TILEMOE_FLOAT32);
    this->forward.lora = this->backward.lora = &lora;
    this->backward.dlora = &dlora;
    const size_t needed =
        std::max(this->forward_workspace(), this->backward_workspace(TILEMOE_BACKWARD_WHOLE));
    this->forward.workspace = this->backward.workspace = shared_workspace.take(needed);
    this->forward.workspace_bytes = this->backward.workspace_bytes = needed;
  }

  // W2 without an adapter; what the caller gave for it stays.
  void drop_rank_2() {
    this->experts.rank_2 = 0;
    lora.A2 = lora.B2 = {};
    this->saved.P2 = {};
  }

 private:
  tilemoe_lora new_factors() {
    tilemoe_lora all{};
    all.struct_size = sizeof all;
    all.A1 = this->floats({kE, kRank, kD});
    all.B1 = this->floats({kE, kSplit ? kN : 2 * kN, kRank});
    if (kSplit)
      all.A1_up = this->floats({kE, kRankUp, kD}), all.B1_up = this->floats({kE, kN, kRankUp});
    all.A2 = this->floats({kE, kRankDown, kN});
    all.B2 = this->floats({kE, kD, kRankDown});
    return all;
  }
};

template <bool kSplit = false>
struct Packing : LoraPass<false, kSplit> {
  // Other bytes than those that a refused call must not write.
  Packing() { std::memset(this->packing.memory, 0x5a, this->packing.bytes); }
  const char* function() const { return "tilemoe_pack_lora"; }
  tilemoe_status call() { return tilemoe_pack_lora(experts_pointer, args_pointer, &this->lora); }
  const tilemoe_experts* experts_pointer = &this->experts;
  const tilemoe_pack_lora_args* args_pointer = &this->packing;
};

// The same shape, with the last dimension but one contiguous.
void transpose(tilemoe_tensor& matrices) {
  matrices.stride[1] = 1, matrices.stride[2] = matrices.shape[1];
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class P>
Cases<P> packing_cases() {
  Cases<P> cases = {
      BAD(p.experts_pointer = nullptr, "experts is null"),
      BAD(p.args_pointer = nullptr, "args is null"),
      BAD(p.packing.struct_size = 8, "struct_size"),
      BAD(p.packing.lora = nullptr, "lora is null"),
      BAD(p.packing.weights = nullptr, "weights is null"),
      BAD(p.factors.struct_size = 8, "lora.struct_size"),
      BAD(p.lora.struct_size = 8, "packed.struct_size"),
      BAD(p.factors.A1 = {}, "lora.A1", "lora.B1", "give both or neither"),
      BAD(p.factors.B1 = {}, "lora.A1", "lora.B1", "give both or neither"),
      BAD(p.factors.A2 = {}, "lora.A2", "lora.B2", "give both or neither"),
      BAD(p.factors.B2 = {}, "lora.A2", "lora.B2", "give both or neither"),
      BAD(p.factors.A2 = p.factors.B2 = {}, "experts.rank_2 is 8",
          "expected 0, the rank of W2's adapter"),
      BAD(p.experts.rank_1 += 8, "experts.rank_1 is"),
      BAD(p.experts.rank_2 = 0, "experts.rank_2 is 0", "expected 8, the rank of W2's adapter"),
      BAD(p.factors.A1.shape[1] = 12, "lora.A1 has rank 12", "multiple of 8"),
      BAD(p.factors.A2.shape[1] = 264, "lora.A2 has rank 264", "256"),
      BAD(p.factors.A1.shape[2] = kN, "lora.A1", "(5, 8, 16)"),
      BAD(p.factors.A2.shape[0] = 4, "lora.A2", "(4, 8, 16)"),
      BAD(p.factors.B1.shape[2] = 16, "lora.B1"),
      BAD(p.factors.B2.shape[1] = kN, "lora.B2", "(5, 16, 8)"),
      BAD(p.factors.A1.dtype = TILEMOE_INT32, "lora.A1", "int32"),
      BAD(p.factors.B2.data = nullptr, "lora.B2", "null"),
      BAD(p.factors.B2.stride[1] = 0, "lora.B2"),
      BAD(p.factors.scale_1 = kNan, "lora.scale_1 is nan"),
      BAD(p.factors.scale_2 = std::numeric_limits<float>::infinity(), "lora.scale_2 is inf"),
      BAD(p.packing.bytes -= 1, "the packed adapters have", "expected"),
      BAD(p.packing.memory = nullptr, "the packed adapters is null"),
      BAD(p.packing.memory = static_cast<char*>(p.packing.memory) + 8, "16 bytes"),
      BAD(p.packing.memory = p.factors.A1.data, "the packed adapters", "lora.A1",
          "shares memory with"),
  };
  BAD_VALUES(cases, "rank_1", p.experts.rank_1 = int32_t(v), -8, 12, 4, 520, INT32_MAX);
  BAD_VALUES(cases, "rank_2", p.experts.rank_2 = int32_t(v), -8, 12, 4, 264, INT32_MIN);
  return cases;
}

TEST(LoraArguments, Packing) {
  auto cases = packing_cases<Packing<>>();
  BAD_VALUES(cases, "rank_1", p.experts.rank_1 = int32_t(v), 264);
  append<Packing<>>(cases, {
    BAD(p.factors.A1_up = p.factors.A1;
        p.factors.B1_up = p.factors.B1, "lora.A1_up", "requires the split gate layout")
  });
  run_cases(cases);
}

TEST(LoraArguments, PackingSplit) {
  auto cases = packing_cases<Packing<true>>();
  append<Packing<true>>(
      cases, {BAD(p.factors.A1_up = {}, "lora.A1_up", "lora.B1_up", "give both or neither"),
              BAD(p.factors.A1_up.shape[1] = 12, "lora.A1_up has rank 12"),
              BAD(p.factors.B1_up.shape[1] = 8, "lora.B1_up", "(5, 8, 16)"),
              BAD(p.factors.A1_up = p.factors.B1_up = {}, "experts.rank_1 is 24",
                  "expected 8, the rank of W1's adapters")});
  run_cases(cases);
}

TEST(LoraArguments, PackedBytes) {
  const Packing<> p;
  size_t bytes = 77;
  expect_refused(tilemoe_packed_lora_bytes(nullptr, &bytes), "experts is null");
  expect_refused(tilemoe_packed_lora_bytes(&p.experts, nullptr), "bytes is null");
  EXPECT_EQ(bytes, 77u);
  tilemoe_experts none = p.experts;
  none.rank_1 = none.rank_2 = 0;
  require(tilemoe_packed_lora_bytes(&none, &bytes));
  EXPECT_EQ(bytes, 0u);
  none.d = none.n = int64_t{1} << 30, none.E = INT32_MAX / 2, none.rank_1 = 256;
  expect_refused(tilemoe_packed_lora_bytes(&none, &bytes), "");
}

// The view of packed memory that a caller keeps as bytes.
template <bool kSplit = false>
struct Binding : LoraPass<false, kSplit> {
  const char* function() const { return "tilemoe_packed_lora_bind"; }
  tilemoe_status call() {
    return tilemoe_packed_lora_bind(experts_pointer, weights_pointer, this->packing.memory,
                                    this->packing.bytes, packed_pointer);
  }
  const tilemoe_experts* experts_pointer = &this->experts;
  const tilemoe_weights* weights_pointer = &this->weights;
  tilemoe_packed_lora* packed_pointer = &this->lora;
};

TEST(LoraArguments, Binding) {
  using P = Binding<>;
  run_cases(Cases<P>{
      BAD(p.experts_pointer = nullptr, "experts is null"),
      BAD(p.weights_pointer = nullptr, "weights is null"),
      BAD(p.packed_pointer = nullptr, "packed is null"),
      BAD(p.lora.struct_size = 8, "packed.struct_size"),
      BAD(p.packing.bytes -= 1, "the packed adapters have", "expected"),
      BAD(p.packing.memory = nullptr, "the packed adapters is null"),
      BAD(p.packing.memory = static_cast<char*>(p.packing.memory) + 8, "16 bytes"),
      BAD(p.experts.rank_1 += 8, "the packed adapters have"),
  });
}

template <bool kSplit>
void expect_bound_as_packed(bool transposed_weights, bool only_W1) {
  Binding<kSplit> p;
  if (transposed_weights) transpose(p.weights.W1), transpose(p.weights.W2);
  if (kSplit && transposed_weights) transpose(p.weights.W1_up);
  if (only_W1) p.experts.rank_2 = 0, p.factors.A2 = p.factors.B2 = {};
  require(tilemoe_pack_lora(&p.experts, &p.packing, &p.lora));
  const tilemoe_packed_lora packed = p.lora;
  p.lora.A1 = p.lora.B1 = p.lora.A2 = p.lora.B2 = p.weights.W1;
  expect_taken(p);
  EXPECT_EQ(std::memcmp(&packed, &p.lora, sizeof packed), 0);
  EXPECT_EQ(p.lora.scale_1, 0.5f);
  EXPECT_EQ(p.lora.rank_gate, kSplit ? kRank : 0);
}

TEST(LoraArguments, BindingGivesWhatPackingGave) {
  for (const bool transposed_weights : {false, true})
    for (const bool only_W1 : {false, true}) {
      expect_bound_as_packed<false>(transposed_weights, only_W1);
      expect_bound_as_packed<true>(transposed_weights, only_W1);
    }
}

// What forward and backward check alike.
template <class P>
Cases<P> pass_cases() {
  Cases<P> cases = {
    BAD(p.args().lora = nullptr, "lora is null", "rank_2 is 8"),
    BAD(p.experts.rank_1 = p.experts.rank_2 = 0, "lora is given", "rank_1 is 0"),
    BAD(p.lora.struct_size = 8, "lora.struct_size"),
    BAD(p.lora.reserved = 1, "reserved is 1"),
    BAD(p.lora.rank_gate = -1, "lora.rank_gate is -1"),
    BAD(p.lora.rank_gate = p.experts.rank_1 + 1, "lora.rank_gate is"),
    BAD(p.lora.scale_1 = kNan, "lora.scale_1 is nan"),
    BAD(p.lora.scale_2 = -std::numeric_limits<float>::infinity(), "lora.scale_2 is -inf"),
    BAD(p.experts.rank_1 += 8, "lora.A1"),
    BAD(p.experts.rank_2 = 0, "lora.A2", "rank 0"),
    BAD(p.lora.A2 = p.lora.B2 = {}, "lora.A2"),
    BAD(transpose(p.lora.A1), "lora.A1 was packed for weights of other strides"),
    BAD(transpose(p.weights.W2), "lora.A2 was packed for weights of other strides"),
    BAD(p.saved.P1 = p.saved.H, "saved.P1"),
    BAD(p.drop_rank_2(); p.dlora.A2 = p.dlora.B2 = {};
        p.saved.P2 = p.saved.P1, "saved.P2", "rank 0"),
  };
  BAD_TENSOR(cases, lora.A1, .layout = Layout::kMatrix, .aligned = true);
  BAD_TENSOR(cases, lora.B2, .layout = Layout::kMatrix, .aligned = true);
  BAD_TENSOR(cases, saved.P1, .aligned = true);
  BAD_TENSOR(cases, saved.P2, .aligned = true);
  BAD_VALUES(cases, "rank_1", p.experts.rank_1 = int32_t(v), -8, 12, 520);
  BAD_VALUES(cases, "rank_2", p.experts.rank_2 = int32_t(v), -8, 12, 264);
  return cases;
}

#define ALIAS(output, other, ...) BAD(__VA_ARGS__, output, other, "shares memory with")

template <bool kSplit>
void run_forward_cases() {
  using P = LoraPass<false, kSplit>;
  auto cases = pass_cases<P>();
  append<P>(cases, {ALIAS("saved.P1", "", p.saved.P1.data = p.forward.X.data),
                    ALIAS("saved.P1", "saved.P2", p.saved.P1.data = p.saved.P2.data),
                    ALIAS("saved.P2", "workspace", p.saved.P2.data = p.forward.workspace),
                    ALIAS("O", "lora.A1", p.forward.O.data = p.lora.A1.data),
                    ALIAS("saved.H", "lora.B2", p.saved.H.data = p.lora.B2.data)});
  run_cases(cases);
}

template <bool kSplit>
void run_backward_cases() {
  using P = LoraPass<true, kSplit>;
  auto cases = pass_cases<P>();
  const Argument matrix{.layout = Layout::kMatrix, .optional = true, .aligned = true};
  BAD_TENSOR(cases, dlora.A1, matrix);
  BAD_TENSOR(cases, dlora.B1, matrix);
  BAD_TENSOR(cases, dlora.A2, matrix);
  BAD_TENSOR(cases, dlora.B2, matrix);
  if (kSplit) {
    BAD_TENSOR(cases, dlora.A1_up, matrix);
    BAD_TENSOR(cases, dlora.B1_up, matrix);
  }
  append<P>(cases, {
    BAD(p.dlora.struct_size = 8, "dlora.struct_size"),
        BAD(p.drop_rank_2(), "dlora.A2", "no such adapter"),
        BAD(p.drop_rank_2(); p.dlora.A2 = {}, "dlora.B2", "no such adapter"),
        BAD(p.backward.mode = TILEMOE_BACKWARD_REST;
            p.saved.state = TILEMOE_SAVED_DH_OVER_H, "mode is REST", "W2's adapter"),
        ALIAS("dlora.A1", "lora.A1", p.dlora.A1.data = p.lora.A1.data),
        ALIAS("dlora.A2", "dlora.B2", p.dlora.A2.data = p.dlora.B2.data),
        ALIAS("dlora.B1", "saved.P1", p.dlora.B1.data = p.saved.P1.data),
        ALIAS("dlora.A2", "saved.P2", p.dlora.A2.data = p.saved.P2.data),
        ALIAS("dlora.B2", "", p.dlora.B2.data = p.backward.dO.data),
        ALIAS("dX", "lora.A1", p.backward.dX.data = p.lora.A1.data)
  });
  if (!kSplit)
    append<P>(cases, {
      BAD(p.dlora.A1_up = p.dlora.A1, "dlora.A1_up", "no such adapter"),
          BAD(p.experts.gate_layout = TILEMOE_GATE_INTERLEAVED;
              transpose(p.dlora.B1), "dlora.B1 is interleaved", "along the rank")
    });
  run_cases(cases);
}

TEST(LoraArguments, Forward) {
  run_forward_cases<false>();
}
TEST(LoraArguments, ForwardSplit) {
  run_forward_cases<true>();
}
TEST(LoraArguments, Backward) {
  run_backward_cases<false>();
}
TEST(LoraArguments, BackwardSplit) {
  run_backward_cases<true>();
}

// Each gradient of an adapter may be wanted alone.
TEST(LoraArguments, AGradientMayBeAlone) {
  LoraPass<true> all;
  require(tilemoe_forward(&all.experts, &all.forward));
  expect_taken(all);
  for (const auto member :
       {&tilemoe_lora::A1, &tilemoe_lora::B1, &tilemoe_lora::A2, &tilemoe_lora::B2}) {
    LoraPass<true> one;
    require(tilemoe_forward(&one.experts, &one.forward));
    const tilemoe_tensor wanted = one.dlora.*member;
    one.dlora.A1 = one.dlora.B1 = one.dlora.A2 = one.dlora.B2 = {};
    one.dlora.*member = wanted;
    expect_taken(one);
    EXPECT_EQ(values(wanted), values(all.dlora.*member));
  }
}

TEST(LoraArguments, InferenceNeedsNoSavedRows) {
  LoraPass<false> saving, inference;
  inference.forward.saved = nullptr;
  inference.saved.P1 = inference.saved.P2 = {};
  const size_t needed = Experts{.device = Device::kCpu,
                                .d = kD,
                                .n = kN,
                                .E = kE,
                                .rank_1 = static_cast<int32_t>(kRank),
                                .rank_2 = static_cast<int32_t>(kRankDown)}
                            .workspace_bytes(inference.spec, tilemoe::Pass::kInference);
  inference.forward.workspace = shared_workspace.take(needed);
  inference.forward.workspace_bytes = needed;
  expect_taken(saving), expect_taken(inference);
  EXPECT_EQ(values(saving.forward.O), values(inference.forward.O));
}

}  // namespace
}  // namespace tilemoe::arguments
