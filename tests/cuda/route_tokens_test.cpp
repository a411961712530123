// The routing at small T on the device against the CPU's: every byte of the routing's memory and of
// the counts, and every logit, is the same, however often a workspace was used before and whatever
// it contains.
#include <array>
#include <cmath>
#include <memory>

#include "cuda/compare.h"
#include "cuda/device_layer.h"
#include "cuda/twin_routing.h"
#include "routing_support.h"

namespace tilemoe::test {
namespace {

using routing_test::Logits;

struct Types {
  tilemoe_dtype X, weight, logits;
};
constexpr Types kTypes[] = {{TILEMOE_BFLOAT16, TILEMOE_BFLOAT16, TILEMOE_BFLOAT16},
                            {TILEMOE_BFLOAT16, TILEMOE_BFLOAT16, TILEMOE_FLOAT32},
                            {TILEMOE_FLOAT16, TILEMOE_FLOAT16, TILEMOE_FLOAT16},
                            {TILEMOE_FLOAT32, TILEMOE_FLOAT32, TILEMOE_FLOAT32},
                            {TILEMOE_BFLOAT16, TILEMOE_FLOAT32, TILEMOE_FLOAT32},
                            {TILEMOE_FLOAT16, TILEMOE_FLOAT32, TILEMOE_BFLOAT16}};

struct TokensCase {
  int64_t T, E, K, d;
  Types types = kTypes[0];
  Logits logits = Logits::kNormal;  // other than normal: prescribed ones, d of with_logits
  tilemoe_scoring scoring = TILEMOE_SOFTMAX_OVER_CHOSEN;
  bool bias = false, selection_bias = false;
  int64_t n_group = 1, topk_group = 1;
  tilemoe_group_score group_score = TILEMOE_GROUP_MAX;
  int64_t capacity = 0;
  float factor = 1;
};

std::string describe(const TokensCase& c) {
  return "T " + std::to_string(c.T) + " E " + std::to_string(c.E) + " K " + std::to_string(c.K) +
         " d " + std::to_string(c.d) + " X " + tilemoe_dtype_name(c.types.X) + " weight " +
         tilemoe_dtype_name(c.types.weight) + " logits " + tilemoe_dtype_name(c.types.logits) +
         " " + routing_test::name(c.logits) + " scoring " + std::to_string(c.scoring) + " groups " +
         std::to_string(c.n_group) + " capacity " + std::to_string(c.capacity);
}

tilemoe_routing_spec spec_of(const TokensCase& c) {
  auto spec = sized<tilemoe_routing_spec>();
  spec.kind = TILEMOE_ROUTING_TOP_K;
  spec.T = c.T, spec.E = c.E, spec.K = c.K, spec.capacity = c.capacity;
  return spec;
}
size_t workspace_bytes(const tilemoe_routing_spec& spec, int64_t d) {
  size_t bytes = 0;
  expect_ok(tilemoe_route_tokens_workspace_bytes(&spec, d, &bytes));
  return bytes;
}

// One problem on both sides.
class TwinTokens {
 public:
  explicit TwinTokens(const TokensCase& its_case)
      : c_(its_case),
        X_(c_.types.X, {c_.T, c_.d}),
        weight_(c_.types.weight, {c_.E, c_.d}),
        bias_(TILEMOE_FLOAT32, {c_.E}),
        selection_bias_(TILEMOE_FLOAT32, {c_.E}),
        logits_(c_.types.logits, {c_.T, c_.E}),
        counts_(TILEMOE_INT32, {c_.E}),
        routing_(spec_of(c_)),
        host_workspace_(workspace_bytes(spec_of(c_), c_.d)),
        device_workspace_(workspace_bytes(on_device(spec_of(c_)), c_.d)) {
    fill(1);
    bias_.fill([](int64_t e) { return static_cast<double>(e % 5) / 4; });
    // Whole numbers tie once a sigmoid is added; a NaN in the bias ranks its expert last.
    selection_bias_.fill([](int64_t e) {
      return e % 11 == 7 ? static_cast<double>(routing_test::kNaN) : static_cast<double>(e % 3);
    });
  }

  void fill(uint32_t seed) {
    if (c_.logits == Logits::kNormal)
      fill_normal(seed);
    else
      fill_for_logits(seed);
  }

