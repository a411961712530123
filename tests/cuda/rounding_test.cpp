// Token rounding on the device: every byte of the routing is the CPU's.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/twin_routing.h"
#include "routing_support.h"

namespace tilemoe::test {
namespace {

using routing_test::Logits;
using routing_test::make_logits;

const tilemoe_rounding kRules[] = {TILEMOE_ROUND_NEAREST, TILEMOE_ROUND_UP, TILEMOE_ROUND_DOWN,
                                   TILEMOE_ROUND_STOCHASTIC, TILEMOE_ROUND_BALANCED};

struct RoundCase {
  std::string name;
  int64_t T, E, K, m;
  Logits logits = Logits::kNormal;
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  int64_t gap = 0;
  double room = 1;  // capacity as a fraction of T * K; 1: the bound
  int64_t round_tokens = 0;
};

RoundCase in_groups(int64_t round_tokens, RoundCase c) {
  c.round_tokens = round_tokens;
  return c;
}

void PrintTo(const RoundCase& c, std::ostream* out) {
  *out << c.name;
}

class RoundTwin {
 public:
  RoundTwin(const RoundCase& c, tilemoe_rounding rule)
      : c_(c),
        rule_(rule),
        routing_(spec(c, rule)),
        logits_(c.dtype, c.T, c.E, c.gap),
        counts_(TILEMOE_INT32, {c.E}),
        seed_(TILEMOE_INT64, {1}),
        step_(TILEMOE_INT64, {1}) {}

  void run(int64_t step) {
    logits_.fill(make_logits(c_.logits, c_.T, c_.E, static_cast<uint32_t>(step)));
    seed_.fill([](int64_t) { return 77; });
    step_.fill([&](int64_t) { return static_cast<double>(step); });
    build(false);
    build(true);
    const std::string what = c_.name + ", rule " + std::to_string(rule_);
    expect_cuda(cudaDeviceSynchronize(), what.c_str());
    routing_.expect_same(what);
    EXPECT_TRUE(counts_.buffer().download() == counts_.buffer().host_bytes()) << what << ": counts";
  }
  const tilemoe_routing& host() { return routing_.host(); }
  std::vector<uint8_t> rebuilt() {
    build(true);
    return routing_.memory().download();
  }

 private:
  static tilemoe_routing_spec spec(const RoundCase& c, tilemoe_rounding rule) {
    RoutingSpec spec = RoutingSpec::rounded(Device::kCpu, c.T, c.E, c.K,
                                            static_cast<Rounding>(rule), c.m, c.round_tokens);
    if (c.room != 1) spec.capacity = static_cast<int64_t>(c.room * static_cast<double>(c.T * c.K));
    return spec;
  }
  void build(bool device) {
    auto args = sized<tilemoe_route_rounded_args>();
    args.logits = logits_.on(device);
    if (rule_ == TILEMOE_ROUND_STOCHASTIC) {
      args.seed = seed_.on(device);
      args.step = step_.on(device);
    }
    args.expert_counts = counts_.on(device);
    routing_.lend_workspace(device, args);
    expect_ok(tilemoe_route_rounded(device ? &routing_.device() : &routing_.host(), &args));
  }

