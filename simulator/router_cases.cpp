#include "simulator/router_cases.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <sstream>

#include "tilemoe/routing.h"
#include "tilemoe/rows.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::simulator {

// The tensors of one device. Those of the other are made in the same order, with the same numbers.
class RouterTensors {
 public:
  RouterTensors(verify::Memory& memory, uint64_t data_seed)
      : memory_(memory), random_(data_seed, 1) {}

  Device device() const { return memory_.device(); }
  verify::Random& random() { return random_; }
  std::function<double(int64_t)> normal() {
    return [this](int64_t) { return random_.normal(); };
  }
  // Whole numbers below `end`; many are equal.
  std::function<double(int64_t)> below(int64_t end) {
    return [this, end](int64_t) { return static_cast<double>(random_.below(end)); };
  }

  Tensor given(DType dtype, std::initializer_list<int64_t> shape,
               const std::function<double(int64_t)>& value) {
    const int64_t count = count_of(shape);
    std::vector<std::byte> bytes(static_cast<size_t>(count) * size_of(dtype));
    for (int64_t i = 0; i < count; ++i) verify::store(dtype, bytes.data(), i, value(i));
    buffers_.emplace_back(memory_, bytes.size()).write(bytes);
    return {buffers_.back().data(), dtype, shape};
  }
  // Compared with the CPU's, bit for bit if the tolerance is 0.
  Tensor result(const char* name, DType dtype, std::initializer_list<int64_t> shape,
                double tolerance = 0) {
    results_.push_back({name, dtype, buffers_.size(), tolerance});
    const size_t bytes = static_cast<size_t>(count_of(shape)) * size_of(dtype);
    return {buffers_.emplace_back(memory_, bytes).data(), dtype, shape};
  }
  void* scratch(size_t bytes) { return buffers_.emplace_back(memory_, bytes).data(); }
  // In memory that is a result.
  Routing routing(RoutingSpec spec) {
    spec.device = static_cast<tilemoe_device>(device());
    results_.push_back({"routing", DType::kInt32, buffers_.size(), 0});
    return Routing(spec, buffers_.emplace_back(memory_, spec.bytes()).data(), spec.bytes());
  }

  static std::string compare(const RouterTensors& cpu, const RouterTensors& gpu) {
    std::ostringstream text;
    for (size_t i = 0; i < cpu.results_.size(); ++i) compare(text, cpu, gpu, i);
    for (const verify::GuardedBuffer& buffer : gpu.buffers_)
      if (!buffer.guards_intact()) text << "\n  written outside an array";
    return text.str();
  }

 private:
  struct Result {
    const char* name;
    DType dtype;
    size_t buffer;
    double tolerance;
  };

