// tilemoe_kernels: times of the library's kernels, step by step; of every tile configuration; of
// bare GEMMs; of the kernels of routing.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "device.h"
#include "exit_status.h"
#include "modes.h"
#include "strict_numbers.h"
#include "table.h"
#include "verify/registry.h"

namespace tilemoe::app {

std::string shape_text(const verify::Case& layer) {
  const auto part = [](const char* name, int64_t size) {
    return std::string(name) + "=" + std::to_string(size);
  };
  return part("T", layer.T) + ", " + part("d", layer.d) + ", " + part("n", layer.n) + ", " +
         part("E", layer.E) + ", " + part("K", layer.K) + ", " +
         tilemoe_dtype_name(to_c(layer.dtype));
}

Values shape_values(const verify::Case& layer) {
  return {{"T", layer.T}, {"d", layer.d}, {"n", layer.n}, {"E", layer.E}, {"K", layer.K}};
}

namespace {

using verify::Case;
using verify::Load;

struct Options {
  DeviceOptions where;
  std::vector<std::string> layers;
  std::vector<int64_t> tokens;
  int rounds = 15;
  bool configurations = false, gemm = false, routing = false, codes = false, list = false;
  std::string pass = "both", dtype = "case", load = "case", rounding = "case", weights = "plain";
  std::string recipe = "bf16";
  bool biases = false, clamped = false, dH_over_H = false;
  int32_t column_blocks = 0, weight_blocks = 0, lora_rank = 0;
  std::vector<std::string> quantized;
  std::vector<double> limits;
  std::string json_file;
};

constexpr std::pair<const char*, Rounding> kRoundings[] = {{"nearest", Rounding::kNearest},
                                                           {"up", Rounding::kUp},
                                                           {"down", Rounding::kDown},
                                                           {"balanced", Rounding::kBalanced}};
constexpr Format kFormats[] = {Format::kNone, Format::kFp8,       Format::kMxfp4,
                               Format::kNf4,  Format::kNf4Double, Format::kNvfp4};
const char* name_of(Format format) {
  return tilemoe_format_name(static_cast<tilemoe_format>(format));
}
std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const Format format : kFormats) names.emplace_back(name_of(format));
  return names;
}
constexpr std::pair<const char*, Load> kLoads[] = {
    {"random", Load::kRandom}, {"zipf", Load::kZipf}, {"one-expert", Load::kOneExpert}};

const Case& find_layer(const std::string& name) {
  std::string known;
  for (const Case& layer : verify::bench_cases()) {
    if (layer.name == name) return layer;
    known += (known.empty() ? "" : ", ") + layer.name;
  }
  throw WrongUsage("unknown layer " + name + ", expected one of " + known);
}

// Without the gradients of weights and biases.
void freeze(Case& layer) {
  layer.wanted.dW1 = layer.wanted.dW2 = layer.wanted.db1 = layer.wanted.db2 = false;
}

void change(Case& layer, const Options& options) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    if (options.dtype == tilemoe_dtype_name(to_c(dtype))) layer.dtype = dtype;
  for (const auto& [name, load] : kLoads)
    if (options.load == name) layer.load = load;
  if (options.load == "one-expert") layer.K = 1;  // so that the expert has all rows
  if (options.rounding == "none") layer.routing = verify::RoutingKind::kTopK;
  for (const auto& [name, rule] : kRoundings) {
    if (options.rounding != name) continue;
    layer.routing = verify::RoutingKind::kRounded, layer.rounding = rule, layer.m = 128;
  }
  layer.W1_transposed = layer.W2_transposed = options.weights != "plain";
  if (options.weights == "gpt-oss") layer.gate_layout = GateLayout::kInterleaved;
  if (options.clamped) layer.clamp = 7, layer.alpha = 1.702f, layer.up_shift = 1;
  layer.biases |= options.biases, layer.dH_over_H |= options.dH_over_H;
  if (options.column_blocks > 0) layer.column_blocks = options.column_blocks;
  layer.weight_blocks = options.weight_blocks;
  if (options.lora_rank > 0) {
    layer.lora = {.gate = options.lora_rank, .down = options.lora_rank, .float32_factors = true};
    freeze(layer);
  }
}

