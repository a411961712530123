// Times of routing on the device: top-K, the routing from its pairs, token rounding in their place,
// and top-K among the best groups of experts beside top-K among all. Cold L2, medians.
// tilemoe_cuda_routing [--json FILE] [config ...]
#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "device_timing.h"
#include "tilemoe/layer.h"
#include "verify/registry.h"

namespace tilemoe {
namespace {

using nlohmann::ordered_json;

struct Config {
  std::string name;
  int64_t T, E, K;
  int64_t n_group = 1, topk_group = 1;
};

// The registry's, one of more experts than any model has, and those of DeepSeek-V3 and -V2.
std::vector<Config> configs() {
  std::vector<Config> found;
  for (const verify::Case& c : verify::bench_cases())
    if (c.dtype == DType::kBFloat16 && !c.by_name) found.push_back({c.name, c.T, c.E, c.K});
  found.push_back({"4096-experts", 32768, 4096, 8});
  found.push_back({"deepseek-v3", 32768, 256, 8, 8, 4});
  found.push_back({"deepseek-v2", 32768, 160, 6, 8, 3});
  return found;
}

// Steps of microseconds: more runs than the products get.
template <class Run>
double median_us(const DeviceBuffer& flush, const Run& run) {
  return median_ms<31, 3>(flush, run) * 1e3;
}

class Bench {
 public:
  Bench(const Config& config, DType dtype)
      : c_(config),
        dtype_(dtype),
        logits_(elements() * (dtype == DType::kFloat32 ? 4 : 2)),
        ids_(pairs() * 4),
        scores_(pairs() * 4),
        flush_(size_t{256} << 20) {
    std::vector<uint8_t> values(logits_.bytes());
    verify::Random random(1, 1);
    for (size_t i = 0; i < elements(); ++i)
      verify::store(dtype, values.data(), static_cast<int64_t>(i), random.normal());
    logits_.upload(values);
    entry_ = {{"config", c_.name}, {"T", c_.T}, {"E", c_.E}, {"K", c_.K}, {"dtype", type()}};
  }

  ordered_json run() {
    if (c_.n_group > 1)
      in_groups();
    else
      from_top_k();
    std::fflush(stdout);
    return entry_;
  }

 private:
  size_t elements() const { return static_cast<size_t>(c_.T * c_.E); }
  size_t pairs() const { return static_cast<size_t>(c_.T * c_.K); }
  const char* type() const { return tilemoe_dtype_name(to_c(dtype_)); }
  Tensor logits() { return {logits_.data(), dtype_, {c_.T, c_.E}}; }
  Tensor ids() { return {ids_.data(), DType::kInt32, {c_.T, c_.K}}; }
  Tensor scores() { return {scores_.data(), DType::kFloat32, {c_.T, c_.K}}; }

  void from_top_k() {
    const RoutingSpec spec = RoutingSpec::top_k(Device::kCuda, c_.T, c_.E, c_.K);
    DeviceBuffer memory(spec.bytes()), workspace(spec.workspace_bytes());
    Routing routing(spec, memory.data(), memory.bytes());
    const auto choose = [&] {
      top_k({.device = Device::kCuda,
             .K = c_.K,
             .logits = logits(),
             .ids = ids(),
             .scores = scores()});
    };
    const auto route = [&] {
      routing.from_top_k(ids(), scores(), workspace.data(), workspace.bytes());
    };
    const double top_k_us = median_us(flush_, choose), route_us = median_us(flush_, route);
    const double both_us = median_us(flush_, [&] {
      choose();
      route();
    });
    // Logits, ids and scores; then both again, twice the ids, and 12 bytes a pair.
    const double pair_bytes = static_cast<double>(pairs()) * 4;
    const double limit_us = (static_cast<double>(logits_.bytes()) + 8 * pair_bytes) / 3.0e6;
    std::printf(
        "%-12s %-8s top_k %7.2f us  route %7.2f us  both %7.2f us  (bytes alone %6.2f us)\n",
        c_.name.c_str(), type(), top_k_us, route_us, both_us, limit_us);
    entry_["us"] = {{"top_k", top_k_us}, {"route", route_us}, {"both", both_us}};
    rounded("nearest", Rounding::kNearest, both_us);
    rounded("balanced", Rounding::kBalanced, both_us);
  }

  void rounded(const char* name, Rounding rule, double both_us) {
    const RoutingSpec size = RoutingSpec::rounded(Device::kCuda, c_.T, c_.E, c_.K, rule, 128);
    DeviceBuffer memory(size.bytes()), workspace(size.workspace_bytes());
    Routing routing(size, memory.data(), memory.bytes());
    const double us = median_us(flush_, [&] {
      routing.from_logits({.logits = logits(),
                           .workspace = workspace.data(),
                           .workspace_bytes = workspace.bytes()});
    });
    std::printf("%-12s   rounded, %-8s %7.2f us: %+.2f us\n", c_.name.c_str(), name, us,
                us - both_us);
    entry_["us"][name] = us;
  }

  // In turn, since the difference is of a few microseconds.
  void in_groups() {
    const auto choose = [&](int64_t n_group, int64_t topk_group) {
      top_k({.device = Device::kCuda,
             .scoring = Scoring::kSigmoidRenormalized,
             .K = c_.K,
             .logits = logits(),
             .ids = ids(),
             .scores = scores(),
             .n_group = n_group,
             .topk_group = topk_group});
    };
    std::vector<double> all, best;
    for (int round = 0; round < 9; ++round) {
      all.push_back(median_us(flush_, [&] { choose(1, 1); }));
      best.push_back(median_us(flush_, [&] { choose(c_.n_group, c_.topk_group); }));
    }
    const auto median = [](std::vector<double>& us) {
      std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
      return us[us.size() / 2];
    };
    const double among_all = median(all), among_best = median(best);
    std::printf(
        "%-12s %-8s top_k by sigmoid among all %7.2f us, among the best %d of %d groups "
        "%7.2f us: %+.2f us\n",
        c_.name.c_str(), type(), among_all, static_cast<int>(c_.topk_group),
        static_cast<int>(c_.n_group), among_best, among_best - among_all);
    entry_["n_group"] = c_.n_group, entry_["topk_group"] = c_.topk_group;
    entry_["us"] = {{"among_all", among_all}, {"among_best_groups", among_best}};
  }

  Config c_;
  DType dtype_;
  DeviceBuffer logits_, ids_, scores_, flush_;
  ordered_json entry_;
};

void bench(std::vector<std::string> names) {
  std::string json_file;
  if (names.size() >= 2 && names[0] == "--json") {
    json_file = names[1];
    names.erase(names.begin(), names.begin() + 2);
  }
  ordered_json report = ordered_json::array();
  for (const Config& config : configs()) {
    if (!names.empty() && std::find(names.begin(), names.end(), config.name) == names.end())
      continue;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      report.push_back(Bench(config, dtype).run());
  }
  if (json_file.empty()) return;
  std::ofstream out(json_file);
  out << report.dump(1) << "\n";
  if (!out) throw std::runtime_error("cannot write " + json_file);
}

}  // namespace
}  // namespace tilemoe

int main(int argc, char** argv) {
  try {
    tilemoe::bench({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
