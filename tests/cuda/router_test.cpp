// The router's backward and its losses on the device against the CPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/twin_routing.h"
#include "routing_support.h"

namespace tilemoe::test {
namespace {

using routing_test::kNaN;
using routing_test::Logits;
using routing_test::make_logits;

std::vector<float> normals(int64_t count, uint32_t seed) {
  return make_logits(Logits::kNormal, count, 1, seed);
}

// A stored type's distance to its neighbour at 1: sums taken in another order may round elsewhere.
double neighbour(tilemoe_dtype dtype) {
  return dtype == TILEMOE_FLOAT32 ? 0 : dtype == TILEMOE_BFLOAT16 ? 0x1p-7 : 0x1p-10;
}

// Each token's gradients, relative to its greatest, or to the `terms` that make it and may cancel;
// NaN and infinities in the CPU's places.
void expect_close(TwinLogits& got, const std::string& what, tilemoe_dtype dtype, double terms) {
  const std::vector<uint8_t> bytes = got.buffer().download();
  const std::vector<uint8_t>& host = got.buffer().host_bytes();
  for (int64_t t = 0; t < got.T(); ++t) {
    double scale = terms;
    for (int64_t e = 0; e < got.E(); ++e)
      if (const double want = got.at(host, t, e); std::isfinite(want))
        scale = std::max(scale, std::fabs(want));
    for (int64_t e = 0; e < got.E(); ++e) {
      const double want = got.at(host, t, e), is = got.at(bytes, t, e);
      const double allowed = 1e-6 * scale + neighbour(dtype) * std::fabs(want);
      const bool same = is == want || (std::isnan(want) && std::isnan(is));
      ASSERT_TRUE(same || std::fabs(is - want) <= allowed)
          << what << ", token " << t << ", expert " << e << ": " << is << ", expected " << want;
    }
  }
}

struct Types {
  tilemoe_dtype logits, gradient;
};
const Types kTypes[] = {{TILEMOE_FLOAT32, TILEMOE_FLOAT32},
                        {TILEMOE_BFLOAT16, TILEMOE_BFLOAT16},
                        {TILEMOE_BFLOAT16, TILEMOE_FLOAT32},
                        {TILEMOE_FLOAT16, TILEMOE_FLOAT16},
                        {TILEMOE_FLOAT16, TILEMOE_FLOAT32}};

constexpr double kTerms = 0.3;  // s ds, with ds from N(0, 1)

struct BackwardCase {
  std::string name;
  int64_t T, E, K;
  int64_t m = 0;         // rounded by this, else top-K
  int64_t capacity = 0;  // 0: the bound
  Logits logits = Logits::kNormal;
  bool repeated_ids = false;
  float factor = 1;  // of every score
};

void PrintTo(const BackwardCase& c, std::ostream* out) {
  *out << c.name;
}

// A routing built on the host, copied to the device.
class BackwardTwin {
 public:
  BackwardTwin(const BackwardCase& c, tilemoe_scoring scoring, Types types, float beta)
      : scoring_(scoring),
        beta_(beta),
        factor_(c.factor),
        routing_(spec(c)),
        logits_(types.logits, c.T, c.E, 3),
        dlogits_(types.gradient, c.T, c.E, 1),
        ds_(TILEMOE_FLOAT32, {routing_.host().spec.pairs}) {
    logits_.fill(make_logits(c.logits, c.T, c.E, 5));
    dlogits_.fill(normals(c.T * c.E, 6));
    c.m > 0 ? round() : choose(c);
    routing_.memory().upload();
    const std::vector<float> ds = normals(ds_.elements(), 7);
    ds_.fill([&](int64_t i) {  // a skipped pair's is not read
      return static_cast<double>(routing_.host().pair_row[i] < 0 ? kNaN
                                                                 : ds[static_cast<size_t>(i)]);
    });
  }

  void run(bool device, bool with_logits = true) {
    auto args = sized<tilemoe_router_backward_args>();
    args.scoring = scoring_;
    args.routing = device ? &routing_.device() : &routing_.host();
    if (with_logits) args.logits = logits_.on(device);
    args.ds = ds_.on(device);
    args.dlogits = dlogits_.on(device);
    args.accumulate = beta_ != 0;
    args.routed_scaling_factor = factor_;
    routing_.lend_workspace(device, args);
    expect_ok(tilemoe_router_backward(&args));
    expect_cuda(cudaDeviceSynchronize(), "router backward");
  }
  TwinLogits& dlogits() { return dlogits_; }
  TwinRouting& routing() { return routing_; }