  void call(bool device, cudaStream_t stream = nullptr) {
    auto args = sized<tilemoe_route_tokens_args>();
    args.scoring = c_.scoring;
    args.logits_dtype = c_.types.logits;
    args.X = X_.on(device), args.router_weight = weight_.on(device);
    if (c_.bias) args.router_bias = bias_.on(device);
    if (c_.selection_bias) args.selection_bias = selection_bias_.on(device);
    args.logits = logits_.on(device), args.expert_counts = counts_.on(device);
    args.n_group = c_.n_group, args.topk_group = c_.topk_group, args.group_score = c_.group_score;
    args.routed_scaling_factor = c_.factor;
    TwinBuffer& workspace = device ? device_workspace_ : host_workspace_;
    args.workspace = device ? workspace.device() : workspace.host();
    args.workspace_bytes = workspace_bytes(device ? on_device(spec_of(c_)) : spec_of(c_), c_.d);
    args.stream = stream;
    expect_ok(tilemoe_route_tokens(device ? &routing_.device() : &routing_.host(), &args));
  }
  // Whatever an earlier call left is gone.
  void poison() {
    for (TwinBuffer* buffer : {&routing_.memory(), &logits_.buffer(), &counts_.buffer()})
      expect_cuda(cudaMemset(buffer->device(), TwinBuffer::kPoison,
                             buffer->host_bytes().size() - 2 * TwinBuffer::kGuard),
                  "poison");
  }
  void spoil_workspace(int value) {
    expect_cuda(cudaMemset(device_workspace_.device(), value,
                           device_workspace_.host_bytes().size() - 2 * TwinBuffer::kGuard),
                "workspace");
  }
  void expect_same(const std::string& what) {
    expect_cuda(cudaDeviceSynchronize(), "routing");
    routing_.expect_same(what);
    EXPECT_TRUE(counts_.buffer().download() == counts_.buffer().host_bytes()) << what << ": counts";
    const std::vector<uint8_t> got = logits_.buffer().download();
    const int64_t at = first_difference(logits_, got, logits_.buffer().host_bytes());
    EXPECT_EQ(at, -1) << what << ": logit " << logits_.at(got, at) << ", expected "
                      << logits_.at(logits_.buffer().host_bytes(), at);
    EXPECT_TRUE(device_workspace_.guards_intact() && logits_.buffer().guards_intact() &&
                counts_.buffer().guards_intact())
        << what;
  }

 private:
  void fill_normal(uint32_t seed) {
    verify::Random x(seed, 1), w(seed, 2);
    const double scale = 1 / std::sqrt(static_cast<double>(c_.d));
    X_.fill([&](int64_t) { return x.normal(); });
    weight_.fill([&](int64_t) { return scale * w.normal(); });
  }
  // Expert e has columns e and width + e, each of which contributes 4 times the token's number; an
  // infinity overflows, a NaN is the sum of both infinities.
  void fill_for_logits(uint32_t seed) {
    const int64_t d = c_.d, width = d / 2;
    const std::vector<float> wishes = routing_test::make_logits(c_.logits, c_.T, c_.E, seed);
    constexpr double kLargest = 3.38e38;
    X_.fill([&](int64_t i) {
      const int64_t t = i / d, column = i % d, e = column % width;
      if (e >= c_.E) return 0.0;
      const float wish = wishes[static_cast<size_t>(t * c_.E + e)];
      const bool second = column >= width;
      if (std::isnan(wish)) return second ? -kLargest : kLargest;
      if (second) return 0.0;
      return std::isinf(wish) ? std::copysign(kLargest, wish) : static_cast<double>(wish / 4);
    });
    weight_.fill([&](int64_t i) { return i % d % width == i / d ? 4.0 : 0.0; });
  }

