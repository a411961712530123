// What is simulated: a GPU, and the kit that the layer's products are made of on it.
#pragma once

#include <map>
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
// By the names that the command lines have for them.
const std::map<std::string, Schedule>& all_schedules();
constexpr const char* kScheduleHelp =
    "Who goes on, and when what is asynchronous is done:\n"
    "any: as the seed has it, soon or late\n"
    "by-rank: warps in an order that the seed draws, each until it waits; at once\n"
    "in-step: all threads in turn, for one access of memory each; at once";
// Throws std::invalid_argument for a name that is none.
const Setting& setting_of(const std::string& name);

// Settings whose cases have equal bits: their tensor cores have one arithmetic, and sums over an
// expert's rows are cut for as many blocks.
inline bool same_bits(const Setting& a, const Setting& b) {
  return a.device.major == b.device.major && a.device.multiprocessors == b.device.multiprocessors;
}

}  // namespace tilemoe::simulator
