// The bits of a float.
#pragma once

#include <cstdint>
#include <cstring>

#include "routing/host_device.h"

namespace tilemoe::order {

TILEMOE_HOST_DEVICE int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

TILEMOE_HOST_DEVICE float from_bits(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr int32_t kInfinityBits = 0x7f800000;

}  // namespace tilemoe::order
