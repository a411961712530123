#include "configurations.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "commit.h"
#include "cuda/core/device.h"
#include "cuda/products.h"
#include "forward_problem.h"

namespace tilemoe {
namespace {

using cuda::Schedule;
using cuda::TileConfiguration;
using nlohmann::json;
using Runs = std::vector<std::function<void()>>;

constexpr double kBar = 1.03;  // the pick's time over the best tile's

// Beside those of step_bench.h: few rows an expert and many, one expert, narrow and wide.
constexpr Config kOtherConfigs[] = {
    {"decode", 64, 4096, 1536, 128, 8},    {"t1024", 1024, 4096, 1024, 64, 4},
    {"t4096", 4096, 2048, 768, 128, 8},    {"narrow", 65536, 512, 128, 64, 8},
    {"granite", 16384, 1536, 512, 40, 8},  {"one-expert", 8192, 4096, 4096, 1, 1},
    {"mixtral", 8192, 4096, 14336, 8, 2},  {"phi", 8192, 4096, 6400, 16, 2},
    {"deepseek", 4096, 7168, 2048, 64, 8}, {"n1408", 8192, 2048, 1408, 60, 4},
    {"7b-t1", 1, 1536, 256, 128, 8},       {"7b-t16", 16, 1536, 256, 128, 8},
    {"7b-t64", 64, 1536, 256, 128, 8},     {"qwen3-t1", 1, 4096, 1536, 128, 8},
    {"qwen3-t16", 16, 4096, 1536, 128, 8}, {"qwen3-t256", 256, 4096, 1536, 128, 8}};
constexpr int64_t kServed = 64;  // tokens: up to here nobody asks for gradients
// Where column groups and early launches are compared too.
constexpr const char* kExamined[] = {"7b-n256", "30b-n256", "30b-n1024", "qwen3-235b"};

// The activation gradient of the forward problem's tensors, X in the place of dO.
ActivationGradient gradient_of(const ForwardProblem& problem, const DeviceBuffer& dH,
                               const DeviceBuffer& ds_partial) {
  ActivationGradient step{};
  step.experts = problem.up.experts;
  step.rows = problem.up.rows;
  step.dO = problem.up.X;
  step.W1 = problem.up.weights.W1;
  step.W2 = problem.down.W2;
  step.H = step.dH = problem.up.H;
  step.dH.data = dH.data();
  step.A_scaled = problem.up.A;
  step.ds_partial = static_cast<float*>(ds_partial.data());
  return step;
}

// Medians of runs that take turns, so that a change of clocks meets all of them.
std::vector<double> medians_ms(const DeviceBuffer& flush, const Runs& runs) {
  constexpr int kRounds = 15;
  std::vector<std::vector<double>> times(runs.size());
  for (int round = 0; round <= kRounds; ++round)
    for (size_t turn = 0; turn < runs.size(); ++turn) {
      const size_t i = round % 2 ? turn : runs.size() - 1 - turn;
      const double ms = median_ms<1, 0>(flush, runs[i]);
      if (round > 0) times[i].push_back(ms);
    }
  std::vector<double> medians;
  for (std::vector<double>& one : times) {
    std::nth_element(one.begin(), one.begin() + kRounds / 2, one.end());
    medians.push_back(one[kRounds / 2]);
  }
  return medians;
}

struct Comparison {
  json projections = json::array(), column_groups = json::array(), early_launch = json::array();
  double worst = 1;

  void compare(const Config& c) {
    ForwardProblem problem(c);
    const DeviceBuffer flush(size_t{256} << 20);
    Backend& backend = cuda::backend();
    const auto up = [&](const UpProjection& step) { backend.up_projection(step); };
    const auto down = [&](const DownProjection& step) { backend.down_projection(step); };
    compare_tiles(c, "up", flush, problem.up, up);
    compare_tiles(c, "down", flush, problem.down, down);
    if (c.T <= kServed) return;
    const auto M = static_cast<size_t>(c.T * c.K);
    const DeviceBuffer dH(M * static_cast<size_t>(2 * c.n) * 2);
    const DeviceBuffer ds_partial(static_cast<size_t>(ds_groups(c.n)) * M * sizeof(float));
    compare_tiles(c, "dA'", flush, gradient_of(problem, dH, ds_partial),
                  [&](const ActivationGradient& step) { backend.activation_gradient(step); });
    const std::string name = c.name;
    if (std::find(std::begin(kExamined), std::end(kExamined), name) == std::end(kExamined)) return;
    compare_column_groups(c, "up", flush, problem.up, up);
    compare_column_groups(c, "down", flush, problem.down, down);
    compare_early_launch(c, flush, [&](bool early) {
      problem.up.tuning.early = problem.down.tuning.early = problem.combine.tuning.early = early;
      up(problem.up);
      down(problem.down);
      backend.combine(problem.combine);
    });
  }

