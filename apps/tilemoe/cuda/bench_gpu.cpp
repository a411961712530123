#include "cuda/bench_gpu.h"

#include <algorithm>
#include <iostream>
#include <string>

#include "bench_report.h"
#include "build_info.h"
#include "cuda/bench_gpu_measure.h"
#include "table.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;
using verify::Case;
using verify::Load;
using verify::RoutingKind;

struct StepFigures {
  std::string step;
  double ms;
  Work work;
  double dense_ms;  // 0 where it is no projection
};

// What an H100 can do at most: the rate of a large dense product that was measured, and of a copy.
double limit_ms(const Work& work) {
  constexpr double kFlopPerMs = 798e9, kBytesPerMs = 3.0e9;
  return std::max(work.flop / kFlopPerMs, work.bytes / kBytesPerMs);
}

// Weights are counted where they are read: one expert's where it has all rows.
Work work_at_least(const std::string& name, const GpuMeasurement& measurement) {
  Case layer = measurement.layer();
  const bool reads_weights = name == step::kUpProjection || name == step::kDownProjection;
  if (layer.load == Load::kOneExpert && reads_weights) layer.E = 1;
  return work_of(name, layer, measurement.rows());
}

std::vector<StepFigures> figures_of(const GpuMeasurement& measurement) {
  std::vector<StepFigures> figures;
  const std::vector<GpuRound>& rounds = measurement.rounds();
  if (rounds.empty()) return figures;
  const double up = median_of(rounds, [](const GpuRound& r) { return r.dense_up; });
  const double down = median_of(rounds, [](const GpuRound& r) { return r.dense_down; });
  for (size_t i = 0; i < rounds.front().steps.size(); ++i) {
    const std::string& name = rounds.front().steps[i].step;
    const double dense = name == step::kUpProjection     ? up
                         : name == step::kDownProjection ? down
                                                         : 0;
    figures.push_back({name, median_of(rounds, [&](const GpuRound& r) { return r.steps[i].ms; }),
                       work_at_least(name, measurement), dense});
  }
  return figures;
}

const char* load_name(Load load) {
  switch (load) {
    case Load::kRandom: return "random";
    case Load::kZipf: return "zipf";
    case Load::kOneExpert: return "one-expert";
    case Load::kHalfEmpty: return "half-empty";
  }
  return "";
}

const char* rounding_name(const Case& layer) {
  if (layer.routing != RoutingKind::kRounded) return "none";
  switch (layer.rounding) {
    case Rounding::kNearest: return "nearest";
    case Rounding::kUp: return "up";
    case Rounding::kDown: return "down";
    case Rounding::kStochastic: return "stochastic";
    case Rounding::kBalanced: return "balanced";
  }
  return "";
}

json gpu_versions() {
  json all = versions();
  all["cuda_driver"] = driver_version();
  all["cuda_runtime"] = runtime_version();
  all["cublaslt"] = cublaslt_version();
  return all;
}

json layer_entry(const GpuMeasurement& measurement) {
  const Case& layer = measurement.layer();
  const std::vector<GpuRound>& rounds = measurement.rounds();
  json entry = {{"config", layer.name},
                {"device", gpu_name()},
                {"backend", kGpuLayerBackend},
                {"dtype", tilemoe_dtype_name(to_c(layer.dtype))},
                {"shape", shape_of(layer)},
                {"routing", load_name(layer.load)},
                {"rounding", rounding_name(layer)},
                {"rows", measurement.rows()},
                {"rounds", rounds.size()},
                {"commit", build_info().commit},
                {"versions", gpu_versions()}};
  entry["fwd_ms"] = median_of(rounds, [](const GpuRound& r) { return r.forward; });
  entry["bwd_ms"] = nullptr;  // not timed yet
  entry["host_ms"] = median_of(rounds, [](const GpuRound& r) { return r.host; });
  if (measurement.first_call().context > 0)
    entry["first_call_ms"] = {{"context", measurement.first_call().context},
                              {"forward", measurement.first_call().forward}};
  entry["saved_bytes"] = measurement.device_layer().saved_bytes();
  entry["workspace_bytes"] = {{"forward", measurement.device_layer().workspace_bytes()}};
  entry["steps"] = json::object();
  double limit = 0;
  for (const StepFigures& figures : figures_of(measurement)) {
    json& step = entry["steps"][figures.step];
    step = {{"ms", figures.ms},
            {"limit_ms", limit_ms(figures.work)},
            {"tflops", figures.work.flop / figures.ms * 1e-9},
            {"gb_per_s", figures.work.bytes / figures.ms * 1e-6}};
    if (figures.dense_ms > 0) step["dense_ms"] = figures.dense_ms;
    limit += limit_ms(figures.work);
  }
  entry["limit_ms"] = limit;
  return entry;
}

