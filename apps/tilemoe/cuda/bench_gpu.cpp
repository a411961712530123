#include "cuda/bench_gpu.h"

#include <algorithm>
#include <iostream>
#include <string>

#include "bench_progress.h"
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
  double dense_ms;  // 0 where it is no product of the experts
};

// One pass of all rounds.
struct PassReport {
  const char* name;  // "forward"
  double ms, host_ms;
  std::vector<StepFigures> steps;
};

// What an H100 can do at most: the rate of a large dense product that was measured, and of a copy.
double limit_ms(const Work& work) {
  constexpr double kFlopPerMs = 798e9, kBytesPerMs = 3.0e9;
  return std::max(work.flop / kFlopPerMs, work.bytes / kBytesPerMs);
}

double limit_ms(const PassReport& pass) {
  double sum = 0;
  for (const StepFigures& figures : pass.steps) sum += limit_ms(figures.work);
  return sum;
}

// Weights are counted where they are read: one expert's where it has all rows.
Work work_at_least(const std::string& name, const GpuMeasurement& measurement) {
  Case layer = measurement.layer();
  const bool reads_weights = name == step::kUpProjection || name == step::kDownProjection ||
                             name == step::kActivationGradient || name == step::kInputGradient;
  if (layer.load == Load::kOneExpert && reads_weights) layer.E = 1;
  return work_of(name, layer, measurement.rows());
}

double dense_ms(const std::string& name, const GpuMeasurement& measurement) {
  const std::vector<DenseProduct>& products = measurement.products();
  for (size_t i = 0; i < products.size(); ++i)
    if (products[i].step == name)
      return median_of(measurement.step_rounds(), [&](const StepRound& r) { return r.dense[i]; });
  return 0;
}

PassReport report_of(const GpuMeasurement& measurement, const char* name, double GpuRound::*whole,
                     StepRound::Pass StepRound::*pass) {
  const std::vector<StepRound>& rounds = measurement.step_rounds();
  PassReport report{
      .name = name,
      .ms = median_of(measurement.rounds(), [&](const GpuRound& r) { return r.*whole; }),
      .host_ms = median_of(rounds, [&](const StepRound& r) { return (r.*pass).host; }),
      .steps = {}};
  const size_t steps = rounds.empty() ? 0 : (rounds.front().*pass).steps.size();
  for (size_t i = 0; i < steps; ++i) {
    const std::string& step = (rounds.front().*pass).steps[i].step;
    report.steps.push_back(
        {step, median_of(rounds, [&](const StepRound& r) { return (r.*pass).steps[i].ms; }),
         work_at_least(step, measurement), dense_ms(step, measurement)});
  }
  return report;
}

std::vector<PassReport> reports_of(const GpuMeasurement& measurement) {
  std::vector<PassReport> reports;
  if (measurement.passes().forward)
    reports.push_back(report_of(measurement, "forward", &GpuRound::forward, &StepRound::forward));
  if (measurement.passes().backward)
    reports.push_back(
        report_of(measurement, "backward", &GpuRound::backward, &StepRound::backward));
  return reports;
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
  const LayerBytes& sizes = measurement.bytes();
  json entry = {{"config", layer.name},
                {"device", gpu_name()},
                {"backend", kGpuLayerBackend},
                {"dtype", tilemoe_dtype_name(to_c(layer.dtype))},
                {"shape", shape_of(layer)},
                {"routing", load_name(layer.load)},
                {"rounding", rounding_name(layer)},
                {"biases", layer.biases},
                {"dh_over_h", layer.dH_over_H},
                {"column_blocks", std::max(layer.column_blocks, 1)},
                {"rows", measurement.rows()},
                {"rounds", measurement.rounds().size()},
                {"saved_bytes", sizes.saved},
                {"workspace_bytes",
                 {{"forward", sizes.forward_workspace}, {"backward", sizes.backward_workspace}}},
                {"library_peak_bytes", sizes.library_peak},
                {"peak_bytes", sizes.peak},
                {"fwd_ms", nullptr},
                {"bwd_ms", nullptr},
                {"host_ms", json::object()},
                {"limit_ms", json::object()},
                {"steps", json::object()},
                {"commit", build_info().commit},
                {"versions", gpu_versions()}};
  if (measurement.first_call().context > 0)
    entry["first_call_ms"] = {{"context", measurement.first_call().context},
                              {"forward", measurement.first_call().forward}};
  for (const PassReport& pass : reports_of(measurement)) {
    entry[std::string(pass.name) == "forward" ? "fwd_ms" : "bwd_ms"] = pass.ms;
    entry["host_ms"][pass.name] = pass.host_ms;
    entry["limit_ms"][pass.name] = limit_ms(pass);
    for (const StepFigures& figures : pass.steps) {
      json& step = entry["steps"][figures.step];
      step = {{"ms", figures.ms},
              {"limit_ms", limit_ms(figures.work)},
              {"tflops", figures.work.flop / figures.ms * 1e-9},
              {"gb_per_s", figures.work.bytes / figures.ms * 1e-6}};
      if (figures.dense_ms > 0) step["dense_ms"] = figures.dense_ms;
    }
  }
  return entry;
}

