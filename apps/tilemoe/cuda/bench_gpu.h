// `tilemoe bench --device cuda`. What it measures is in bench_gpu_measure.h.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "verify/case.h"

namespace tilemoe::app {

inline constexpr const char* kGpuLayerBackend = "tilemoe-cuda";

struct GpuPasses {
  bool forward = true, backward = true;  // to be timed; a backward has an untimed forward before it
};

struct GpuBench {
  std::vector<verify::Case> cases;
  GpuPasses passes;
  int rounds = 15;
  bool with_dense = true;
  bool print_tables = true;
  bool rounds_from_stdin = false;  // a round for every line of standard input
};

// Entries in the form of docs/benchmarks.md.
nlohmann::json bench_on_gpu(const GpuBench& bench);

}  // namespace tilemoe::app
