// What benchmarks of single steps share: the configurations and a random routing.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "cuda/backend.h"
#include "cuda/products.h"
#include "device_timing.h"
#include "verify/random.h"
#include "verify/registry.h"

namespace tilemoe {

struct Config {
  const char* name;
  int64_t T, d, n, E, K;
};
// A GPU's cases of the registry.
inline std::vector<Config> configs() {
  std::vector<Config> found;
  for (const verify::Case& c : verify::bench_cases())
    if (c.dtype == DType::kBFloat16 && !c.by_name)
      found.push_back({c.name.c_str(), c.T, c.d, c.n, c.E, c.K});
  return found;
}

inline std::string name_of(const cuda::TileConfiguration& tile) {
  return std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) +
         (tile.schedule == cuda::Schedule::kPingPong ? " ping-pong" : " cooperative") +
         (tile.cluster > 1 ? ", pairs" : "");
}

// Reports a step with every tile that it has, and the one that is chosen: report(name, step).
template <class Step, class Report>
void of_every_tile(Step step, const Report& report) {
  report("chosen", step);
  for (const cuda::TileConfiguration& tile : cuda::Tiles(cuda::key_of(step))) {
    step.tuning.tile = &tile;
    report(name_of(tile).c_str(), step);
  }
}

inline tilemoe_tensor tensor(const DeviceBuffer& buffer, std::vector<int64_t> shape) {
  tilemoe_tensor view{};
  view.data = buffer.data();
  view.dtype = TILEMOE_BFLOAT16;
  view.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.stride[i] = stride;
    stride *= shape[i];
  }
  return view;
}

// K distinct experts a token, uniformly.
struct RandomRouting {
  std::vector<int32_t> offsets, tokens, pair_row;
  std::vector<float> scores;

  explicit RandomRouting(const Config& c) {
    verify::Random random(5, 5);
    std::vector<std::vector<int32_t>> pairs_of(static_cast<size_t>(c.E));
    std::vector<int32_t> ids(static_cast<size_t>(c.E));
    std::iota(ids.begin(), ids.end(), 0);
    for (int64_t t = 0; t < c.T; ++t)
      for (int64_t k = 0; k < c.K; ++k) {
        const auto slot = static_cast<size_t>(k);
        std::swap(ids[slot], ids[static_cast<size_t>(k + random.below(c.E - k))]);
        pairs_of[static_cast<size_t>(ids[slot])].push_back(static_cast<int32_t>(t * c.K + k));
      }
    pair_row.resize(static_cast<size_t>(c.T * c.K));
    offsets.push_back(0);
    for (const auto& pairs : pairs_of) {
      for (const int32_t pair : pairs) {
        pair_row[static_cast<size_t>(pair)] = static_cast<int32_t>(tokens.size());
        tokens.push_back(pair / static_cast<int32_t>(c.K));
        scores.push_back(1.f / static_cast<float>(c.K));
      }
      offsets.push_back(static_cast<int32_t>(tokens.size()));
    }
  }
};

inline void report(const char* config, const char* step, const char* tile, double ms, double flop,
                   double bytes) {
  const double limit = std::max(flop / 798e12, bytes / 3.0e12) * 1e3;
  std::printf("%-12s %-6s %-16s %8.4f ms %7.1f TFLOP/s %7.1f GB/s  limit %8.4f (%.2f)\n", config,
              step, tile, ms, flop / ms * 1e-9, bytes / ms * 1e-6, limit, limit / ms);
  std::fflush(stdout);
}

// The configurations named by the arguments, all without any: bench(config) for each.
template <class Bench>
int bench_configs(int argc, char** argv, const Bench& bench) {
  try {
    std::printf("%s\n", cuda::backend().description().c_str());
    for (const Config& config : configs()) {
      const auto wanted = [&](const char* name) { return std::strcmp(name, config.name) == 0; };
      if (argc == 1 || std::any_of(argv + 1, argv + argc, wanted)) bench(config);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace tilemoe
