// The bits of `wanted`, in the order in which the gradients come back (python/tilemoe/ops.py has
// the same).
#pragma once

#include <cstdint>

namespace tilemoe_torch {

inline constexpr int64_t kWantedX = 1;
inline constexpr int64_t kWantedS = 2;
inline constexpr int64_t kWantedW1 = 4;
inline constexpr int64_t kWantedW1Up = 8;
inline constexpr int64_t kWantedW2 = 16;
inline constexpr int64_t kWantedB1 = 32;
inline constexpr int64_t kWantedB1Up = 64;
inline constexpr int64_t kWantedB2 = 128;

}  // namespace tilemoe_torch
