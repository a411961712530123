// `tilemoe bench`: times the layer on the registry's bench cases, in turn with a baseline.
#include <fstream>
#include <iostream>
#include <stdexcept>

#include "bench_measure.h"
#include "bench_progress.h"
#include "bench_report.h"
#include "commands.h"
#include "cuda/bench_gpu.h"
#include "device.h"
#include "exit_status.h"
#include "table.h"
#include "verify/registry.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;

struct BenchOptions {
  DeviceOptions where;
  std::vector<std::string> configs;
  std::string dtype = "case";
  std::string routing = "case";
  std::string rounding = "case";
  std::string pass = "both";
  std::string baseline = "dense";
  std::string json_file;
  int rounds = 15;
  bool biases = false;
  bool dH_over_H = false;
  int32_t column_blocks = 0;
  bool rounds_from_stdin = false;
  bool list = false;
};

// float32 is what a CPU computes in; the table's 16-bit cases are made for GPUs.
bool runs_by_default(const verify::Case& layer, Device device) {
  return !layer.by_name && (layer.dtype == DType::kFloat32) == (device == Device::kCpu);
}

const verify::Case& find_bench_case(const std::string& name) {
  std::string known;
  for (const verify::Case& layer : verify::bench_cases()) {
    if (layer.name == name) return layer;
    known += (known.empty() ? "" : ", ") + layer.name;
  }
  throw WrongUsage("no bench case is called " + name + "; there are " + known);
}

constexpr std::pair<const char*, Rounding> kRoundings[] = {{"nearest", Rounding::kNearest},
                                                           {"up", Rounding::kUp},
                                                           {"down", Rounding::kDown},
                                                           {"balanced", Rounding::kBalanced}};

void change_routing(verify::Case& layer, const BenchOptions& options) {
  if (options.routing == "random") layer.load = verify::Load::kRandom;
  if (options.routing == "zipf") layer.load = verify::Load::kZipf;
  if (options.routing == "one-expert") {  // K = 1, so that it is all that the expert gets
    layer.load = verify::Load::kOneExpert;
    layer.K = 1;
  }
  if (options.rounding == "none") layer.routing = verify::RoutingKind::kTopK;
  for (const auto& [name, rule] : kRoundings) {
    if (options.rounding != name) continue;
    layer.routing = verify::RoutingKind::kRounded;
    layer.rounding = rule, layer.m = 128;
  }
}

std::vector<verify::Case> chosen_cases(const BenchOptions& options, Device device) {
  std::vector<verify::Case> cases;
  for (const std::string& name : options.configs) cases.push_back(find_bench_case(name));
  if (cases.empty())
    for (const verify::Case& layer : verify::bench_cases())
      if (runs_by_default(layer, device)) cases.push_back(layer);
  for (verify::Case& layer : cases)
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      if (options.dtype == tilemoe_dtype_name(to_c(dtype))) layer.dtype = dtype;
  for (verify::Case& layer : cases) {
    change_routing(layer, options);
    layer.biases |= options.biases, layer.dH_over_H |= options.dH_over_H;
    if (options.column_blocks > 0) layer.column_blocks = options.column_blocks;
  }
  return cases;
}

void list_cases(std::ostream& out) {
  Table table({{"config", Table::Align::kLeft}, {"T"}, {"d"}, {"n"}, {"E"}, {"K"}, {"dtype"}});
  for (const verify::Case& layer : verify::bench_cases())
    table.add({layer.name, std::to_string(layer.T), std::to_string(layer.d),
               std::to_string(layer.n), std::to_string(layer.E), std::to_string(layer.K),
               tilemoe_dtype_name(to_c(layer.dtype))});
  table.print(out);
}

// Before minutes of measuring, not after them. Leaves what is in the file.
void check_writable(const std::string& file) {
  if (!file.empty() && file != "-" && !std::ofstream(file, std::ios::app))
    throw std::runtime_error("cannot write " + file);
}

void write_json(const json& entries, const std::string& file) {
  if (file == "-") {
    std::cout << entries.dump(2) << "\n";
    return;
  }
  std::ofstream out(file);
  out << entries.dump(2) << "\n";
  out.close();
  if (!out) throw std::runtime_error("cannot write " + file);
}

