// Times of routing on the device: top-K, the routing from its pairs, and token rounding in their
// place, of all tokens and of groups. Cold L2, medians.
// tilemoe_cuda_routing [config ...]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "device_timing.h"
#include "tilemoe/layer.h"
#include "verify/registry.h"

namespace tilemoe {
namespace {

struct Config {
  const char* name;
  int64_t T, E, K;
};

// The registry's, and one of more experts than any model has.
std::vector<Config> configs() {
  std::vector<Config> found;
  for (const verify::Case& c : verify::bench_cases())
    if (c.dtype == DType::kBFloat16 && !c.by_name) found.push_back({c.name.c_str(), c.T, c.E, c.K});
  found.push_back({"4096-experts", 32768, 4096, 8});
  return found;
}

// Steps of microseconds: more runs than the products get.
template <class Run>
double median_us(const DeviceBuffer& flush, const Run& run) {
  return median_ms<31, 3>(flush, run) * 1e3;
}

void bench(const Config& c, DType dtype) {
  const auto elements = static_cast<size_t>(c.T * c.E), pairs = static_cast<size_t>(c.T * c.K);
  const size_t element = dtype == DType::kFloat32 ? 4 : 2;
  std::vector<uint8_t> values(elements * element);
  verify::Random random(1, 1);
  for (size_t i = 0; i < elements; ++i)
    verify::store(dtype, values.data(), static_cast<int64_t>(i), random.normal());
  DeviceBuffer logits(values.size()), ids(pairs * 4), scores(pairs * 4);
  DeviceBuffer flush(size_t{256} << 20);
  logits.upload(values);
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCuda, c.T, c.E, c.K);
  DeviceBuffer memory(spec.bytes()), workspace(spec.workspace_bytes());
  Routing routing(spec, memory.data(), memory.bytes());
  const Tensor x(logits.data(), dtype, {c.T, c.E});
  const Tensor id(ids.data(), DType::kInt32, {c.T, c.K});
  const Tensor score(scores.data(), DType::kFloat32, {c.T, c.K});
  const auto choose = [&] {
    top_k({.device = Device::kCuda, .K = c.K, .logits = x, .ids = id, .scores = score});
  };
  const auto route = [&] { routing.from_top_k(id, score, workspace.data(), workspace.bytes()); };
  const double top_k_us = median_us(flush, choose), route_us = median_us(flush, route);
  const double both_us = median_us(flush, [&] {
    choose();
    route();
  });
  // Logits, ids and scores; then both again, twice the ids, and 12 bytes a pair.
  const double pair_bytes = static_cast<double>(pairs) * 4;
  const double limit_us = (static_cast<double>(values.size()) + 8 * pair_bytes) / 3.0e6;
  std::printf("%-12s %-8s top_k %7.2f us  route %7.2f us  both %7.2f us  (bytes alone %6.2f us)\n",
              c.name, dtype == DType::kFloat32 ? "float32" : "bfloat16", top_k_us, route_us,
              both_us, limit_us);
  struct Rounded {
    const char* name;
    Rounding rule;
    int64_t round_tokens;
  };
  for (const auto& [name, rule, round_tokens] : {Rounded{"nearest", Rounding::kNearest, 0},
                                                 {"balanced", Rounding::kBalanced, 0},
                                                 {"nearest, each 2048", Rounding::kNearest, 2048},
                                                 {"nearest, each 256", Rounding::kNearest, 256}}) {
    if (round_tokens > 0 && c.T % round_tokens != 0) continue;
    const RoutingSpec size =
        RoutingSpec::rounded(Device::kCuda, c.T, c.E, c.K, rule, 128, round_tokens);
    DeviceBuffer rounded_memory(size.bytes()), rounded_workspace(size.workspace_bytes());
    Routing rounded(size, rounded_memory.data(), rounded_memory.bytes());
    const double us = median_us(flush, [&] {
      rounded.from_logits({.logits = x,
                           .workspace = rounded_workspace.data(),
                           .workspace_bytes = rounded_workspace.bytes()});
    });
    std::printf("%-12s   rounded, %-18s %7.2f us: %+.2f us\n", c.name, name, us, us - both_us);
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace tilemoe

int main(int argc, char** argv) {
  try {
    for (const tilemoe::Config& config : tilemoe::configs()) {
      const auto wanted = [&](const char* name) { return std::strcmp(name, config.name) == 0; };
      if (argc > 1 && std::none_of(argv + 1, argv + argc, wanted)) continue;
      for (const tilemoe::DType dtype : {tilemoe::DType::kFloat32, tilemoe::DType::kBFloat16})
        tilemoe::bench(config, dtype);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
