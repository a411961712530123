#include "simulator/setting.h"

#include <stdexcept>

namespace tilemoe::simulator {
namespace {

// Few SMs, so that a block has several tiles.
constexpr DeviceKind kA100{"a simulated A100", 8, 0, 163 * 1024, 3};
constexpr DeviceKind kSmall{"a simulated GPU of 99 KiB", 8, 6, 99 * 1024, 3};
constexpr DeviceKind kH100{"a simulated H100", 9, 0, 227 * 1024, 4};
// All SMs, so that most blocks have one tile or none.
constexpr DeviceKind kWholeH100{"a simulated whole H100", 9, 0, 227 * 1024, 132};
#ifndef TILEMOE_WITHOUT_SM100
constexpr DeviceKind kB200{"a simulated B200", 10, 0, 227 * 1024, 4};
constexpr DeviceKind kWholeB200{"a simulated whole B200", 10, 0, 227 * 1024, 148};
#endif

constexpr Setting kSettings[] = {
    {"sm80", "an A100 with the arch sm80", "sm80", kA100},
    {"sm86", "a GPU of 99 KiB of shared memory with the arch sm80", "sm80", kSmall},
    {"sm90", "an H100 with the arch sm90", "sm90", kH100},
    {"sm80-on-90", "an H100 with the arch sm80", "sm80", kH100},
    {"sm90-whole", "all of an H100 with the arch sm90", "sm90", kWholeH100},
    {"sm80-on-90-whole", "all of an H100 with the arch sm80", "sm80", kWholeH100},
#ifndef TILEMOE_WITHOUT_SM100
    {"sm100", "a B200 with the arch sm100", "sm100", kB200},
    {"sm100-2cta", "a B200 with the arch sm100 and 2-CTA MMAs", "sm100", kB200, true},
    {"sm80-on-100", "a B200 with the arch sm80", "sm80", kB200},
    {"sm100-whole", "all of a B200 with the arch sm100", "sm100", kWholeB200},
#endif
};

}  // namespace

std::span<const Setting> all_settings() {
  return kSettings;
}

const std::map<std::string, Schedule>& all_schedules() {
  static const std::map<std::string, Schedule> schedules = {
      {"any", Schedule::kAny}, {"by-rank", Schedule::kByRank}, {"in-step", Schedule::kInStep}};
  return schedules;
}

const Setting& setting_of(const std::string& name) {
  for (const Setting& one : kSettings)
    if (name == one.name) return one;
  throw std::invalid_argument("unknown simulated device " + name);
}

}  // namespace tilemoe::simulator