 private:
  static tilemoe_routing_spec spec(const BackwardCase& c) {
    RoutingSpec spec =
        c.m > 0 ? RoutingSpec::rounded(Device::kCpu, c.T, c.E, c.K, Rounding::kNearest, c.m)
                : RoutingSpec::top_k(Device::kCpu, c.T, c.E, c.K);
    spec.capacity = c.capacity;
    return spec;
  }
  void choose(const BackwardCase& c) {
    std::vector<int64_t> ids(static_cast<size_t>(c.T * c.K));
    std::vector<float> scores(ids.size());
    const Tensor id_tensor(ids.data(), DType::kInt64, {c.T, c.K});
    const Tensor score_tensor(scores.data(), DType::kFloat32, {c.T, c.K});
    auto args = sized<tilemoe_top_k_args>();
    args.scoring = scoring_;
    args.K = c.K;
    args.logits = logits_.on(false);
    args.ids = id_tensor, args.scores = score_tensor;
    args.routed_scaling_factor = factor_;
    expect_ok(tilemoe_top_k(&args));
    if (c.repeated_ids)
      for (size_t i = 1; i < ids.size(); i += 2) ids[i] = ids[i - 1];
    auto route = sized<tilemoe_route_top_k_args>();
    route.ids = id_tensor, route.scores = score_tensor;
    routing_.lend_workspace(false, route);
    expect_ok(tilemoe_route_top_k(&routing_.host(), &route));
  }
  void round() {
    auto args = sized<tilemoe_route_rounded_args>();
    args.logits = logits_.on(false);
    routing_.lend_workspace(false, args);
    expect_ok(tilemoe_route_rounded(&routing_.host(), &args));
  }

  tilemoe_scoring scoring_;
  float beta_, factor_;
  TwinRouting routing_;
  TwinLogits logits_, dlogits_;
  TwinTensor ds_;
};

class CudaRouterBackward : public testing::TestWithParam<BackwardCase> {};

TEST_P(CudaRouterBackward, IsTheCpus) {
  const BackwardCase& c = GetParam();
  for (int scoring = TILEMOE_SOFTMAX_OVER_CHOSEN; scoring <= TILEMOE_SIGMOID_RENORMALIZED;
       ++scoring) {
    if (c.m > 0 && scoring != TILEMOE_SOFTMAX_RENORMALIZED) continue;
    for (const Types& types : kTypes)
      for (const float beta : {0.f, 1.f}) {
        BackwardTwin twin(c, static_cast<tilemoe_scoring>(scoring), types, beta);
        twin.run(false);
        twin.run(true);
        expect_close(twin.dlogits(), c.name + ", scoring " + std::to_string(scoring),
                     types.gradient, kTerms);
        twin.routing().expect_same(c.name);
        if (HasFatalFailure()) return;
      }
  }
}

INSTANTIATE_TEST_SUITE_P(
    , CudaRouterBackward,
    testing::Values(BackwardCase{"no_tokens", 0, 5, 2}, BackwardCase{"one_token", 1, 5, 2},
                    BackwardCase{"ragged", 203, 37, 5}, BackwardCase{"every_expert", 61, 40, 40},
                    BackwardCase{"many_experts", 33, 4096, 50},
                    BackwardCase{"overflow", 203, 37, 5, 0, 700},
                    BackwardCase{"special", 211, 19, 3, 0, 0, Logits::kSpecial},
                    BackwardCase{"repeated", 203, 37, 6, 0, 0, Logits::kNormal, true},
                    BackwardCase{"factor", 203, 37, 5, 0, 0, Logits::kNormal, false, 2.5f},
                    BackwardCase{"factor_many", 33, 4096, 50, 0, 0, Logits::kNormal, false, 2.5f},
                    BackwardCase{"rounded", 1203, 37, 5, 64},
                    BackwardCase{"rounded_many", 300, 4096, 8, 16},
                    BackwardCase{"rounded_ties", 903, 17, 3, 32, 0, Logits::kTies},
                    BackwardCase{"rounded_special", 903, 17, 3, 32, 0, Logits::kSpecial},
                    BackwardCase{"rounded_overflow", 903, 17, 3, 32, 1500}),
    [](const auto& test) { return test.param.name; });

TEST(CudaRouterBackwardRun, NeedsNoLogitsIfTheScoresSuffice) {
  BackwardTwin twin({"", 203, 37, 5}, TILEMOE_SOFTMAX_OVER_CHOSEN,
                    {TILEMOE_FLOAT32, TILEMOE_BFLOAT16}, 0);
  twin.run(false, false);
  twin.run(true, false);
  expect_close(twin.dlogits(), "without logits", TILEMOE_BFLOAT16, kTerms);
}

TEST(CudaRouterBackwardRun, HasTheSameBitsEveryTime) {
  BackwardTwin twin({"", 3001, 100, 7, 64}, TILEMOE_SOFTMAX_RENORMALIZED,
                    {TILEMOE_BFLOAT16, TILEMOE_FLOAT32}, 0);
  twin.run(true);
  const std::vector<uint8_t> first = twin.dlogits().buffer().download();
  for (int i = 0; i < 30; ++i) {
    twin.run(true);
    ASSERT_TRUE(twin.dlogits().buffer().download() == first) << "run " << i;
  }
}

// ------------------------------------------------------------------ losses

struct LossCase {
  std::string name;
  int64_t T, E;
  Logits logits = Logits::kNormal;
  bool counted = true;  // else every count is 0
  float balance = 0.7f, z = 0.3f;
};

void PrintTo(const LossCase& c, std::ostream* out) {
  *out << c.name;
}

class LossTwin {
 public:
  LossTwin(const LossCase& c, Types types)
      : c_(c),
        logits_(types.logits, c.T, c.E, 2),
        dlogits_(types.gradient, c.T, c.E, 1),
        counts_(TILEMOE_INT32, {c.E}),
        losses_(TILEMOE_FLOAT32, {2}),
        host_workspace_(workspace_bytes(TILEMOE_CPU)),
        device_workspace_(workspace_bytes(TILEMOE_CUDA)) {
    logits_.fill(make_logits(c.logits, c.T, c.E, 9));
    dlogits_.fill(normals(c.T * c.E, 10));
    counts_.fill([&](int64_t e) { return c.counted ? static_cast<double>(3 + e % 5) : 0; });
  }

