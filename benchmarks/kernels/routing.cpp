#include "modes.h"
#include "timed_layer.h"

namespace tilemoe::app {
namespace {

using verify::Case;

// Groups of experts as DeepSeek-V3 has them: 8, of which a token chooses among the best 4.
constexpr int64_t kGroups = 8, kBestGroups = 4;

struct Run {
  std::string name;
  std::function<void()> body;
  double bytes;
};

void time_layer(const Case& layer, const Request& request, Clock& clock, Report& report) {
  const int64_t T = layer.T, E = layer.E, K = layer.K;
  verify::Memory& memory = verify::memory_of(request.device);
  std::vector<std::shared_ptr<void>> allocations;
  const auto take = [&](size_t bytes) {
    return allocations.emplace_back(allocate(memory, bytes)).get();
  };
  const auto pairs = static_cast<size_t>(T * K);
  const Tensor ids(take(pairs * 4), DType::kInt32, {T, K});
  const Tensor scores(take(pairs * 4), DType::kFloat32, {T, K});
  const Tensor logits(take(static_cast<size_t>(T * E) * size_of(layer.dtype)), layer.dtype, {T, E});
  fill_logits(memory, logits, layer.load);
  const auto choose = [&](Scoring scoring, int64_t groups, int64_t best) {
    top_k({.device = request.device,
           .scoring = scoring,
           .K = K,
           .logits = logits,
           .ids = tilemoe_tensor(ids),
           .scores = tilemoe_tensor(scores),
           .n_group = groups,
           .topk_group = best});
  };
  // Logits, ids and scores; then both again, twice the ids, and 12 bytes a pair.
  const double logit_bytes = static_cast<double>(T * E) * static_cast<double>(size_of(layer.dtype));
  const double pair_bytes = static_cast<double>(pairs) * 4;
  std::vector<Run> runs;
  runs.push_back(
      {"top_k", [&] { choose(Scoring::kSoftmaxOverChosen, 1, 1); }, logit_bytes + 2 * pair_bytes});
  // A group's value is the sum of its two best experts.
  if (E % kGroups == 0 && E >= 2 * kGroups && E / kGroups * kBestGroups >= K) {
    runs.push_back({"top_k, sigmoid", [&] { choose(Scoring::kSigmoidRenormalized, 1, 1); },
                    logit_bytes + 2 * pair_bytes});
    runs.push_back({"top_k, sigmoid, 4 of 8 groups",
                    [&] { choose(Scoring::kSigmoidRenormalized, kGroups, kBestGroups); },
                    logit_bytes + 2 * pair_bytes});
  }
  // A routing and its workspace, for as long as the runs live.
  std::vector<std::unique_ptr<Routing>> routings;
  const auto make = [&](const RoutingSpec& spec) -> Routing& {
    return *routings.emplace_back(
        std::make_unique<Routing>(spec, take(spec.bytes()), spec.bytes()));
  };
  const RoutingSpec plain = RoutingSpec::top_k(request.device, T, E, K);
  Routing& routing = make(plain);
  void* const workspace = take(plain.workspace_bytes());
  const auto route = [&, bytes = plain.workspace_bytes()] {
    routing.from_top_k(ids, scores, workspace, bytes);
  };
  runs.push_back({"route", route, 6 * pair_bytes});
  runs.push_back({"top_k and route",
                  [&] {
                    choose(Scoring::kSoftmaxOverChosen, 1, 1);
                    route();
                  },
                  logit_bytes + 8 * pair_bytes});
  struct Rule {
    const char* name;
    Rounding rounding;
    int64_t tokens;
  };
  for (const Rule rule : {Rule{"rounded, nearest", Rounding::kNearest, 0},
                          Rule{"rounded, balanced", Rounding::kBalanced, 0},
                          Rule{"rounded, nearest, each 2048", Rounding::kNearest, 2048},
                          Rule{"rounded, nearest, each 256", Rounding::kNearest, 256}}) {
    if (rule.tokens > 0 && T % rule.tokens != 0) continue;
    const RoutingSpec spec =
        RoutingSpec::rounded(request.device, T, E, K, rule.rounding, 128, rule.tokens);
    Routing* const rounded = &make(spec);
    const size_t bytes = spec.workspace_bytes();
    void* const place = take(bytes);
    runs.push_back({rule.name,
                    [=] {
                      rounded->from_logits(
                          {.logits = logits, .workspace = place, .workspace_bytes = bytes});
                    },
                    logit_bytes + 3 * pair_bytes});
  }
  choose(Scoring::kSoftmaxOverChosen, 1, 1);  // the ids that `route` reads
  std::vector<std::function<void()>> bodies;
  for (const Run& run : runs) bodies.push_back(run.body);
  const std::vector<Samples> ms = interleaved_ms(clock, bodies, request.rounds);
  for (size_t i = 0; i < runs.size(); ++i)
    report.add_times("routing/" + layer.name + "/" + runs[i].name, ms[i], {{0, runs[i].bytes}});
}

}  // namespace

void time_routing(const Request& request, Report& report) {
  const std::unique_ptr<Clock> clock = make_clock(request.device);
  for (const Case& layer : request.layers) {
    time_layer(layer, request, *clock, report);
    report.print(layer.name + ", routing: " + shape_text(layer) + ", " + report.device());
  }
}

}  // namespace tilemoe::app
