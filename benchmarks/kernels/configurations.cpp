// Every tile configuration of the GEMMs that have several, interleaved, and the cost model's pick;
// then column groups, gathered rows or rows in order, and PDL.
#include <algorithm>
#include <cstdio>

#include "cuda/cuda_backend.h"
#include "cuda/plan.h"
#include "layer/workspace.h"
#include "modes.h"
#include "timed_layer.h"

namespace tilemoe::app {
namespace {

using cuda::TileConfiguration;
using verify::Case;

constexpr double kBar = 1.03;  // the pick's time over the fastest tile's
// Differences below this are not judged: a kernel of 10 us varies so much from run to run.
constexpr double kMinDifferenceMs = 0.002;
constexpr int64_t kDecoded = 64;  // tokens: up to here nobody needs gradients

std::string name_of(const TileConfiguration& tile) {
  return std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) +
         (tile.schedule == cuda::Schedule::kPingPong ? " ping-pong" : " cooperative") +
         (tile.cluster > 1 ? ", pairs" : "");
}

struct Choice {
  std::string name;
  std::function<void()> run;
};

class Comparison {
 public:
  Comparison(const Case& one, Clock& clock, int rounds, Report& report)
      : case_(one), layer_(one, Device::kCuda), clock_(clock), rounds_(rounds), report_(report) {
    layer_.forward();  // routes, and fills H
    const TimedTensors& t = layer_.tensors();
    const Routing& routing = layer_.routing();
    const int64_t M = routing.capacity(), n = one.n, d = one.d;
    Arena sizes;
    take(sizes, M, n, d);
    memory_ = allocate(layer_.memory(), sizes.bytes());
    Arena arena(memory_.get());
    take(arena, M, n, d);
    fill_normal(layer_.memory(), A_, 0.1, 1), fill_normal(layer_.memory(), dH_, 0.01, 2);
    experts_ = layer_.experts().to_c();
    up_.experts = down_.experts = dA_.experts = dX_.experts = combine_.experts = &experts_;
    up_.rows = down_.rows = dA_.rows = dX_.rows = {.E = one.E,
                                                   .capacity = M,
                                                   .of_an_expert = rows_of_an_expert(routing.spec),
                                                   .offsets = routing.offsets,
                                                   .token = routing.row_token,
                                                   .score = routing.row_score};
    up_.X = t.X, up_.weights.W1 = t.W1, up_.H = t.H, up_.A = A_;
    down_.A = A_, down_.W2 = t.W2, down_.Y = Y_;
    combine_.routing = &routing, combine_.row_values = Y_, combine_.scale_by_score = true;
    combine_.out = t.O;
    dA_.dO = t.dO, dA_.W1 = t.W1, dA_.W2 = t.W2, dA_.H = t.H, dA_.dH = dH_, dA_.A_scaled = A_;
    dA_.ds_partial = static_cast<float*>(ds_partial_.data);
    dX_.dH = dH_, dX_.weights.W1 = t.W1, dX_.dX_rows = Y_;
  }

  // -> the pick's time over the fastest tile's, at most.
  double run() {
    const Backend& backend = cuda::backend();
    const auto up = [&](const UpProjection& step) { backend.steps.up_projection.run(step); };
    const auto down = [&](const DownProjection& step) { backend.steps.down_projection.run(step); };
    const auto dA = [&](const ActivationGradient& step) {
      backend.steps.activation_gradient.run(step);
    };
    const auto dX = [&](const InputGradient& step) { backend.steps.input_gradient.run(step); };
    compare_tiles(step::up_projection, up_, up);
    compare_tiles(step::down_projection, down_, down);
    if (case_.T <= kDecoded) return worst_;
    compare_tiles(step::activation_gradient, dA_, dA);
    const double judged = worst_;  // the model was fitted to the three before, as the bar is
    compare_tiles(step::input_gradient, dX_, dX);
    worst_ = judged;
    compare_column_groups(step::up_projection, up_, up);
    compare_column_groups(step::down_projection, down_, down);
    compare_column_groups(step::activation_gradient, dA_, dA);
    compare_column_groups(step::input_gradient, dX_, dX);
    compare_gather(up);
    std::vector<Choice> launches;
    for (const bool pdl : {false, true})
      launches.push_back({pdl ? "with PDL" : "without PDL", [&, pdl] {
                            up_.tuning.pdl = down_.tuning.pdl = combine_.tuning.pdl = pdl;
                            up(up_), down(down_), backend.steps.combine.run(combine_);
                          }});
    compare("forward", launches);
    finish("forward");
    return worst_;
  }

