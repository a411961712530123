// The memory contract: saved_bytes is the size of the state from forward to backward, and a step
// allocates nothing.
#include <cstdlib>
#include <memory>
#include <new>

#include "layer_support.h"
#include "memory_hooks.h"

namespace tilemoe::verify {
namespace {

TEST(Allocations, AreCounted) {
  std::vector<std::unique_ptr<std::vector<int>>> kept;
  EXPECT_EQ(allocations_of([&] { kept.push_back(std::make_unique<std::vector<int>>(100)); }), 3);
  void* memory = nullptr;
  EXPECT_EQ(allocations_of([&] { memory = std::malloc(10); }), 1);
  EXPECT_EQ(allocations_of([&] { memory = std::realloc(memory, 100); }), 1);
  std::free(memory);
  EXPECT_EQ(allocations_of([] {}), 0);
}

TEST(Allocations, NoneInForwardAndBackward) {
  check(tilemoe_set_num_threads(2));
  for (const Case& one : verification_cases()) {
    Problem problem(make_inputs(one, 1));
    problem.poison();
    problem.route();
    const ForwardArgs forward = problem.forward_args();
    ForwardArgs inference = forward;
    inference.saved = nullptr;
    const RoutingSpec& spec = problem.spec();
    inference.workspace_bytes = problem.experts().workspace_bytes(spec, Pass::kInference);
    const GuardedBuffer workspace(host_memory(), inference.workspace_bytes);
    inference.workspace = workspace.data();
    const Experts& experts = problem.experts();
    EXPECT_EQ(allocations_of([&] { experts.forward(inference); }), 0) << one.name;
    EXPECT_EQ(allocations_of([&] { experts.forward(forward); }), 0) << one.name;
    const BackwardArgs backward = problem.backward_args();  // may give other memory for H
    EXPECT_EQ(allocations_of([&] { experts.backward(backward); }), 0) << one.name;
  }
}

// Zeros: the routing's choice does not matter here.
class RoutingMemory {
 public:
  explicit RoutingMemory(const RoutingSpec& spec)
      : arrays_(host_memory(), spec.bytes()),
        workspace_(host_memory(), spec.workspace_bytes()),
        routing(spec, arrays_.data(), arrays_.bytes()) {}
  void* workspace() const { return workspace_.data(); }
  size_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  GuardedBuffer arrays_, workspace_;

 public:
  Routing routing;
};

class RoutingAllocations : public testing::Test {
 protected:
  static constexpr int64_t T = 301, E = 12, K = 3;

  static GuardedTensor tensor(DType dtype, std::vector<int64_t> shape) {
    GuardedTensor result(host_memory(), dtype, std::move(shape));
    result.write(std::vector<float>(static_cast<size_t>(result.elements()), 1.f));
    return result;
  }