  TokensCase c_;
  TwinTensor X_, weight_, bias_, selection_bias_, logits_, counts_;
  TwinRouting routing_;
  TwinBuffer host_workspace_, device_workspace_;
};

void expect_same_routing(const TokensCase& c) {
  SCOPED_TRACE(describe(c));
  TwinTokens twin(c);
  twin.call(false), twin.call(true);
  twin.expect_same("once");
}

// The width of prescribed logits.
int64_t width_for(int64_t E) {
  return 2 * ((E + 7) / 8 * 8);
}

constexpr tilemoe_scoring kScorings[] = {TILEMOE_SOFTMAX_OVER_CHOSEN, TILEMOE_SOFTMAX_OVER_ALL,
                                         TILEMOE_SOFTMAX_RENORMALIZED, TILEMOE_SIGMOID,
                                         TILEMOE_SIGMOID_RENORMALIZED};

TEST(CudaRouteTokens, OfEveryCountOfTokens) {
  for (int64_t T = 0; T <= 64; ++T)
    expect_same_routing({.T = T, .E = 128, .K = 8, .d = 1536, .bias = T % 2 == 0});
}

TEST(CudaRouteTokens, OfEveryWidthAndType) {
  for (const int64_t d : {8, 16, 248, 256, 264, 504, 512, 520, 1032, 2048, 4096, 7168})
    for (const Types& types : kTypes)
      for (const int64_t T : {1, 6, 17})
        expect_same_routing({.T = T, .E = 24, .K = 4, .d = d, .types = types, .bias = T == 6});
}

TEST(CudaRouteTokens, OfEveryNumberOfExperts) {
  for (const int64_t E :
       {1, 2, 7, 8, 9, 31, 32, 33, 60, 64, 127, 128, 129, 200, 256, 257, 511, 512})
    for (const int64_t K : {1, 2, 6, 8, 10, 16, 32})
      if (K <= E)
        for (const int64_t T : {3, 33}) expect_same_routing({.T = T, .E = E, .K = K, .d = 264});
}

// Ties, infinities and NaN, by every rule.
TEST(CudaRouteTokens, OfEveryRule) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {7, 3}, {40, 8}, {129, 6}, {512, 32}};
  for (const auto& [E, K] : sizes)
    for (const tilemoe_scoring scoring : kScorings)
      for (const Logits logits : {Logits::kTies, Logits::kSpecial, Logits::kSkewed})
        for (const bool bias : {false, true})
          if (!bias || scoring >= TILEMOE_SIGMOID)
            expect_same_routing({.T = 37,
                                 .E = E,
                                 .K = K,
                                 .d = width_for(E),
                                 .types = kTypes[bias ? 3 : 0],
                                 .logits = logits,
                                 .scoring = scoring,
                                 .selection_bias = bias,
                                 .factor = 2.5f});
}

TEST(CudaRouteTokens, InGroups) {
  for (const int64_t E : {64, 256, 512})
    for (const int64_t n_group : {2, 8, 32})
      for (const tilemoe_scoring scoring : {TILEMOE_SIGMOID_RENORMALIZED, TILEMOE_SOFTMAX_OVER_ALL})
        expect_same_routing({.T = 21,
                             .E = E,
                             .K = 4,
                             .d = width_for(E),
                             .logits = Logits::kTies,
                             .scoring = scoring,
                             .n_group = n_group,
                             .topk_group = n_group / 2 + 1,
                             .group_score = scoring == TILEMOE_SOFTMAX_OVER_ALL || E / n_group < 2
                                                ? TILEMOE_GROUP_MAX
                                                : TILEMOE_GROUP_TOP2_SUM});
}

TEST(CudaRouteTokens, PastTheCapacity) {
  for (const int64_t capacity : {1, 100, 255, 256, 300})
    expect_same_routing({.T = 32, .E = 40, .K = 8, .d = 512, .capacity = capacity});
}

// The counter of blocks works in a workspace of any contents, and again after a call.
TEST(CudaRouteTokens, TakesAWorkspaceOfAnyContents) {
  for (const int64_t T : {1, 16, 17, 64}) {
    TwinTokens twin({.T = T, .E = 128, .K = 8, .d = 1024});
    twin.call(false);
    for (const int value : {0x00, 0xff, 0x01, 0x80, 0x5a}) {
      twin.spoil_workspace(value);
      for (int again = 0; again < 50; ++again) {
        twin.poison();
        twin.call(true);
        twin.expect_same("workspace of " + std::to_string(value) + ", call " +
                         std::to_string(again));
      }
    }
  }
}

// A graph's kernel has one stamp on all replays.
TEST(CudaRouteTokens, ReplaysFromAGraph) {
  const Stream stream;
  for (const int64_t T : {4, 50}) {
    TwinTokens twin({.T = T, .E = 128, .K = 8, .d = 2048});
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    expect_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < 3; ++i) twin.call(true, stream.get());
    expect_cuda(cudaStreamEndCapture(stream.get(), &graph), "capture");
    expect_cuda(cudaGraphInstantiate(&replay, graph, 0), "graph");
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      twin.fill(seed);
      twin.call(false);
      for (int again = 0; again < 100; ++again) {
        twin.poison();
        if (again % 10 == 9) twin.spoil_workspace(again);
        expect_cuda(cudaDeviceSynchronize(), "poison");
        expect_cuda(cudaGraphLaunch(replay, stream.get()), "replay");
        twin.expect_same("replayed");
      }
    }
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
  }
}

