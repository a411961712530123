// `tilemoe info`: what this build is, which devices it finds and what each can do. Queries
// the library for the support of each combination, so that the output cannot drift from the code.
#include "info.h"

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "build_info.h"
#include "commands.h"
#include "core/activation_kinds.h"
#include "core/check.h"
#include "device.h"
#include "table.h"
#include "tilemoe/layer.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;

struct Limit {
  const char* what;
  std::string bounds;
};

std::vector<Limit> limit_table() {
  const auto range = [](int64_t min, int64_t max) {
    return "[" + std::to_string(min) + ", " + std::to_string(max) + "]";
  };
  return {
      {"d, n", "multiples of " + std::to_string(limits::kWidthMultiple) + " in " +
                   range(limits::kWidthMultiple, limits::kMaxWidth)},
      {"T, pairs, rows (cpu)", range(0, limits::kMaxRows)},
      {"T, pairs, rows (cuda)", range(0, limits::kMaxRowsCuda)},
      {"E", range(1, limits::kMaxExperts)},
      {"K", "[1, E]"},
      {"m (rounding)", range(1, limits::kMaxMultiple)},
      {"bytes of a tensor", range(0, limits::kMaxTensorBytes)},
      {"pointers, strides", "multiples of " + std::to_string(limits::kAlignment) + " bytes"},
      {"CPU threads", range(1, limits::kMaxThreads)},
  };
}

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

constexpr struct {
  GateLayout layout;
  const char* name;
} kGateLayouts[] = {{GateLayout::kConcatenated, "concatenated"},
                    {GateLayout::kInterleaved, "interleaved"},
                    {GateLayout::kSplit, "split"}};

// A small problem of every kind of routing.
std::vector<std::pair<std::string, RoutingSpec>> routings(Device device) {
  constexpr int64_t T = 16, E = 4, K = 2;
  return {{"top_k", RoutingSpec::top_k(device, T, E, K)},
          {"general", RoutingSpec::general(device, T, E, T * K)},
          {"rounded_nearest", RoutingSpec::rounded(device, T, E, K, Rounding::kNearest, 8)},
          {"rounded_up", RoutingSpec::rounded(device, T, E, K, Rounding::kUp, 8)},
          {"rounded_down", RoutingSpec::rounded(device, T, E, K, Rounding::kDown, 8)},
          {"rounded_stochastic", RoutingSpec::rounded(device, T, E, K, Rounding::kStochastic, 8)},
          {"rounded_balanced", RoutingSpec::rounded(device, T, E, K, Rounding::kBalanced, 8)},
          {"grouped", RoutingSpec::grouped(device, T * K, E)}};
}

bool supported(const Experts& experts, const RoutingSpec& routing) {
  try {
    experts.workspace_bytes(routing, BackwardMode::kWhole);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// {"dtypes": [...], "activations": [...], "gate_layouts": [...], "routings": [...]}: what the
// library accepts, each list with the other three at their defaults.
json support_of(Device device) {
  constexpr int64_t d = 16, n = 8, E = 4;
  const DType usual = device == Device::kCuda ? DType::kBFloat16 : DType::kFloat32;
  const RoutingSpec top_k = routings(device).front().second;
  const auto experts = [&](DType dtype, Activation activation, GateLayout layout) {
    return Experts{.device = device,
                   .dtype = dtype,
                   .d = d,
                   .n = n,
                   .E = E,
                   .activation = activation,
                   .gate_layout = layout};
  };
  json support = {{"dtypes", json::array()},
                  {"activations", json::array()},
                  {"gate_layouts", json::array()},
                  {"routings", json::array()}};
  for (DType dtype : kDTypes)
    if (supported(experts(dtype, Activation::kSwiGLU, GateLayout::kConcatenated), top_k))
      support["dtypes"].push_back(tilemoe_dtype_name(to_c(dtype)));
  for (tilemoe_activation activation : kActivations)
    if (supported(experts(usual, static_cast<Activation>(activation), GateLayout::kConcatenated),
                  top_k))
      support["activations"].push_back(tilemoe_activation_name(activation));
  for (const auto& [layout, name] : kGateLayouts)
    if (supported(experts(usual, Activation::kSwiGLU, layout), top_k))
      support["gate_layouts"].push_back(name);
  for (const auto& [name, routing] : routings(device))
    if (supported(experts(usual, Activation::kSwiGLU, GateLayout::kConcatenated), routing))
      support["routings"].push_back(name);
  return support;
}

// "sm90, the newest for compute capability 9.0"; or why the device has none.
std::string arch_of_device() {
  const std::string text = tilemoe_cuda_arch();
  return *tilemoe_last_error() ? "none, " + in_words(text) : text;
}

json backend_entry(Device device) {
  json entry = {{"name", name_of(device)}};
  const std::string reason = why_unavailable(device);
  entry["available"] = reason.empty();
  if (!reason.empty()) {
    entry["reason"] = reason;
    return entry;
  }
  entry["description"] = tilemoe_device_description(to_c(device));
  if (device == Device::kCuda) entry["arch"] = arch_of_device();
  entry["supports"] = support_of(device);
  return entry;
}

std::string joined(const json& names) {
  std::string text;
  for (const std::string name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

json info() {
  const BuildInfo build = build_info();
  json limits = json::object();
  for (const Limit& limit : limit_table()) limits[limit.what] = limit.bounds;
  return {{"version", build.version},
          {"commit", build.commit},
          {"build_type", build.build_type},
          {"compiler", build.compiler},
          {"onednn", build.onednn},
          {"devices", json::array({{{"name", "cpu"},
                                    {"model", cpu_model()},
                                    {"hardware_threads", std::thread::hardware_concurrency()}}})},
          {"backends", json::array({backend_entry(Device::kCpu), backend_entry(Device::kCuda)})},
          {"limits", limits}};
}

void print_info(const json& info, std::ostream& out) {
  const auto text = [&](const json& from, const char* key) { return from[key].get<std::string>(); };
  out << "TileMoE " << text(info, "version") << ", commit " << text(info, "commit") << ", "
      << text(info, "build_type") << ", " << text(info, "compiler") << ", oneDNN "
      << text(info, "onednn") << "\n\nDevices\n";
  for (const json& device : info["devices"])
    out << "  " << text(device, "name") << ": " << text(device, "model") << ", "
        << device["hardware_threads"] << " hardware threads\n";
  out << "\nBackends\n";
  for (const json& backend : info["backends"]) {
    if (!backend["available"]) {
      out << "  " << text(backend, "name") << ": not available, " << text(backend, "reason")
          << "\n";
      continue;
    }
    out << "  " << text(backend, "description") << "\n";
    if (backend.contains("arch")) out << "    arch: " << text(backend, "arch") << "\n";
    for (const auto& [what, names] : backend["supports"].items())
      out << "    " << what << ": " << joined(names) << "\n";
  }
  out << "\nLimits\n";
  Table table({{"what", Table::Align::kLeft}, {"allowed", Table::Align::kLeft}});
  for (const Limit& limit : limit_table()) table.add({limit.what, limit.bounds});
  table.print(out);
}

void add_info(CLI::App& app, Run& run) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("info", "Print the build, the devices and what they support");
  command->add_flag("--json", *as_json, "Print JSON instead of text");
  command->callback([&run, as_json] {
    run = [as_json] {
      if (*as_json)
        std::cout << info().dump(2) << "\n";
      else
        print_info(info(), std::cout);
      return 0;
    };
  });
}

}  // namespace tilemoe::app
