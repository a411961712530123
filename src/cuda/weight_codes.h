// When forward reads quantised weights as their codes, instead of values that a step before it has
// dequantised.
#pragma once

#include <cstdint>
#include <optional>

#include "core/backend.h"

namespace tilemoe::cuda {

// Up to this number of expected rows of an expert, capacity / E, a GEMM reads codes: above it, an
// expert has several tiles, and each of them converts the codes again (docs/kernels.md has the
// measurement). With less than one row, most experts have none and are not dequantised anyway.
constexpr int64_t max_rows_of_codes(tilemoe_format format) {
  return format == TILEMOE_FORMAT_FP8 ? 64 : 48;
}

// Replaces both limits in this process, for a measurement or a test; 0: no GEMM reads codes. Absent:
// the limits above.
void set_max_rows_of_codes(std::optional<int64_t> rows);

// Backend::reads_codes. A weight is read as codes if its checkpoint's order is the GEMM's (K
// contiguous), the arch has a kernel, cp.async can copy its rows, and the expected rows of an expert
// are within the limits.
CodesRead codes_read(const CodesRequest& request);

}  // namespace tilemoe::cuda