// Calls on several streams at once, each in separate memory.
TEST(CudaRouteTokens, RunsOnSeveralStreamsAtOnce) {
  constexpr size_t kStreams = 4;
  std::array<Stream, kStreams> streams;
  std::array<std::unique_ptr<TwinTokens>, kStreams> twins;
  for (size_t i = 0; i < kStreams; ++i) {
    twins[i] = std::make_unique<TwinTokens>(
        TokensCase{.T = 16 * static_cast<int64_t>(i) + 5, .E = 128, .K = 8, .d = 2048});
    twins[i]->call(false);
  }
  expect_cuda(cudaDeviceSynchronize(), "inputs");
  for (int again = 0; again < 300; ++again)
    for (size_t i = 0; i < kStreams; ++i) twins[i]->call(true, streams[i].get());
  for (const auto& twin : twins) twin->expect_same("at once");
}

// In inference a layer at small T is the router, two GEMMs and the combine, and nothing else on the
// stream: no memory is set or copied.
TEST(CudaRouteTokensLayer, IsFourKernels) {
  const int64_t T = 8, d = 512, n = 256, E = 16, K = 4;
  verify::Memory& memory = verify::cuda_memory();
  const auto rows = [&](int64_t count, int64_t width) {
    return verify::GuardedTensor(memory, DType::kBFloat16, {count, width});
  };
  verify::GuardedTensor X = rows(T, d), O = rows(T, d), gate = rows(E, d);
  verify::GuardedTensor W1(memory, DType::kBFloat16, {E, 2 * n, d});
  verify::GuardedTensor W2(memory, DType::kBFloat16, {E, d, n});
  for (auto* tensor : {&X, &gate, &W1, &W2}) {
    verify::Random random(3, static_cast<uint64_t>(tensor->elements()));
    std::vector<float> values(static_cast<size_t>(tensor->elements()));
    for (float& value : values) value = static_cast<float>(random.normal() / 16);
    tensor->write(values);
  }
  const Experts experts{.device = Device::kCuda, .dtype = DType::kBFloat16, .d = d, .n = n, .E = E};
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCuda, T, E, K);
  verify::GuardedBuffer routing_memory(memory, spec.bytes());
  verify::GuardedBuffer routing_workspace(memory, spec.route_tokens_workspace_bytes(d));
  verify::GuardedBuffer workspace(memory, experts.workspace_bytes(spec, Pass::kInference));
  Routing routing(spec, routing_memory.data(), routing_memory.bytes());
  const Stream stream;
  const auto enqueue = [&] {
    TokenRouting router{
        .logits_dtype = DType::kBFloat16, .X = X.view(), .router_weight = gate.view()};
    router.workspace = routing_workspace.data(), router.workspace_bytes = routing_workspace.bytes();
    router.stream = stream.get();
    routing.from_tokens(router);
    ForwardArgs args;
    args.routing = &routing;
    args.weights.W1 = W1.view(), args.weights.W2 = W2.view();
    args.X = X.view(), args.O = O.view();
    args.workspace = workspace.data(), args.workspace_bytes = workspace.bytes();
    args.stream = stream.get();
    experts.forward(args);
  };
  O.poison();
  enqueue();  // the setup at a kernel's first use is not counted
  check_cuda(cudaDeviceSynchronize());
  const std::vector<std::byte> expected = O.bits();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  enqueue();
  check_cuda(cudaStreamEndCapture(stream.get(), &graph));
  size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count));
  EXPECT_EQ(count, 4u);
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    check_cuda(cudaGraphNodeGetType(node, &type));
    EXPECT_EQ(type, cudaGraphNodeTypeKernel);
  }
  check_cuda(cudaGraphInstantiate(&replay, graph, 0));
  for (int again = 0; again < 100; ++again) {
    O.poison();
    check_cuda(cudaDeviceSynchronize());
    check_cuda(cudaGraphLaunch(replay, stream.get()));
    check_cuda(cudaDeviceSynchronize());
    ASSERT_TRUE(O.bits() == expected) << "replay " << again;
  }
  for (const float value : O.read()) ASSERT_FALSE(std::isnan(value));
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace tilemoe::test
