// `tilemoe bench --device cuda`. What it measures is in bench_gpu_measure.h.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "verify/case.h"

namespace tilemoe::app {

inline constexpr const char* kGpuLayerBackend = "tilemoe-cuda";
inline constexpr const char* kGpuDenseBackend = "cublaslt-dense";

struct GpuBench {
  std::vector<verify::Case> cases;
  int rounds = 15;
  bool with_dense = true;
  bool print_tables = true;
  bool rounds_from_stdin = false;  // a round for every line of standard input
};

// Entries in the form of docs/benchmarks.md.
nlohmann::json bench_on_gpu(const GpuBench& bench);

}  // namespace tilemoe::app