// The layer with weights in each of the formats, under their names; frozen, unless a recipe of fp8 has
// their gradients.
std::vector<Case> in_formats(const Case& layer, const Options& options) {
  if (options.quantized.empty()) return {layer};
  std::vector<Case> layers;
  for (const Format format : kFormats) {
    const auto& names = options.quantized;
    if (std::find(names.begin(), names.end(), name_of(format)) == names.end()) continue;
    Case& one = layers.emplace_back(layer);
    one.format_1 = one.format_2 = format;
    const bool trains = format == Format::kNone || format == Format::kFp8;
    if (options.recipe == "bf16" || !trains || options.lora_rank > 0) freeze(one);
    if (format != Format::kNone) one.name += std::string("-") + name_of(format);
    if (options.recipe == "bf16" || format != Format::kFp8) continue;
    one.recipe = options.recipe == "fp8" ? Recipe::kFp8 : Recipe::kFp8Forward;
    one.name += options.recipe == "fp8" ? "-recipe" : "-forward";
    if (one.n % 128 == 0) continue;
    one.gate_layout = GateLayout::kSplit;  // gate and up share no scales
    one.lora.up = one.lora.gate;
  }
  return layers;
}

// Those that are named, or made for the device: float32 is a CPU's.
std::vector<Case> chosen_layers(const Options& options, Device device) {
  std::vector<Case> chosen;
  for (const std::string& name : options.layers) chosen.push_back(find_layer(name));
  if (chosen.empty())
    for (const Case& layer : verify::bench_cases())
      if ((layer.dtype == DType::kFloat32) == (device == Device::kCpu)) chosen.push_back(layer);
  std::vector<Case> layers;
  for (Case layer : chosen) {
    change(layer, options);
    std::vector<Case> sized;
    if (options.tokens.empty()) sized.push_back(layer);
    for (const int64_t T : options.tokens) {
      sized.push_back(layer);
      sized.back().T = T, sized.back().name += "-t" + std::to_string(T);
    }
    for (const Case& one : sized)
      for (Case& in_format : in_formats(one, options)) layers.push_back(std::move(in_format));
  }
  return layers;
}

void list_layers() {
  for (const Case& layer : verify::bench_cases())
    std::cout << layer.name << ": " << shape_text(layer) << "\n";
}

// The given limits; else, for the modes that compare with them on a GPU, its measured ones.
Limits limits_of(const Options& options, Device device) {
  if (!options.limits.empty())
    return {.flop_per_s = options.limits[0] * 1e12, .bytes_per_s = options.limits[1] * 1e9};
  if (device == Device::kCpu || options.configurations || options.codes || options.gemm) return {};
  try {
    const Limits limits = measured_limits();
    std::cout << "limits: a GEMM by cuBLASLt " << fixed(limits.flop_per_s * 1e-12, 0)
              << " TFLOP/s, a copy " << fixed(limits.bytes_per_s * 1e-9, 0) << " GB/s" << std::endl;
    return limits;
  } catch (const std::runtime_error& error) {
    std::cout << "the limits are unknown (--limits sets them): " << error.what() << std::endl;
    return {};
  }
}

