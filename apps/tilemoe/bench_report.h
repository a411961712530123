// What the bench prints: JSON entries in the form of docs/benchmarks.md, and tables.
#pragma once

#include <iosfwd>
#include <nlohmann/json.hpp>

#include "bench_measure.h"

namespace tilemoe::app {

inline constexpr const char* kLayerBackend = "tilemoe-cpu";
inline constexpr const char* kDenseBackend = "onednn-dense";

// One entry for the layer and one for each baseline.
nlohmann::json entries_of(const Measurement& measurement);

// {"T", "d", "n", "E", "K"}
nlohmann::json shape_of(const verify::Case& layer);

// One round's times by backend: {"tilemoe-cpu": {"fwd_ms", "bwd_ms"}, ...}.
nlohmann::json times_of(const Measurement& measurement, const Round& round);

void print_table(const Measurement& measurement, std::ostream& out);

}  // namespace tilemoe::app
