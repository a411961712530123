// Which devices have grouped GEMMs: the choice among the kits, of which there is Hopper's (sm90/).
#pragma once

#include "cuda/core/device.h"

namespace tilemoe::cuda {

// wgmma and TMA as sm_90a has them: no other generation runs that code, older or newer.
inline bool has_products(const DeviceInfo& device) {
  return device.major == 9 && device.minor == 0;
}

// Throws Error(kUnsupported) where the device has none. Asked before a layer writes or launches
// anything.
void require_products(const DeviceInfo& device);

}  // namespace tilemoe::cuda