int run(const Options& options) {
  if (options.list) {
    list_layers();
    return kDone;
  }
  for (const std::string& name : options.layers) static_cast<void>(find_layer(name));
  const Device device = options.where.select();
  const char* const mode = options.configurations ? "--configurations"
                           : options.codes        ? "--codes"
                                                  : "--gemm";
  if (device == Device::kCpu && (options.configurations || options.gemm || options.codes))
    throw std::runtime_error(std::string(mode) + " requires a GPU: " + why_no_layer(Device::kCuda));
  const Request request{.device = device,
                        .layers = chosen_layers(options, device),
                        .rounds = options.rounds,
                        .forward = options.pass != "backward",
                        .backward = options.pass != "forward"};
  Report report(device, limits_of(options, device), options.json_file);
  std::cout << backend_for(to_c(device)).description() << std::endl;
  int status = kDone;
  if (options.configurations)
    status = compare_configurations(request, report) ? kDone : kFailed;
  else if (options.gemm)
    time_gemms(request, report);
  else if (options.codes)
    time_codes(request, report);
  else if (options.routing)
    time_routing(request, report);
  else
    time_steps(request, report);
  report.write();
  return status;
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("layers", options.layers, "Layers by name (default: those for the device)");
  CLI::Option* configurations = app.add_flag(
      "--configurations", options.configurations,
      "Time every tile configuration of the GEMMs and the cost model's choice; exit status 1 if a "
      "choice is more than 3 % slower than the fastest");
  CLI::Option* gemm = app.add_flag("--gemm", options.gemm,
                                   "Time bare GEMMs of mma.sync and wgmma, and the layers' GEMMs "
                                   "as dense GEMMs of cuBLASLt");
  CLI::Option* routing =
      app.add_flag("--routing", options.routing, "Time top-K, routing and token rounding")
          ->excludes(configurations)
          ->excludes(gemm);
  gemm->excludes(configurations);
  app.add_flag("--codes", options.codes,
               "Time forward of quantised layers with GEMMs that read codes, with GEMMs that read "
               "dequantised values, and with 16-bit weights, interleaved")
      ->excludes(configurations)
      ->excludes(gemm)
      ->excludes(routing);
  app.add_flag("--list", options.list, "List the layers and exit");
  options.where.add_to(app);
  app.add_option("--tokens", options.tokens, "Numbers of tokens (default: each layer's own)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  app.add_option("--repeat", options.rounds, "Number of rounds; medians and quartiles are reported")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--json", options.json_file, "Write the measurements to this file, one per line");
  const auto choice = [&](const char* name, std::string& value, const char* text,
                          const std::vector<std::string>& values) {
    app.add_option(name, value, text)->check(CLI::IsMember(values))->capture_default_str();
  };
  choice("--pass", options.pass, "Passes to time", {"forward", "backward", "both"});
  choice("--dtype", options.dtype, "Dtype of the tensors (case = each layer's own)",
         {"case", "float32", "bfloat16", "float16"});
  choice("--load", options.load, "Distribution of tokens over experts (case = each layer's own)",
         {"case", "random", "zipf", "one-expert"});
  choice("--rounding", options.rounding, "Token rounding to multiples of 128",
         {"case", "none", "nearest", "up", "down", "balanced"});
  choice("--weights", options.weights,
         "Layout of W1 and W2: plain, (E, 2n, d) and (E, d, n); transposed, (E, d, 2n) and (E, n, "
         "d); gpt-oss, the same with gate and up interleaved",
         {"plain", "transposed", "gpt-oss"});
  app.add_flag("--biases", options.biases, "Add biases b1 and b2");
  app.add_flag("--clamped", options.clamped, "The SwiGLU of gpt-oss, with a clamp and a shift");
  app.add_flag("--dh-over-h,--overwrite-H", options.dH_over_H,
               "Overwrite saved activations in the backward pass (lower peak memory)");
  app.add_option("--column-blocks", options.column_blocks,
                 "Compute expert outputs in N column blocks: less memory, slightly slower")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--quantized", options.quantized,
                 "Formats of quantised weights (none = 16 bits), frozen without --recipe")
      ->check(CLI::IsMember(format_names()))
      ->excludes(configurations)
      ->excludes(gemm);
  choice("--recipe", options.recipe,
         "GEMMs with --quantized fp8: bf16, from dequantised weights; fp8_forward, forward from "
         "codes; "
         "fp8, backward too. With the last two, none and fp8 have gradients of the weights",
         {"bf16", "fp8", "fp8_forward"});
  app.add_option("--weight-blocks", options.weight_blocks,
                 "Dequantise weights in N blocks of experts: less memory")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--lora-rank", options.lora_rank,
                 "Rank of float32 low-rank adapters of the frozen W1 and W2 (0 = none); the step "
                 "that packs "
                 "them is timed, too")
      ->check(CLI::Range(0, TILEMOE_MAX_RANK))
      ->excludes(configurations)
      ->excludes(gemm)
      ->excludes(routing)
      ->capture_default_str();
  app.add_option("--limits", options.limits,
                 "Peak TFLOP/s and GB/s of the device (default on a GPU: measured first, by a GEMM "
                 "of cuBLASLt and a copy)")
      ->expected(2)
      ->check(CLI::PositiveNumber);
}

int fail(int status, const std::string& reason) {
  std::cerr << "tilemoe_kernels: error: " << reason << "\n";
  return status;
}

int main_of(int argc, char** argv) {
  CLI::App app("Times of TileMoE's kernels, each with cold caches.", "tilemoe_kernels");
  Options options;
  add_options(app, options);
  require_strict_numbers(app);
  try {
    app.parse(argc, argv);
    const int status = run(options);
    return std::cout.flush() ? status : fail(kFailed, "cannot write the output");
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : fail(kWrongUsage, error.what());
  } catch (const WrongUsage& error) {
    return fail(kWrongUsage, error.what());
  } catch (const Error& error) {
    return fail(kFailed, in_words(error.what()));
  } catch (const std::exception& error) {
    return fail(kFailed, error.what());
  }
}

}  // namespace
}  // namespace tilemoe::app

int main(int argc, char** argv) {
  return tilemoe::app::main_of(argc, argv);
}
