// What is simulated: a GPU, and the kit that the layer's products are made of on it.
#pragma once

#include <span>
#include <string>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

struct Setting {
  const char* name;
  const char* in_words;
  const char* kit;
  DeviceKind device;
  bool pairs = false;  // of blocks: TILEMOE_PAIRS
};

std::span<const Setting> all_settings();
// Throws std::invalid_argument for a name that is none.
const Setting& setting_of(const std::string& name);

// Settings whose tensor cores have one arithmetic: cases have equal bits in them.
inline bool same_bits(const Setting& a, const Setting& b) {
  return a.device.major == b.device.major;
}

}  // namespace tilemoe::simulator
