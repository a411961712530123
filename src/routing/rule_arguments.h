// Checks of arguments that the rules of routing and the backward of the router share.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/backend.h"
#include "core/check.h"
#include "core/overlap.h"
#include "routing/spec.h"

namespace tilemoe {

inline constexpr DTypes kFloats = {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16};
inline constexpr DTypes kFloat32 = {TILEMOE_FLOAT32};
inline constexpr DTypes kIntegers = {TILEMOE_INT32, TILEMOE_INT64};
inline constexpr DTypes kInt32 = {TILEMOE_INT32};
inline constexpr DTypes kInt64 = {TILEMOE_INT64};

inline const char* kind_name(tilemoe_routing_kind kind) {
  switch (kind) {
    case TILEMOE_ROUTING_TOP_K: return "top-K";
    case TILEMOE_ROUTING_GENERAL: return "general";
    case TILEMOE_ROUTING_ROUNDED: return "rounded";
    case TILEMOE_ROUTING_GROUPED: return "grouped";
  }
  return "unknown";
}

// Rows of routing arrays have any number of elements, so their alignment is not checked.
inline void check_vector(const char* name, const tilemoe_tensor& tensor, int64_t size,
                         DTypes dtypes) {
  check_tensor(name, tensor, {{size}, dtypes, Strides::kContiguous, false});
}
inline void check_matrix(const char* name, const tilemoe_tensor& tensor, int64_t rows,
                         int64_t columns, DTypes dtypes, Strides strides = Strides::kContiguous) {
  check_tensor(name, tensor, {{rows, columns}, dtypes, strides, false});
}

inline void check_scoring(tilemoe_scoring scoring) {
  TILEMOE_CHECK(scoring >= TILEMOE_SOFTMAX_OVER_CHOSEN && scoring <= TILEMOE_SIGMOID_RENORMALIZED,
                "scoring is " << static_cast<int>(scoring) << ", expected a value in [0, 4]");
}

// Replaces 0 by 1.
inline void check_factor(float& routed_scaling_factor) {
  TILEMOE_CHECK(std::isfinite(routed_scaling_factor), "routed_scaling_factor is "
                                                          << routed_scaling_factor
                                                          << ", expected a finite number");
  if (routed_scaling_factor == 0) routed_scaling_factor = 1;
}

inline void check_tokens_and_experts(int64_t T, int64_t E, tilemoe_device device) {
  const int64_t limit = limits::max_rows(device);
  TILEMOE_CHECK(T >= 0 && T <= limit, "T is " << T << ", expected a value in [0, " << limit << "]");
  TILEMOE_CHECK(E >= 1 && E <= limits::kMaxExperts,
                "E is " << E << ", expected a value in [1, " << limits::kMaxExperts << "]");
}

// For calls that take T and E from the logits.
inline void check_logits(const tilemoe_tensor& logits, tilemoe_device device) {
  TILEMOE_CHECK(logits.ndim == 2, "logits are " << describe(logits) << ", expected (T, E)");
  const int64_t T = logits.shape[0], E = logits.shape[1];
  check_tokens_and_experts(T, E, device);
  check_matrix("logits", logits, T, E, kFloats, Strides::kRows);
}

inline void check_routing_workspace(const Backend& backend, const tilemoe_routing_spec& spec,
                                    const void* workspace, size_t bytes, MemoryUse& memory) {
  const size_t needed = backend.routing_scratch_bytes(spec);
  check_workspace(workspace, bytes, needed);
  memory.writes("workspace", workspace, needed);
}

}  // namespace tilemoe