  GuardedTensor logits = tensor(DType::kFloat32, {T, E});
  GuardedTensor dlogits = tensor(DType::kFloat32, {T, E});
  GuardedTensor ids = tensor(DType::kInt32, {T, K});
  GuardedTensor scores = tensor(DType::kFloat32, {T, K});
  GuardedTensor counts = tensor(DType::kInt32, {E});
  GuardedTensor one = tensor(DType::kInt64, {1});
};

TEST_F(RoutingAllocations, NoneInTopKAndItsBackward) {
  RoutingMemory memory(RoutingSpec::top_k(Device::kCpu, T, E, K));
  const GuardedTensor ds = tensor(DType::kFloat32, {T * K});
  for (Scoring scoring :
       {Scoring::kSoftmaxOverChosen, Scoring::kSoftmaxOverAll, Scoring::kSoftmaxRenormalized,
        Scoring::kSigmoid, Scoring::kSigmoidRenormalized})
    EXPECT_EQ(allocations_of([&] {
                top_k({.device = Device::kCpu,
                       .scoring = scoring,
                       .K = K,
                       .logits = logits.view(),
                       .ids = ids.view(),
                       .scores = scores.view(),
                       .expert_counts = counts.view()});
                memory.routing.from_top_k(ids.view(), scores.view(), memory.workspace(),
                                          memory.workspace_bytes());
                router_backward({.scoring = scoring,
                                 .routing = &memory.routing,
                                 .logits = logits.view(),
                                 .ds = ds.view(),
                                 .dlogits = dlogits.view(),
                                 .workspace = memory.workspace(),
                                 .workspace_bytes = memory.workspace_bytes()});
              }),
              0);
}

TEST_F(RoutingAllocations, NoneInGeneralAndGroupedRouting) {
  RoutingMemory general(RoutingSpec::general(Device::kCpu, T, E, T));
  const GuardedTensor tokens = tensor(DType::kInt32, {T});
  const GuardedTensor weights = tensor(DType::kFloat32, {T});
  RoutingMemory grouped(RoutingSpec::grouped(Device::kCpu, T, E));
  EXPECT_EQ(allocations_of([&] {
              general.routing.from_triples(tokens.view(), tokens.view(), weights.view(),
                                           general.workspace(), general.workspace_bytes());
              grouped.routing.from_counts(counts.view(), weights.view());
            }),
            0);
}

TEST_F(RoutingAllocations, NoneInRoundedRoutingAndTheLosses) {
  const size_t bytes = router_losses_workspace_bytes(Device::kCpu, T, E);
  const GuardedBuffer losses_workspace(host_memory(), bytes);
  const GuardedTensor losses = tensor(DType::kFloat32, {2});
  for (int i = 0; i < 10; ++i) {
    const auto rule = static_cast<Rounding>(i / 2);
    const int64_t round_tokens = i % 2 * T / 7;
    RoutingMemory memory(RoutingSpec::rounded(Device::kCpu, T, E, K, rule, 16, round_tokens));
    const bool stochastic = rule == Rounding::kStochastic;
    const Tensor seed = stochastic ? one.view() : Tensor();
    const GuardedTensor ds = tensor(DType::kFloat32, {memory.routing.pairs()});
    EXPECT_EQ(allocations_of([&] {
                memory.routing.from_logits({.logits = logits.view(),
                                            .seed = seed,
                                            .step = seed,
                                            .expert_counts = counts.view(),
                                            .workspace = memory.workspace(),
                                            .workspace_bytes = memory.workspace_bytes()});
                router_backward({.scoring = Scoring::kSoftmaxRenormalized,
                                 .routing = &memory.routing,
                                 .logits = logits.view(),
                                 .ds = ds.view(),
                                 .dlogits = dlogits.view(),
                                 .workspace = memory.workspace(),
                                 .workspace_bytes = memory.workspace_bytes()});
                router_losses({.device = Device::kCpu,
                               .balance_coefficient = 0.01f,
                               .z_coefficient = 0.001f,
                               .logits = logits.view(),
                               .expert_counts = counts.view(),
                               .losses = losses.view(),
                               .dlogits = dlogits.view(),
                               .workspace = losses_workspace.data(),
                               .workspace_bytes = bytes});
              }),
              0);
  }
}

// ---------------------------------------------------------------- saved_bytes

int64_t element_bytes(const Case& one) {
  return static_cast<int64_t>(size_of(one.dtype));
}

TEST(SavedBytes, AreRowsAndHAndLittleMore) {
  std::vector<Case> cases = verification_cases();
  cases.insert(cases.end(), bench_cases().begin(), bench_cases().end());
  for (const Case& one : cases) {
    const bool general = one.routing == RoutingKind::kGeneral;
    const RoutingSpec spec = one.spec(general ? one.T * one.K : 0, Device::kCpu);
    const tilemoe_saved_size size = one.experts(Device::kCpu).saved_bytes(spec);
    const int64_t M = spec.bound();
    const auto saved = [](size_t bytes) { return static_cast<int64_t>(bytes); };
    // 2Td + 4Mn in 16 bits and gated; the grouped entry keeps its rows
    EXPECT_EQ(saved(size.rows), element_bytes(one) * one.outer_rows() * one.d) << one.name;
    // 2n codes of a byte and a float32 scale for each 128 of gate and of up, or 2n values
    const int64_t H_row = one.format_H == Format::kFp8 ? one.h_width() + 8 * ((one.n + 127) / 128)
                                                       : element_bytes(one) * one.h_width();
    EXPECT_EQ(saved(size.H), M * H_row) << one.name;
    EXPECT_EQ(size.total, size.rows + size.H + size.routing + size.P1 + size.P2) << one.name;
    // at most 16 bytes a pair and O(E); general and rounded routing find a token's pairs by T + 1
    // offsets
    const bool offsets = general || one.routing == RoutingKind::kRounded;
    const int64_t pairs = std::max(M, one.routing == RoutingKind::kTopK ? one.T * one.K : M);
    const int64_t max_saved = 16 * pairs + 4 * one.E + (offsets ? 4 * one.T : 0) + 256;
    EXPECT_LE(saved(size.routing), max_saved) << one.name;
    EXPECT_EQ(size.routing, spec.bytes()) << one.name;
  }
}

TEST(SavedBytes, DoNotGrowWithGranularity) {
  constexpr int64_t T = 24576, d = 1536, nK = 2048;
  for (int64_t K : {1, 2, 4, 8, 16}) {
    const Experts experts{
        .device = Device::kCpu, .dtype = DType::kBFloat16, .d = d, .n = nK / K, .E = 128};
    const tilemoe_saved_size size =
        experts.saved_bytes(RoutingSpec::top_k(Device::kCpu, T, 128, K));
    EXPECT_EQ(size.rows + size.H, static_cast<size_t>(2 * T * d + 4 * T * nK));
    EXPECT_LE(size.routing, static_cast<size_t>(16 * T * K + 2048));
  }
}

// Backward needs only the saved state: X, H, P1, P2 and the routing, also after a move in memory.
TEST(SavedBytes, AreAllThatBackwardNeeds) {
  for (const Case& one :
       named_cases({"biases", "general", "rounded-nearest", "grouped", "lora"}, {"bfloat16"})) {
    const Inputs inputs = make_inputs(one, 1);
    Problem problem(inputs);
    problem.run();
    const Computed expected = problem.computed();

    Problem later(inputs);
    later.poison();
    later.route();
    for (const auto member : {&tilemoe_saved::H, &tilemoe_saved::P1, &tilemoe_saved::P2}) {
      const tilemoe_tensor &from = problem.saved().*member, &to = later.saved().*member;
      if (from.ndim > 0)
        std::memcpy(to.data, from.data,
                    static_cast<size_t>(from.shape[0] * from.shape[1]) * size_of(one.dtype));
    }
    later.backward();
    Computed found = later.computed();
    found[kO] = expected[kO];
    expect_same_bits(expected, found);
  }
}

}  // namespace
}  // namespace tilemoe::verify
