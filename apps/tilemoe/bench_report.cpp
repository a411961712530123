#include "bench_report.h"

#include <ostream>

#include "build_info.h"
#include "cpu/thread_pool.h"
#include "table.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;

struct StepFigures {
  std::string step;
  double ms;
  Work work;
};

std::vector<StepFigures> figures_of(const Measurement& measurement) {
  std::vector<StepFigures> figures;
  const std::vector<Round>& rounds = measurement.rounds();
  if (rounds.empty()) return figures;
  for (size_t i = 0; i < rounds.front().steps.size(); ++i) {
    const std::string& name = rounds.front().steps[i].step;
    figures.push_back({name, median_of(rounds, [&](const Round& r) { return r.steps[i].ms; }),
                       work_of(name, measurement.layer(), measurement.rows())});
  }
  return figures;
}

double tflops(const Work& work, double ms) {
  return work.flop / ms * 1e-9;
}
double gb_per_second(const Work& work, double ms) {
  return work.bytes / ms * 1e-6;
}

// The part of the layer's time that a step takes, median over the rounds.
double share_of(const Measurement& measurement, const char* step) {
  return median_of(measurement.rounds(), [&](const Round& round) {
    double part = 0, whole = 0;
    for (const StepClock::Entry& entry : round.steps) {
      whole += entry.ms;
      if (entry.step == step) part += entry.ms;
    }
    return part / whole;
  });
}

double dense_ratio(const Measurement& measurement) {
  return median_of(measurement.rounds(),
                   [](const Round& r) { return r.dense.whole() / r.layer.whole(); });
}

// What every entry has.
json common_entry(const Measurement& measurement, const char* backend) {
  const verify::Case& layer = measurement.layer();
  return {{"config", layer.name},
          {"device", cpu_model()},
          {"backend", backend},
          {"dtype", tilemoe_dtype_name(to_c(layer.dtype))},
          {"threads", cpu::num_threads()},
          {"shape", shape_of(layer)},
          {"rounds", measurement.rounds().size()},
          {"commit", build_info().commit},
          {"versions", versions()}};
}

json layer_entry(const Measurement& measurement) {
  const auto& rounds = measurement.rounds();
  json entry = common_entry(measurement, kLayerBackend);
  entry["rows"] = measurement.rows();
  entry["fwd_ms"] = median_of(rounds, [](const Round& r) { return r.layer.forward; });
  entry["bwd_ms"] = median_of(rounds, [](const Round& r) { return r.layer.backward; });
  const LayerBytes& bytes = measurement.bytes();
  entry["saved_bytes"] = bytes.saved;
  entry["peak_bytes"] = bytes.peak;
  entry["workspace_bytes"] = {{"forward", bytes.forward_workspace},
                              {"backward", bytes.backward_workspace}};
  Work whole;
  entry["steps"] = json::object();
  for (const StepFigures& figures : figures_of(measurement)) {
    entry["steps"][figures.step] = {{"ms", figures.ms},
                                    {"tflops", tflops(figures.work, figures.ms)},
                                    {"gb_per_s", gb_per_second(figures.work, figures.ms)}};
    whole += figures.work;
  }
  const double ms = median_of(rounds, [](const Round& r) { return r.layer.whole(); });
  entry["tflops"] = tflops(whole, ms);
  entry["gb_per_s"] = gb_per_second(whole, ms);
  entry["routing_share"] = share_of(measurement, step::kRoute);
  entry["top_k_share"] = share_of(measurement, step::kTopK);
  if (measurement.dense()) entry["speed_against"] = {{kDenseBackend, dense_ratio(measurement)}};
  return entry;
}

json dense_entry(const Measurement& measurement) {
  const auto& rounds = measurement.rounds();
  json entry = common_entry(measurement, kDenseBackend);
  entry["fwd_ms"] = median_of(rounds, [](const Round& r) { return r.dense.forward; });
  entry["bwd_ms"] = median_of(rounds, [](const Round& r) { return r.dense.backward; });
  entry["saved_bytes"] = nullptr;  // matrix products alone: not a layer
  entry["peak_bytes"] = nullptr;
  entry["steps"] = json::object();
  for (const DenseBaseline::Chosen& chosen : measurement.dense()->chosen())
    entry["steps"][chosen.step] = {{"way", chosen.way}, {"tflops", chosen.gflop_per_second * 1e-3}};
  return entry;
}