 private:
  template <class Step, class Run>
  void compare_tiles(const Config& c, const char* name, const DeviceBuffer& flush, Step step,
                     const Run& run) {
    const cuda::Tiles found(cuda::key_of(step));
    const std::vector<cuda::TileConfiguration> tiles(found.begin(), found.end());
    const cuda::TileConfiguration pick = cuda::tile_of(step);
    Runs runs;
    for (const cuda::TileConfiguration& tile : tiles)
      runs.push_back([&] {
        step.tuning.tile = &tile;
        run(step);
      });
    const std::vector<double> ms = medians_ms(flush, runs);
    const double best = *std::min_element(ms.begin(), ms.end());
    json entry = shape_of(c);
    entry["step"] = name;
    entry["pick"] = name_of(pick);
    std::printf("%-12s %-5s", c.name, name);
    for (size_t i = 0; i < tiles.size(); ++i) {
      const bool picked = tiles[i] == pick;
      entry["ms"][name_of(tiles[i])] = ms[i];
      if (picked) entry["pick_over_best"] = ms[i] / best, worst = std::max(worst, ms[i] / best);
      std::printf("  %s %.4f ms%s", name_of(tiles[i]).c_str(), ms[i], picked ? " (pick)" : "");
    }
    std::printf("  pick / best %.3f\n", entry["pick_over_best"].get<double>());
    std::fflush(stdout);
    projections.push_back(entry);
  }

  template <class Step, class Run>
  void compare_column_groups(const Config& c, const char* name, const DeviceBuffer& flush,
                             Step step, const Run& run) {
    const int32_t groups[] = {1, 2, 4, 8, 16, 32};
    Runs runs;
    for (const int32_t group : groups)
      runs.push_back([&, group] {
        step.tuning.column_group = group;
        run(step);
      });
    const std::vector<double> ms = medians_ms(flush, runs);
    json entry = shape_of(c);
    entry["step"] = name;
    std::printf("%-12s %-5s blocks of columns together:", c.name, name);
    for (size_t i = 0; i < runs.size(); ++i) {
      entry["ms"][std::to_string(groups[i])] = ms[i];
      std::printf("  %d: %.4f ms", groups[i], ms[i]);
    }
    std::printf("\n");
    column_groups.push_back(entry);
  }

  // Of the experts' forward pass, back to back.
  void compare_early_launch(const Config& c, const DeviceBuffer& flush,
                            const std::function<void(bool)>& run) {
    Runs runs;
    for (const bool early : {false, true}) runs.push_back([&, early] { run(early); });
    const std::vector<double> ms = medians_ms(flush, runs);
    json entry = shape_of(c);
    entry["ms"] = {{"off", ms[0]}, {"on", ms[1]}};
    early_launch.push_back(entry);
    std::printf("%-12s forward, early launches off: %.4f ms  on: %.4f ms\n", c.name, ms[0], ms[1]);
  }

  static json shape_of(const Config& c) {
    return {{"config", c.name}, {"T", c.T}, {"d", c.d}, {"n", c.n}, {"E", c.E}, {"K", c.K}};
  }
};

std::string dotted(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// "unknown" where the driver does not say.
std::string driver_version() {
  std::ifstream file("/sys/module/nvidia/version");
  std::string version;
  return file >> version ? version : "unknown";
}

json machine() {
  int driver = 0, runtime = 0;
  check_cuda(cudaDriverGetVersion(&driver));
  check_cuda(cudaRuntimeGetVersion(&runtime));
  return {{"device", cuda::current_device().name},
          {"driver", driver_version()},
          {"cuda_driver", dotted(driver)},
          {"cuda_runtime", dotted(runtime)},
          {"commit", TILEMOE_COMMIT}};
}

}  // namespace

bool compare_configurations(const std::vector<std::string>& names, const std::string& json_file) {
  const auto wanted = [&](const Config& c) {
    return names.empty() || std::find(names.begin(), names.end(), c.name) != names.end();
  };
  Comparison comparison;
  for (const Config& c : configs())
    if (wanted(c)) comparison.compare(c);
  for (const Config& c : kOtherConfigs)
    if (wanted(c)) comparison.compare(c);
  std::printf("the pick's time is at most %.3f of the best tile's, in %zu projections; bar %.2f\n",
              comparison.worst, comparison.projections.size(), kBar);
  if (!json_file.empty()) {
    json report = machine();
    report["projections"] = comparison.projections;
    report["column_groups"] = comparison.column_groups;
    report["early_launch"] = comparison.early_launch;
    report["worst_pick_over_best"] = comparison.worst;
    std::ofstream out(json_file);
    out << report.dump(1) << "\n";
    if (!out) throw std::runtime_error("cannot write " + json_file);
  }
  return comparison.worst <= kBar;
}

}  // namespace tilemoe