 private:
  void take(Arena& arena, int64_t M, int64_t n, int64_t d) {
    A_ = tilemoe_tensor(arena.take(case_.dtype, {M, n}));
    Y_ = tilemoe_tensor(arena.take(case_.dtype, {M, d}));
    dH_ = tilemoe_tensor(arena.take(case_.dtype, {M, case_.h_width()}));
    ds_partial_ = tilemoe_tensor(arena.take(DType::kFloat32, {ds_groups(n), M}));
  }

  // The medians in ms, in the order of the choices; prints them, and notes the quartiles.
  std::vector<double> compare(const char* step, const std::vector<Choice>& choices) {
    std::vector<std::function<void()>> runs;
    for (const Choice& one : choices) runs.push_back(one.run);
    const std::vector<Samples> samples = interleaved_ms(clock_, runs, rounds_);
    std::printf("%-14s %-20s ms", case_.name.c_str(), step);
    values_ = shape_values(case_);
    values_["step"] = step;
    std::vector<double> medians;
    for (size_t i = 0; i < choices.size(); ++i) {
      const Quartiles q = quartiles(samples[i]);
      values_[choices[i].name + "_ms"] = triple(q);
      medians.push_back(q.median);
      std::printf("  %s %.4f", choices[i].name.c_str(), q.median);
    }
    return medians;
  }

  void finish(const std::string& comparison) {
    std::printf("\n");
    std::fflush(stdout);
    report_.add("configurations/" + case_.name + "/" + comparison, std::move(values_));
  }

  template <class Step, class Run>
  void compare_tiles(const char* name, Step step, const Run& run) {
    const std::span<const TileConfiguration> tiles = cuda::tiles_of(cuda::key_of(step));
    const TileConfiguration pick = *cuda::kernel_of(step);
    std::vector<Choice> choices;
    for (const TileConfiguration& tile : tiles)
      choices.push_back({name_of(tile), [&, forced = &tile] {
                           step.tuning.tile = forced;
                           run(step);
                         }});
    const std::vector<double> medians = compare(name, choices);
    const auto picked =
        static_cast<size_t>(std::find(tiles.begin(), tiles.end(), pick) - tiles.begin());
    const double best = *std::min_element(medians.begin(), medians.end());
    const double ratio = medians.at(picked) / best;
    if (medians[picked] - best > kMinDifferenceMs) worst_ = std::max(worst_, ratio);
    values_["pick"] = name_of(pick);
    values_["pick_over_best"] = ratio;
    std::printf("  pick %s, %.3f of the best", name_of(pick).c_str(), ratio);
    finish(name);
  }

  template <class Step, class Run>
  void compare_column_groups(const char* name, Step step, const Run& run) {
    std::vector<Choice> choices;
    for (const int32_t group : {4, 6, 8, 12, 16, 24, 32})
      choices.push_back({"group of " + std::to_string(group), [&, group] {
                           step.tuning.column_group = group;
                           run(step);
                         }});
    compare(name, choices);
    finish(std::string(name) + ", column groups");
  }

  // What it costs that threads gather the rows: TMA loads rows that are in the experts' order.
  template <class Run>
  void compare_gather(const Run& run) {
    UpProjection in_order = up_;
    in_order.rows.token = nullptr;
    in_order.X = Y_;
    fill_normal(layer_.memory(), Y_, 1, 3);
    compare(step::up_projection,
            {{"gathered", [&] { run(up_); }}, {"in order", [&] { run(in_order); }}});
    finish(std::string(step::up_projection) + ", gather");
  }

  Case case_;
  TimedLayer layer_;
  Clock& clock_;
  int rounds_;
  Report& report_;
  std::shared_ptr<void> memory_;
  tilemoe_tensor A_, Y_, dH_, ds_partial_;
  tilemoe_experts experts_{};
  UpProjection up_{};
  DownProjection down_{};
  Combine combine_{};
  ActivationGradient dA_{};
  InputGradient dX_{};
  Values values_;
  double worst_ = 1;
};

}  // namespace

bool compare_configurations(const Request& request, Report& report) {
  const std::unique_ptr<Clock> clock = make_clock(request.device);
  double worst = 1;
  for (const Case& one : request.layers)
    worst = std::max(worst, Comparison(one, *clock, request.rounds, report).run());
  std::printf("the pick takes at most %.3f times the fastest tile's time; bar %.2f\n", worst, kBar);
  return worst <= kBar;
}

}  // namespace tilemoe::app
