// When forward reads quantised weights as their codes, instead of values that a step before it has
// dequantised.
#pragma once

#include <cstdint>

#include "core/backend.h"

namespace tilemoe::cuda {

// Expected rows of an expert, capacity / E, up to which a GEMM reads codes.
inline constexpr int64_t kMaxRowsOfCodes = 128;

// Replaces kMaxRowsOfCodes in this process, for a measurement or a test; 0: no GEMM reads codes.
void set_max_rows_of_codes(int64_t rows);

// Backend::reads_codes. A weight is read as codes if its checkpoint's order is the GEMM's (K
// contiguous), the arch has a kernel, cp.async can copy its rows, and an expert has at most
// kMaxRowsOfCodes rows.
CodesRead codes_read(const CodesRequest& request);

}  // namespace tilemoe::cuda