std::string ratio(double part, double whole) {
  return fixed(100 * part / whole, 1) + " %";
}

void add_rows(const PassReport& pass, Table& table) {
  for (const StepFigures& figures : pass.steps) {
    const double least = limit_ms(figures.work);
    const bool dense = figures.dense_ms > 0;
    table.add({figures.step, fixed(figures.ms, 4), fixed(least, 4), ratio(least, figures.ms),
               fixed(figures.work.flop / figures.ms * 1e-9, 1),
               fixed(figures.work.bytes / figures.ms * 1e-6, 0),
               dense ? fixed(figures.dense_ms, 4) : "",
               dense ? ratio(figures.dense_ms, figures.ms) : ""});
  }
  table.add({std::string(pass.name) + ", in one", fixed(pass.ms, 4), fixed(limit_ms(pass), 4),
             ratio(limit_ms(pass), pass.ms), "", "", "", ""});
}

void print_table(const GpuMeasurement& measurement, std::ostream& out) {
  const Case& layer = measurement.layer();
  out << layer.name << ": T=" << layer.T << " d=" << layer.d << " n=" << layer.n << " E=" << layer.E
      << " K=" << layer.K << ", " << tilemoe_dtype_name(to_c(layer.dtype)) << ", routing "
      << load_name(layer.load) << ", rounding " << rounding_name(layer) << ", "
      << (layer.biases ? "biases, " : "") << (layer.dH_over_H ? "dH over H, " : "")
      << (layer.column_blocks > 1 ? std::to_string(layer.column_blocks) + " column blocks, " : "")
      << measurement.rows() << " rows, " << gpu_name() << ", median of "
      << measurement.rounds().size() << " rounds\n";
  const bool dense = !measurement.products().empty();
  Table table({{"", Table::Align::kLeft},
               {"ms"},
               {"limit"},
               {"of limit"},
               {"TFLOP/s"},
               {"GB/s"},
               {dense ? "dense ms" : ""},
               {dense ? "of dense" : ""}});
  const std::vector<PassReport> passes = reports_of(measurement);
  for (const PassReport& pass : passes) add_rows(pass, table);
  table.print(out);
  const auto text = [](size_t count) { return bytes(static_cast<double>(count)); };
  const LayerBytes& sizes = measurement.bytes();
  for (const PassReport& pass : passes)
    out << "host time of a " << pass.name << " " << fixed(1000 * pass.host_ms, 1) << " us, ";
  out << "saved for backward " << text(sizes.saved) << ", workspace "
      << text(sizes.forward_workspace) << " and " << text(sizes.backward_workspace)
      << ", the library's peak " << text(sizes.library_peak) << ", of all " << text(sizes.peak);
  if (measurement.first_call().context > 0)
    out << ", first call of the process " << fixed(measurement.first_call().forward, 1)
        << " ms after the context's " << fixed(measurement.first_call().context, 1);
  out << "\n\n";
}

json times_of(const GpuMeasurement& measurement, const GpuRound& round) {
  json times = json::object();
  if (measurement.passes().forward) times["fwd_ms"] = round.forward;
  if (measurement.passes().backward) times["bwd_ms"] = round.backward;
  return {{kGpuLayerBackend, times}};
}

void serve_rounds(GpuMeasurement& measurement) {
  const auto answer = [](const json& line) { std::cout << line.dump() << std::endl; };
  answer({{"ready", kGpuLayerBackend}, {"shape", shape_of(measurement.layer())}});
  for (std::string line; std::getline(std::cin, line);)
    answer(times_of(measurement, measurement.run_round()));
  measurement.run_step_round();
  answer(json::array({layer_entry(measurement)}));
}

// All of the layer, then all of its steps.
void run_rounds(GpuMeasurement& measurement, int rounds, BenchProgress& progress) {
  for (int round = 0; round < 2 * rounds; ++round) {
    progress.next_round();
    if (round < rounds)
      measurement.run_round();
    else
      measurement.run_step_round();
  }
  progress.finish();
}

}  // namespace

json bench_on_gpu(const GpuBench& bench) {
  json entries = json::array();
  for (const Case& layer : bench.cases) {
    if (bench.rounds_from_stdin) {
      GpuMeasurement measurement(layer, bench.passes, bench.with_dense);
      serve_rounds(measurement);
      continue;
    }
    BenchProgress progress(layer.name, 2 * bench.rounds);
    GpuMeasurement measurement(layer, bench.passes, bench.with_dense);
    run_rounds(measurement, bench.rounds, progress);
    if (bench.print_tables) print_table(measurement, std::cout);
    entries.push_back(layer_entry(measurement));
  }
  return entries;
}

}  // namespace tilemoe::app