  static int64_t count_of(std::initializer_list<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
  static void compare(std::ostream& text, const RouterTensors& cpu, const RouterTensors& gpu,
                      size_t i) {
    const Result& result = cpu.results_[i];
    const std::vector<std::byte> expected = cpu.buffers_[result.buffer].read();
    const std::vector<std::byte> got = gpu.buffers_[result.buffer].read();
    if (got == expected) return;
    const auto count = static_cast<int64_t>(expected.size() / size_of(result.dtype));
    for (int64_t k = 0; k < count; ++k) {
      const double want = verify::load(result.dtype, expected.data(), k);
      const double is = verify::load(result.dtype, got.data(), k);
      if (std::memcmp(&want, &is, sizeof is) == 0 || (std::isnan(want) && std::isnan(is))) continue;
      const double allowed = result.tolerance * (1 + std::fabs(want));
      if (result.tolerance > 0 && std::fabs(is - want) <= allowed) continue;  // else 0 is not -0
      text << "\n  " << result.name << "[" << k << "]: " << is << ", the CPU has " << want;
      return;
    }
  }

  verify::Memory& memory_;
  verify::Random random_;
  std::deque<verify::GuardedBuffer> buffers_;
  std::vector<Result> results_;
};

namespace {

struct Choice {
  int64_t T, E, K;
  Scoring scoring = Scoring::kSoftmaxOverAll;
  DType dtype = DType::kBFloat16;
  int64_t n_group = 1, topk_group = 1;
  bool ties = false;
  bool nans = false;
  bool twice = false;  // in the same memory: the second time is not to run ahead of the first
};

Tensor logits_of(const Choice& c, RouterTensors& tensors) {
  const auto number = c.ties ? tensors.below(5) : tensors.normal();
  return tensors.given(c.dtype, {c.T, c.E},
                       [&](int64_t i) { return c.nans && i % 11 == 3 ? std::nan("") : number(i); });
}

void choose(const Choice& c, RouterTensors& tensors) {
  const bool sigmoid = c.scoring == Scoring::kSigmoid || c.scoring == Scoring::kSigmoidRenormalized;
  top_k({.device = tensors.device(),
         .scoring = c.scoring,
         .K = c.K,
         .logits = logits_of(c, tensors),
         .selection_bias =
             sigmoid ? tensors.given(DType::kFloat32, {c.E}, tensors.normal()) : Tensor(),
         .ids = tensors.result("ids", DType::kInt32, {c.T, c.K}),
         .scores = tensors.result("scores", DType::kFloat32, {c.T, c.K}),
         .expert_counts = tensors.result("counts", DType::kInt32, {c.E}),
         .n_group = c.n_group,
         .topk_group = c.topk_group,
         .group_score = sigmoid ? GroupScore::kTop2Sum : GroupScore::kMax});
}

Routing route(const Choice& c, RouterTensors& tensors) {
  const RoutingSpec spec = RoutingSpec::top_k(tensors.device(), c.T, c.E, c.K);
  Routing routing = tensors.routing(spec);
  const int64_t first = tensors.random().below(c.E);
  const Tensor ids = tensors.given(DType::kInt32, {c.T, c.K}, [&](int64_t i) {
    // A token's are not the same; with ties all tokens' are among few.
    return static_cast<double>(c.ties ? i % c.K * 5 + i / c.K % 5
                                      : (first + i * 7 + i / c.K) % c.E);
  });
  const Tensor scores = tensors.given(DType::kFloat32, {c.T, c.K}, tensors.normal());
  void* const scratch = tensors.scratch(spec.workspace_bytes());
  for (int i = 0; i < (c.twice ? 2 : 1); ++i)
    routing.from_top_k(ids, scores, scratch, spec.workspace_bytes());
  return routing;
}

void route_tokens(const Choice& c, int64_t d, RouterTensors& tensors) {
  const RoutingSpec spec = RoutingSpec::top_k(tensors.device(), c.T, c.E, c.K);
  Routing routing = tensors.routing(spec);
  const size_t bytes = spec.route_tokens_workspace_bytes(d);
  // Small whole numbers: every order of a dot product's sum gives the same bits.
  const auto whole = [&](int64_t) { return static_cast<double>(tensors.random().below(5)) - 2; };
  const TokenRouting args{.scoring = c.scoring,
                          .logits_dtype = DType::kFloat32,
                          .X = tensors.given(c.dtype, {c.T, d}, whole),
                          .router_weight = tensors.given(c.dtype, {c.E, d}, whole),
                          .logits = tensors.result("logits", DType::kFloat32, {c.T, c.E}),
                          .expert_counts = tensors.result("counts", DType::kInt32, {c.E}),
                          .n_group = c.n_group,
                          .topk_group = c.topk_group,
                          .group_score = GroupScore::kMax,
                          .workspace = tensors.scratch(bytes),
                          .workspace_bytes = bytes};
  for (int i = 0; i < (c.twice ? 2 : 1); ++i) routing.from_tokens(args);
}

// Small whole numbers: both devices have the exact sum.
void give_logits(const Choice& c, int64_t d, DType weight, RouterTensors& tensors) {
  const auto whole = [&](int64_t) { return static_cast<double>(tensors.random().below(5)) - 2; };
  const size_t bytes = router_logits_workspace_bytes(tensors.device(), c.T, c.E, d, weight);
  const RouterLogits args{.device = tensors.device(),
                          .X = tensors.given(c.dtype, {c.T, d}, whole),
                          .weight = tensors.given(weight, {c.E, d}, whole),
                          .bias = tensors.given(DType::kFloat32, {c.E}, whole),
                          .logits = tensors.result("logits", DType::kFloat32, {c.T, c.E}),
                          .workspace = tensors.scratch(bytes),
                          .workspace_bytes = bytes};
  for (int i = 0; i < (c.twice ? 2 : 1); ++i) router_logits(args);
}

Routing round(const Choice& c, const Tensor& logits, Rounding rule, int64_t m, int64_t round_tokens,
              RouterTensors& tensors) {
  const RoutingSpec spec =
      RoutingSpec::rounded(tensors.device(), c.T, c.E, c.K, rule, m, round_tokens);
  Routing routing = tensors.routing(spec);
  const bool seeded = rule == Rounding::kStochastic;
  const auto number = [](int64_t) { return 7.; };
  routing.from_logits({.logits = logits,
                       .seed = seeded ? tensors.given(DType::kInt64, {1}, number) : Tensor(),
                       .step = seeded ? tensors.given(DType::kInt64, {1}, number) : Tensor(),
                       .expert_counts = tensors.result("counts", DType::kInt32, {c.E}),
                       .workspace = tensors.scratch(spec.workspace_bytes()),
                       .workspace_bytes = spec.workspace_bytes()});
  return routing;
}

void go_back(const Choice& c, const Tensor& logits, const Routing& routing,
             RouterTensors& tensors) {
  const size_t bytes = static_cast<const RoutingSpec&>(routing.spec).workspace_bytes();
  router_backward({.scoring = c.scoring,
                   .routing = &routing,
                   .logits = logits,
                   .ds = tensors.given(DType::kFloat32, {routing.pairs()}, tensors.normal()),
                   .dlogits = tensors.result("dlogits", DType::kFloat32, {c.T, c.E}, 1e-5),
                   .workspace = tensors.scratch(bytes),
                   .workspace_bytes = bytes});
}

void lose(const Choice& c, RouterTensors& tensors) {
  const size_t bytes = router_losses_workspace_bytes(tensors.device(), c.T, c.E);
  Tensor dlogits = tensors.result("dlogits", DType::kFloat32, {c.T, c.E}, 1e-5);
  router_losses({.device = tensors.device(),
                 .balance_coefficient = 0.7f,
                 .z_coefficient = 0.3f,
                 .logits = tensors.given(c.dtype, {c.T, c.E}, tensors.normal()),
                 .expert_counts = tensors.given(DType::kInt32, {c.E}, tensors.below(9)),
                 .losses = tensors.result("losses", DType::kFloat32, {2}, 1e-5),
                 .dlogits = dlogits,
                 .workspace = tensors.scratch(bytes),
                 .workspace_bytes = bytes});
}

struct RowSums {
  int32_t sources;
  int64_t source_rows, rows, P, d;
  bool addend = false;
  bool again = false;  // the sums once more, added to themselves in place
  DType dtype = DType::kBFloat16;
};

void sum_rows_of(const RowSums& c, RouterTensors& tensors) {
  const auto number = [&](int64_t i) { return i % 4 == 1 ? -0. : tensors.random().normal(); };
  std::vector<const void*> source;  // an allocation each
  for (int32_t s = 0; s < c.sources; ++s)
    source.push_back(tensors.given(c.dtype, {c.source_rows, c.d}, number).data);
  const int64_t all = c.sources * c.source_rows;
  SumRows sums{.device = tensors.device(),
               .source = source.data(),
               .sources = c.sources,
               .source_rows = c.source_rows,
               .place = tensors.given(DType::kInt32, {c.rows, c.P},
                                      [&](int64_t) {  // every fifth is no row
                                        const int64_t place = tensors.random().below(all + all / 4);
                                        return static_cast<double>(place - all / 8);
                                      }),
               .out = tensors.result("out", c.dtype, {c.rows, c.d})};
  if (c.addend) sums.addend = tensors.given(c.dtype, {c.rows, c.d}, number);
  sum_rows(sums);
  sums.addend = sums.out;
  if (c.again) sum_rows(sums);
}

RouterCase top_k_case(const char* name, const Choice& c) {
  return {std::string("router-top-k-") + name, [c](RouterTensors& t) { choose(c, t); }};
}
RouterCase pairs_case(const char* name, const Choice& c) {
  return {std::string("router-pairs-") + name, [c](RouterTensors& t) { route(c, t); }};
}
RouterCase tokens_case(const char* name, const Choice& c, int64_t d) {
  return {std::string("router-tokens-") + name,
          [c, d](RouterTensors& t) { route_tokens(c, d, t); }};
}
RouterCase logits_case(const char* name, const Choice& c, int64_t d,
                       DType weight = DType::kBFloat16) {
  return {std::string("router-logits-") + name,
          [=](RouterTensors& t) { give_logits(c, d, weight, t); }};
}
RouterCase backward_case(const char* name, const Choice& c) {
  return {std::string("router-backward") + name,
          [c](RouterTensors& t) { go_back(c, logits_of(c, t), route(c, t), t); }};
}
RouterCase sums_case(const char* name, const RowSums& c) {
  return {std::string("router-sum-rows-") + name, [c](RouterTensors& t) { sum_rows_of(c, t); }};
}
RouterCase rounded_case(const char* name, const Choice& c, Rounding rule, int64_t m,
                        int64_t round_tokens = 0) {
  return {std::string("router-rounded-") + name,
          [=](RouterTensors& t) { round(c, logits_of(c, t), rule, m, round_tokens, t); }};
}

}  // namespace

const std::vector<RouterCase>& router_cases() {
  constexpr Choice kRows{.T = 11, .E = 37, .K = 5};
  constexpr Choice kMany{.T = 3, .E = 600, .K = 40};
  static const std::vector<RouterCase> cases = {
      top_k_case("by-warps", {.T = 19, .E = 40, .K = 8}),
      top_k_case("by-warps-ties", {.T = 19, .E = 129, .K = 6, .ties = true}),
      top_k_case("by-wide-warps",
                 {.T = 9, .E = 1000, .K = 17, .scoring = Scoring::kSigmoid, .ties = true}),
      top_k_case("by-blocks", {.T = 3, .E = 600, .K = 200, .ties = true}),
      top_k_case("by-blocks-sigmoid",
                 {.T = 3, .E = 513, .K = 40, .scoring = Scoring::kSigmoidRenormalized}),
      top_k_case("of-many", {.T = 2, .E = 17000, .K = 12, .ties = true}),
      top_k_case(
          "in-groups",
          {.T = 19, .E = 256, .K = 8, .scoring = Scoring::kSigmoid, .n_group = 8, .topk_group = 4}),
      top_k_case("in-odd-groups", {.T = 9, .E = 96, .K = 8, .n_group = 3, .topk_group = 2}),
      top_k_case("in-groups-by-blocks",
                 {.T = 3, .E = 1024, .K = 40, .n_group = 8, .topk_group = 3}),
      pairs_case("few", {.T = 40, .E = 7, .K = 3}),
      pairs_case("many", {.T = 700, .E = 64, .K = 6}),
      pairs_case("of-many-experts", {.T = 30, .E = 9000, .K = 4}),
      pairs_case("of-few-of-many-experts", {.T = 200, .E = 520, .K = 3, .ties = true}),
      pairs_case("twice", {.T = 40, .E = 7, .K = 3, .twice = true}),
      tokens_case("one", {.T = 1, .E = 24, .K = 4}, 264),
      tokens_case("many", {.T = 33, .E = 24, .K = 4}, 64),
      tokens_case("in-groups", {.T = 5, .E = 64, .K = 4, .n_group = 8, .topk_group = 3}, 64),
      tokens_case("sigmoid", {.T = 20, .E = 40, .K = 4, .scoring = Scoring::kSigmoid}, 64),
      tokens_case("twice", {.T = 5, .E = 24, .K = 4, .twice = true}, 64),
      logits_case("few", {.T = 5, .E = 24, .K = 1}, 264),
      logits_case("few-in-chunks", {.T = 20, .E = 40, .K = 1, .twice = true}, 1096),
      logits_case("many", {.T = 500, .E = 70, .K = 1}, 584),
      logits_case("two-tiles", {.T = 250, .E = 330, .K = 1}, 1096),
      logits_case("two-tiles-alone", {.T = 250, .E = 336, .K = 1}, 1088),
      logits_case("of-terms", {.T = 150, .E = 37, .K = 1}, 536, DType::kFloat32),
      rounded_case("nearest", {.T = 90, .E = 7, .K = 3}, Rounding::kNearest, 16),
      rounded_case("nearest-ties", {.T = 90, .E = 7, .K = 3, .ties = true}, Rounding::kNearest, 16),
      rounded_case("nearest-nans", {.T = 90, .E = 7, .K = 3, .nans = true}, Rounding::kNearest, 16),
      rounded_case("many-chosen-nans", {.T = 7, .E = 300, .K = 40, .nans = true}, Rounding::kUp, 4),
      rounded_case("stochastic", {.T = 90, .E = 7, .K = 3}, Rounding::kStochastic, 16),
      rounded_case("in-groups", {.T = 90, .E = 7, .K = 3}, Rounding::kBalanced, 8, 30),
      rounded_case("many-experts", {.T = 7, .E = 520, .K = 40}, Rounding::kUp, 4),
      backward_case("", kRows),
      backward_case("-of-many", kMany),
      backward_case("-of-tokens-together",
                    {.T = 70, .E = 37, .K = 5, .scoring = Scoring::kSigmoidRenormalized}),
      {"router-backward-rounded",
       [](RouterTensors& t) {
         constexpr Choice kRounded{
             .T = 60, .E = 17, .K = 3, .scoring = Scoring::kSoftmaxRenormalized};
         const Tensor logits = logits_of(kRounded, t);  // the scores of these are what comes back
         go_back(kRounded, logits, round(kRounded, logits, Rounding::kNearest, 16, 0, t), t);
       }},
      {"router-losses", [kRows](RouterTensors& t) { lose(kRows, t); }},
      {"router-losses-of-many", [kMany](RouterTensors& t) { lose(kMany, t); }},
      sums_case("copied", {.sources = 3, .source_rows = 40, .rows = 70, .P = 1, .d = 264}),
      sums_case("one",
                {.sources = 1, .source_rows = 50, .rows = 33, .P = 1, .d = 88, .addend = true}),
      sums_case("two", {.sources = 8, .source_rows = 16, .rows = 60, .P = 2, .d = 264}),
      sums_case("four-again", {.sources = 5,
                               .source_rows = 9,
                               .rows = 70,
                               .P = 4,
                               .d = 104,
                               .again = true,
                               .dtype = DType::kFloat16}),
      sums_case("many", {.sources = 64,
                         .source_rows = 3,
                         .rows = 40,
                         .P = 11,
                         .d = 136,
                         .addend = true,
                         .again = true}),
  };
  return cases;
}

std::string compare_devices(const RouterCase& one, uint64_t data_seed) {
  RouterTensors cpu(verify::host_memory(), data_seed), gpu(verify::cuda_memory(), data_seed);
  one.call(cpu);
  one.call(gpu);
  return RouterTensors::compare(cpu, gpu);
}

}  // namespace tilemoe::simulator