  RoundCase c_;
  tilemoe_rounding rule_;
  TwinRouting routing_;
  TwinLogits logits_;
  TwinTensor counts_, seed_, step_;
};

class CudaRounding : public testing::TestWithParam<RoundCase> {};

TEST_P(CudaRounding, IsTheCpus) {
  for (const tilemoe_rounding rule : kRules) {
    RoundTwin twin(GetParam(), rule);
    twin.run(1);
    twin.run(2);  // over what the first left
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    , CudaRounding,
    testing::Values(
        RoundCase{"no_tokens", 0, 5, 2, 4}, RoundCase{"one_token", 1, 5, 2, 1},
        RoundCase{"fewer_tokens_than_m", 50, 7, 3, 128},
        RoundCase{"as_many_tokens_as_m", 128, 7, 3, 128}, RoundCase{"m_is_1", 333, 12, 3, 1},
        RoundCase{"m_is_7", 333, 12, 3, 7},
        RoundCase{"m_is_128", 3001, 48, 5, 128, Logits::kNormal, TILEMOE_FLOAT32, 3},
        RoundCase{"float16", 3001, 40, 5, 128, Logits::kNormal, TILEMOE_FLOAT16, 1},
        RoundCase{"skewed", 5000, 33, 4, 128, Logits::kSkewed, TILEMOE_FLOAT32},
        RoundCase{"ties", 4001, 24, 3, 128, Logits::kTies},
        RoundCase{"ties_of_float32", 1500, 24, 3, 64, Logits::kTies, TILEMOE_FLOAT32},
        RoundCase{"nan_and_infinities", 2100, 9, 2, 32, Logits::kSpecial},
        RoundCase{"nan_of_float32", 2100, 31, 4, 128, Logits::kSpecial, TILEMOE_FLOAT32, 5},
        RoundCase{"one_expert", 700, 1, 1, 128}, RoundCase{"every_expert", 700, 6, 6, 128},
        RoundCase{"every_of_many_experts", 300, 70, 70, 16},
        RoundCase{"many_experts", 1100, 4096, 8, 16},
        RoundCase{"many_chosen", 260, 4096, 100, 8, Logits::kTies},
        RoundCase{"overflow", 3000, 48, 5, 128, Logits::kNormal, TILEMOE_BFLOAT16, 0, 0.83},
        RoundCase{"overflow_with_ties", 3000, 20, 5, 64, Logits::kTies, TILEMOE_FLOAT32, 0, 0.31},
        RoundCase{"room_for_one", 300, 8, 2, 16, Logits::kNormal, TILEMOE_BFLOAT16, 0, 0.002},
        RoundCase{"large", 24576, 128, 8, 128}, in_groups(5, {"groups_of_no_tokens", 0, 5, 2, 4}),
        in_groups(100, {"groups_below_m", 300, 7, 3, 128}),
        in_groups(128, {"groups_of_m", 1280, 7, 3, 128}),
        in_groups(3001, {"one_group", 3001, 48, 5, 128}),
        in_groups(333,
                  {"groups_off_every_word", 3330, 33, 4, 16, Logits::kNormal, TILEMOE_FLOAT32, 3}),
        in_groups(2, {"groups_of_two", 4096, 12, 3, 2, Logits::kTies}),
        in_groups(128, {"many_groups", 131072, 20, 4, 32}),
        in_groups(2048, {"groups_with_ties", 16384, 24, 3, 128, Logits::kTies}),
        in_groups(12288, {"large_groups", 24576, 40, 4, 128, Logits::kSkewed}),
        in_groups(700, {"groups_with_nan", 2100, 31, 4, 64, Logits::kSpecial, TILEMOE_FLOAT32, 5}),
        in_groups(250, {"groups_of_one_expert", 750, 1, 1, 128}),
        in_groups(275, {"groups_of_many_experts", 1100, 4096, 8, 16}),
        in_groups(65, {"groups_with_many_chosen", 260, 700, 100, 8, Logits::kTies}),
        in_groups(600, {"groups_overflow", 3000, 48, 5, 128, Logits::kNormal, TILEMOE_BFLOAT16, 0,
                        0.83}),
        in_groups(600, {"groups_overflow_with_ties", 3000, 20, 5, 64, Logits::kTies,
                        TILEMOE_FLOAT32, 0, 0.31})),
    [](const auto& test) { return test.param.name; });

TEST(CudaRoundingRun, HasTheSameBitsEveryTime) {
  RoundTwin twin({"again", 9000, 64, 6, 128}, TILEMOE_ROUND_NEAREST);
  twin.run(1);
  const std::vector<uint8_t> first = twin.rebuilt();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(twin.rebuilt() == first) << "run " << i;
}

TEST(CudaRoundingRun, OfGroupsHasTheSameBitsEveryTime) {
  RoundTwin twin(in_groups(450, {"again", 9000, 64, 6, 128}), TILEMOE_ROUND_BALANCED);
  twin.run(1);
  const std::vector<uint8_t> first = twin.rebuilt();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(twin.rebuilt() == first) << "run " << i;
}

// The cases reach the branches that they test.
TEST(CudaRoundingRun, AddsDropsAndOverflows) {
  RoundTwin nearest({"", 3001, 48, 5, 128}, TILEMOE_ROUND_NEAREST);
  nearest.run(1);
  const tilemoe_routing& routing = nearest.host();
  int32_t longest = 0, shortest = INT32_MAX;
  for (int64_t t = 0; t < 3001; ++t) {
    const int32_t pairs = routing.token_offsets[t + 1] - routing.token_offsets[t];
    longest = std::max(longest, pairs), shortest = std::min(shortest, pairs);
  }
  EXPECT_GT(longest, 5);
  EXPECT_LT(shortest, 5);
  RoundTwin overflow({"", 3000, 48, 5, 128, Logits::kNormal, TILEMOE_BFLOAT16, 0, 0.83},
                     TILEMOE_ROUND_UP);
  overflow.run(1);
  EXPECT_GT(overflow.host().counters[TILEMOE_COUNT_OVER_CAPACITY], 0);
}

}  // namespace
}  // namespace tilemoe::test