// A round for every line of standard input, answered by a line of JSON, so that a caller can let
// the layer take turns with a peer in another process; the entries follow when the input ends.
void serve_rounds(Measurement& measurement) {
  const auto answer = [](const json& line) { std::cout << line.dump() << std::endl; };
  answer({{"ready", kLayerBackend}, {"shape", shape_of(measurement.layer())}});
  for (std::string line; std::getline(std::cin, line);)
    answer(times_of(measurement, measurement.run_round()));
  answer(entries_of(measurement));
}

int bench(const BenchOptions& options) {
  if (options.list) {
    list_cases(std::cout);
    return 0;
  }
  const Device device = options.where.select();
  const std::vector<verify::Case> cases = chosen_cases(options, device);
  if (options.rounds_from_stdin && cases.size() != 1)
    throw WrongUsage("--rounds-from-stdin takes one --config");
  if (device == Device::kCpu && options.pass != "both")
    throw WrongUsage("--pass " + options.pass + ": on a CPU both passes are timed");
  check_writable(options.json_file);
  const bool with_dense = options.baseline == "dense";
  json entries = json::array();
  if (device == Device::kCuda) {
    entries = bench_on_gpu(
        {.cases = cases,
         .passes = {.forward = options.pass != "backward", .backward = options.pass != "forward"},
         .rounds = options.rounds,
         .with_dense = with_dense,
         .print_tables = options.json_file != "-",
         .rounds_from_stdin = options.rounds_from_stdin});
    if (!options.json_file.empty()) write_json(entries, options.json_file);
    return 0;
  }
  for (const verify::Case& layer : cases) {
    if (options.rounds_from_stdin) {
      Measurement measurement(layer, with_dense);
      serve_rounds(measurement);
      return 0;
    }
    BenchProgress progress(layer.name, options.rounds);
    Measurement measurement(layer, with_dense);
    for (int round = 0; round < options.rounds; ++round) {
      progress.next_round();
      measurement.run_round();
    }
    progress.finish();
    if (options.json_file != "-") print_table(measurement, std::cout);
    for (json& entry : entries_of(measurement)) entries.push_back(std::move(entry));
  }
  if (!options.json_file.empty()) write_json(entries, options.json_file);
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Time the layer, forward and backward, step by step and against a baseline");
  command->add_option("--config", options->configs,
                      "Cases to time, by name; without it the ones made for the device");
  command->add_option("--dtype", options->dtype, "Type of the tensors; 'case' for each case's own")
      ->check(CLI::IsMember({"case", "float32", "bfloat16", "float16"}))
      ->capture_default_str();
  command
      ->add_option("--routing", options->routing,
                   "How tokens spread over experts; 'case' for each case's own")
      ->check(CLI::IsMember({"case", "random", "zipf", "one-expert"}))
      ->capture_default_str();
  command->add_option("--rounding", options->rounding, "Token rounding to multiples of 128")
      ->check(CLI::IsMember({"case", "none", "nearest", "up", "down", "balanced"}))
      ->capture_default_str();
  command
      ->add_option("--pass", options->pass,
                   "On a GPU, what to time: forward, backward (an untimed forward goes before "
                   "each), or both")
      ->check(CLI::IsMember({"forward", "backward", "both"}))
      ->capture_default_str();
  command->add_flag("--biases", options->biases, "With biases b1 and b2");
  command->add_flag("--dh-over-h,--overwrite-H", options->dH_over_H,
                    "Write dH over H in the backward");
  command
      ->add_option("--column-blocks", options->column_blocks,
                   "Blocks of columns in which Y and dX~ exist: less workspace, more time")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command
      ->add_option(
          "--baseline", options->baseline,
          "What to measure in turn: dense products of the layer's sizes by oneDNN (CPU) or "
          "cuBLASLt (GPU), or none")
      ->check(CLI::IsMember({"dense", "none"}))
      ->capture_default_str();
  command->add_option("--rounds", options->rounds, "Rounds; medians are reported")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--json", options->json_file,
                      "Write the numbers to this file; '-' prints them instead of the table");
  command->add_flag("--list", options->list, "List the cases and do nothing else");
  command->add_flag("--rounds-from-stdin", options->rounds_from_stdin,
                    "Run one round for every line of standard input, for scripts that let several "
                    "programs take turns");
  options->where.add_to(*command);
  command->callback([&run, options] { run = [options] { return bench(*options); }; });
}

}  // namespace tilemoe::app