// Of the step's product alone, in the baseline's trial; empty for a step that is no product.
std::string dense_rate(const Measurement& measurement, const std::string& step) {
  if (!measurement.dense()) return "";
  for (const DenseBaseline::Chosen& chosen : measurement.dense()->chosen())
    if (chosen.step == step) return fixed(chosen.gflop_per_second * 1e-3, 3);
  return "";
}

std::string percent(double part) {
  return fixed(100 * part, 1) + " %";
}

}  // namespace

json shape_of(const verify::Case& layer) {
  return {{"T", layer.T}, {"d", layer.d}, {"n", layer.n}, {"E", layer.E}, {"K", layer.K}};
}

json entries_of(const Measurement& measurement) {
  json entries = json::array({layer_entry(measurement)});
  if (measurement.dense()) entries.push_back(dense_entry(measurement));
  return entries;
}

json times_of(const Measurement& measurement, const Round& round) {
  const auto times = [](const PassTimes& pass) {
    return json{{"fwd_ms", pass.forward}, {"bwd_ms", pass.backward}};
  };
  json all = {{kLayerBackend, times(round.layer)}};
  if (measurement.dense()) all[kDenseBackend] = times(round.dense);
  return all;
}

void print_table(const Measurement& measurement, std::ostream& out) {
  const verify::Case& layer = measurement.layer();
  const auto& rounds = measurement.rounds();
  out << layer.name << ": T=" << layer.T << " d=" << layer.d << " n=" << layer.n << " E=" << layer.E
      << " K=" << layer.K << ", " << tilemoe_dtype_name(to_c(layer.dtype)) << ", "
      << measurement.rows() << " rows, " << cpu::num_threads() << " threads, median of "
      << rounds.size() << " rounds\n";

  Table table({{"", Table::Align::kLeft},
               {"ms"},
               {"share"},
               {"TFLOP/s"},
               {"GB/s"},
               {measurement.dense() ? "oneDNN's TFLOP/s" : ""}});
  Work whole;
  const std::vector<StepFigures> steps = figures_of(measurement);
  double sum = 0;
  for (const StepFigures& figures : steps) sum += figures.ms, whole += figures.work;
  for (const StepFigures& figures : steps)
    table.add({figures.step, fixed(figures.ms, 2), percent(figures.ms / sum),
               fixed(tflops(figures.work, figures.ms), 3),
               fixed(gb_per_second(figures.work, figures.ms), 1),
               dense_rate(measurement, figures.step)});
  const double forward = median_of(rounds, [](const Round& r) { return r.layer.forward; });
  const double backward = median_of(rounds, [](const Round& r) { return r.layer.backward; });
  const double both = median_of(rounds, [](const Round& r) { return r.layer.whole(); });
  table.add({"forward", fixed(forward, 2), "", "", "", ""});
  table.add({"backward", fixed(backward, 2), "", "", "", ""});
  table.add({"forward + backward", fixed(both, 2), "", fixed(tflops(whole, both), 3),
             fixed(gb_per_second(whole, both), 1), ""});
  if (measurement.dense()) {
    const double dense = median_of(rounds, [](const Round& r) { return r.dense.whole(); });
    table.add({kDenseBackend, fixed(dense, 2), "", "", "", ""});
  }
  table.print(out);
  out << "saved for backward " << app::bytes(static_cast<double>(measurement.bytes().saved))
      << ", peak " << app::bytes(static_cast<double>(measurement.bytes().peak));
  if (measurement.dense())
    out << ", speed against " << kDenseBackend << " " << fixed(dense_ratio(measurement), 3);
  out << "\n\n";
}

}  // namespace tilemoe::app