  void run(bool device) {
    auto args = sized<tilemoe_router_losses_args>();
    args.device = device ? TILEMOE_CUDA : TILEMOE_CPU;
    args.logits = logits_.on(device);
    args.expert_counts = counts_.on(device);
    args.losses = losses_.on(device);
    args.balance_coefficient = c_.balance;
    args.z_coefficient = c_.z;
    args.dlogits = dlogits_.on(device);
    TwinBuffer& workspace = device ? device_workspace_ : host_workspace_;
    args.workspace = device ? workspace.device() : workspace.host();
    args.workspace_bytes = workspace_bytes(args.device);
    expect_ok(tilemoe_router_losses(&args));
    expect_cuda(cudaDeviceSynchronize(), "router losses");
  }
  void expect_same(tilemoe_dtype gradient) {
    const std::vector<uint8_t> bytes = losses_.buffer().download();
    for (int64_t i = 0; i < 2; ++i) {
      const double want = losses_.at(losses_.buffer().host_bytes(), i), is = losses_.at(bytes, i);
      EXPECT_TRUE(is == want || std::fabs(is - want) <= 1e-6 * std::fabs(want))
          << c_.name << ", loss " << i << ": " << is << ", expected " << want;
    }
    expect_close(dlogits_, c_.name, gradient, 0);
  }
  TwinLogits& dlogits() { return dlogits_; }
  TwinTensor& losses() { return losses_; }

 private:
  size_t workspace_bytes(tilemoe_device device) const {
    size_t bytes = 0;
    expect_ok(tilemoe_router_losses_workspace_bytes(device, c_.T, c_.E, &bytes));
    return bytes;
  }

  LossCase c_;
  TwinLogits logits_, dlogits_;
  TwinTensor counts_, losses_;
  TwinBuffer host_workspace_, device_workspace_;
};

class CudaRouterLosses : public testing::TestWithParam<LossCase> {};

TEST_P(CudaRouterLosses, AreTheCpus) {
  for (const Types& types : kTypes) {
    LossTwin twin(GetParam(), types);
    twin.run(false);
    twin.run(true);
    twin.expect_same(types.gradient);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaRouterLosses,
                         testing::Values(LossCase{"no_tokens", 0, 5}, LossCase{"one_token", 1, 5},
                                         LossCase{"ragged", 203, 37},
                                         LossCase{"many_tokens", 20011, 8},
                                         LossCase{"many_experts", 40, 4096},
                                         LossCase{"special", 400, 11, Logits::kSpecial},
                                         LossCase{"not_counted", 50, 11, Logits::kNormal, false},
                                         LossCase{"balance", 203, 37, Logits::kNormal, true, 1, 0},
                                         LossCase{"z", 203, 37, Logits::kNormal, true, 0, 1}),
                         [](const auto& test) { return test.param.name; });

TEST(CudaRouterLossesRun, HaveTheSameBitsEveryTime) {
  const LossCase c{"", 9001, 64};
  LossTwin first(c, kTypes[0]);
  first.run(true);
  for (int i = 0; i < 10; ++i) {
    LossTwin again(c, kTypes[0]);
    again.run(true);
    ASSERT_TRUE(again.losses().buffer().download() == first.losses().buffer().download());
    ASSERT_TRUE(again.dlogits().buffer().download() == first.dlogits().buffer().download());
  }
}

}  // namespace
}  // namespace tilemoe::test
