// What is simulated: a GPU, and the arch whose kernels compute the layer on it.
#pragma once

#include <map>
#include <span>
#include <string>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

struct Setting {
  const char* name;
  const char* in_words;
  const char* arch;
  DeviceKind device;
  bool two_ctas = false;  // 2-CTA MMAs: TILEMOE_2CTA
};

std::span<const Setting> all_settings();
// The schedules by their names on the command line.
const std::map<std::string, Schedule>& all_schedules();
constexpr const char* kScheduleHelp =
    "Which warp runs next, and when asynchronous work is done:\n"
    "any: chosen by the seed, soon or late\n"
    "by-rank: warps in an order that the seed draws, each until it waits; at once\n"
    "in-step: all threads alternate, one memory access each; at once";
// Throws std::invalid_argument for an unknown name.
const Setting& setting_of(const std::string& name);

// Whether two settings give equal bits: their tensor cores have one arithmetic, and sums over an
// expert's rows are split for the same number of blocks.
inline bool same_bits(const Setting& a, const Setting& b) {
  return a.device.major == b.device.major && a.device.sms == b.device.sms;
}

}  // namespace tilemoe::simulator