std::string ratio(double part, double whole) {
  return fixed(100 * part / whole, 1) + " %";
}

void print_table(const GpuMeasurement& measurement, std::ostream& out) {
  const Case& layer = measurement.layer();
  const std::vector<GpuRound>& rounds = measurement.rounds();
  out << layer.name << ": T=" << layer.T << " d=" << layer.d << " n=" << layer.n << " E=" << layer.E
      << " K=" << layer.K << ", " << tilemoe_dtype_name(to_c(layer.dtype)) << ", routing "
      << load_name(layer.load) << ", rounding " << rounding_name(layer) << ", "
      << measurement.rows() << " rows, " << gpu_name() << ", median of " << rounds.size()
      << " rounds\n";
  Table table({{"", Table::Align::kLeft},
               {"ms"},
               {"limit"},
               {"of limit"},
               {"TFLOP/s"},
               {"GB/s"},
               {measurement.has_dense() ? "dense ms" : ""},
               {measurement.has_dense() ? "of dense" : ""}});
  double limit = 0;
  for (const StepFigures& figures : figures_of(measurement)) {
    const double least = limit_ms(figures.work);
    const bool dense = figures.dense_ms > 0;
    limit += least;
    table.add({figures.step, fixed(figures.ms, 4), fixed(least, 4), ratio(least, figures.ms),
               fixed(figures.work.flop / figures.ms * 1e-9, 1),
               fixed(figures.work.bytes / figures.ms * 1e-6, 0),
               dense ? fixed(figures.dense_ms, 4) : "",
               dense ? ratio(figures.dense_ms, figures.ms) : ""});
  }
  const double forward = median_of(rounds, [](const GpuRound& r) { return r.forward; });
  table.add({"forward, in one", fixed(forward, 4), fixed(limit, 4), ratio(limit, forward), "", "",
             "", ""});
  table.print(out);
  const double host_us = 1000 * median_of(rounds, [](const GpuRound& r) { return r.host; });
  out << "host " << fixed(host_us, 1) << " us, saved for backward "
      << bytes(static_cast<double>(measurement.device_layer().saved_bytes())) << ", workspace "
      << bytes(static_cast<double>(measurement.device_layer().workspace_bytes()));
  if (measurement.first_call().context > 0)
    out << ", first call of the process " << fixed(measurement.first_call().forward, 1)
        << " ms after the context's " << fixed(measurement.first_call().context, 1);
  out << "; backward is not timed yet\n\n";
}

void serve_rounds(GpuMeasurement& measurement) {
  const auto answer = [](const json& line) { std::cout << line.dump() << std::endl; };
  answer({{"ready", kGpuLayerBackend}, {"shape", shape_of(measurement.layer())}});
  for (std::string line; std::getline(std::cin, line);)
    answer({{kGpuLayerBackend, {{"fwd_ms", measurement.run_round().forward}}}});
  answer(json::array({layer_entry(measurement)}));
}

}  // namespace

json bench_on_gpu(const GpuBench& bench) {
  json entries = json::array();
  for (const Case& layer : bench.cases) {
    GpuMeasurement measurement(layer, bench.with_dense);
    if (bench.rounds_from_stdin) {
      serve_rounds(measurement);
      continue;
    }
    for (int round = 0; round < bench.rounds; ++round) measurement.run_round();
    if (bench.print_tables) print_table(measurement, std::cout);
    entries.push_back(layer_entry(measurement));
  }
  return entries;
}

}  // namespace tilemoe::app
