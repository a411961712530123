#include "cuda/arch.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/check.h"
#include "cuda/core/device.h"
#include "cuda/cuda_backend.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {
namespace {

struct Kit {
  std::string_view name;
  KitName kit;
  const char* needs;  // of compute capability
  bool (*runs_on)(const DeviceInfo&);
  bool tested = true;  // on a GPU
};

constexpr std::string_view kAuto = "auto", kByProgram = "the program";
// The newest first. No other generation runs wgmma and TMA as sm_90a has them, older or newer.
constexpr Kit kKits[] = {
    {"sm100", KitName::kSm100, "10.0", [](const DeviceInfo& device) { return device.major == 10; },
     false},
    {"sm90", KitName::kSm90, "9.0",
     [](const DeviceInfo& device) { return device.major == 9 && device.minor == 0; }},
    {"sm80", KitName::kSm80, "8.0 or newer",
     [](const DeviceInfo& device) { return device.major >= 8; }},
};

const Kit* find(std::string_view name) {
  const auto* const found = std::find_if(std::begin(kKits), std::end(kKits),
                                         [&](const Kit& k) { return k.name == name; });
  return found == std::end(kKits) ? nullptr : found;
}

const BuiltKit* find(std::span<const BuiltKit> built, const Kit& kit) {
  const auto found = std::find_if(built.begin(), built.end(),
                                  [&](const BuiltKit& one) { return kit.kit == one.kit; });
  return found == built.end() ? nullptr : &*found;
}

// "sm90 for 90a and sm80 for 80"
std::string names_of(std::span<const BuiltKit> built) {
  std::string names;
  for (const Kit& kit : kKits)
    if (const BuiltKit* const one = find(built, kit))
      names.append(names.empty() ? "" : " and ")
          .append(kit.name)
          .append(" for ")
          .append(one->archs);
  return names.empty() ? "none" : names;
}

const Kit& check_built(const KitRequest& request, std::span<const BuiltKit> built) {
  const Kit* const kit = find(request.kit);
  TILEMOE_CHECK(kit, "the arch '" << request.kit << "', set by " << request.by
                                  << ", is not known: expected auto, sm80, sm90 or sm100");
  TILEMOE_CHECK_SUPPORTED(find(built, *kit), "this build has no arch " << kit->name << ", set by "
                                                                       << request.by << ": it has "
                                                                       << names_of(built));
  return *kit;
}

bool runs(const Kit& kit, const DeviceInfo& device, std::span<const BuiltKit> built) {
  const BuiltKit* const one = find(built, kit);
  return kit.runs_on(device) && one && has_code(one->archs, device);
}

const Kit& choose(const DeviceInfo& device, const KitRequest& request,
                  std::span<const BuiltKit> built) {
  if (request.kit == kAuto) {
    for (const Kit& kit : kKits)
      if (kit.tested && runs(kit, device, built)) return kit;
    TILEMOE_CHECK_SUPPORTED(false, device.name
                                       << " has compute capability " << device.capability()
                                       << ", for which this build has no arch of the layer's "
                                          "grouped GEMMs (it has "
                                       << names_of(built)
                                       << "): routing, the router's backward and its losses run "
                                          "here, for the layer use the CPU backend");
  }
  const Kit& kit = check_built(request, built);
  TILEMOE_CHECK_SUPPORTED(kit.runs_on(device), device.name << " has compute capability "
                                                           << device.capability() << ", the arch "
                                                           << kit.name << ", set by " << request.by
                                                           << ", needs " << kit.needs);
  TILEMOE_CHECK_SUPPORTED(runs(kit, device, built),
                          device.name << " has compute capability " << device.capability()
                                      << ", the arch " << kit.name << ", set by " << request.by
                                      << ", has no code for it in this build, which "
                                      << "has " << names_of(built));
  return kit;
}

// Those with a row in the table of products.
std::span<const BuiltKit> kits_of_this_build() {
  static const std::vector<BuiltKit> built = [] {
    std::vector<BuiltKit> kits = {{KitName::kSm80, TILEMOE_ARCHS_OF_SM80},
                                  {KitName::kSm90, TILEMOE_ARCHS_OF_SM90},
                                  {KitName::kSm100, TILEMOE_ARCHS_OF_SM100}};
    std::erase_if(kits, [](const BuiltKit& one) {
      return std::none_of(std::begin(instances::kRows), std::end(instances::kRows),
                          [&](const instances::Row& row) { return row.key.kit == one.kit; });
    });
    return kits;
  }();
  return built;
}

// One of the names above; null until the program selects one.
std::atomic<const std::string_view*> set_by_program = nullptr;

constexpr std::string_view kVariable = "TILEMOE_ARCH", kOlderVariable = "TILEMOE_KIT";

struct Environment {
  std::string arch, older;  // values of the two variables
};

// Read once. The older name is reported, also once.
const Environment& environment() {
  static const Environment found = [] {
    const auto read = [](std::string_view name) {
      const char* const value = std::getenv(name.data());
      return std::string(value ? value : "");
    };
    Environment now{.arch = read(kVariable), .older = read(kOlderVariable)};
    if (now.arch.empty() && !now.older.empty())
      std::fprintf(stderr, "tilemoe: warning: TILEMOE_KIT is the older name of TILEMOE_ARCH\n");
    return now;
  }();
  return found;
}

KitRequest request() {
  if (const std::string_view* const name = set_by_program.load(std::memory_order_relaxed))
    return {*name, kByProgram};
  const Environment& set = environment();
  TILEMOE_CHECK(set.arch.empty() || set.older.empty() || set.arch == set.older,
                "TILEMOE_ARCH is " << set.arch << " and TILEMOE_KIT, its older name, is "
                                   << set.older << ": unset TILEMOE_KIT");
  if (!set.arch.empty()) return {set.arch, kVariable};
  if (!set.older.empty()) return {set.older, kOlderVariable};
  return {};
}

void report_untested(const KitRequest& asked) {
  static const int reported = std::fprintf(
      stderr, "tilemoe: warning: %s selects kernels that were never executed on a GPU\n",
      (std::string(asked.by) + "=" + std::string(asked.kit)).c_str());
  static_cast<void>(reported);
}

}  // namespace

KitName choose_kit(const DeviceInfo& device, const KitRequest& request,
                   std::span<const BuiltKit> built) {
  return choose(device, request, built).kit;
}

std::string describe_choice(const DeviceInfo& device, const KitRequest& request,
                            std::span<const BuiltKit> built) {
  const Kit& kit = choose(device, request, built);
  std::string text(kit.name);
  if (request.kit != kAuto) {
    text.append(", set by ").append(request.by);
    return kit.tested ? text : text + ", never executed on a GPU";
  }
  text += ", the newest for compute capability " + device.capability();
  for (const Kit& newer : kKits)
    if (!newer.tested && newer.runs_on(device))
      text.append(" without ")
          .append(newer.name)
          .append(runs(newer, device, built) ? ", which was never executed on a GPU"
                                             : ", which this build lacks");
  return text;
}

KitName kit_of(const DeviceInfo& device) {
  const KitRequest asked = request();
  const Kit& kit = choose(device, asked, kits_of_this_build());
  // A program that selects it by name knows the arch from the documentation.
  if (!kit.tested && asked.by != kByProgram) report_untested(asked);
  return kit.kit;
}

std::string describe_kit_of(const DeviceInfo& device) {
  return describe_choice(device, request(), kits_of_this_build());
}

void set_kit(const char* name) {
  const KitRequest asked{name ? name : kAuto, kByProgram};
  const std::string_view* known = &kAuto;
  if (asked.kit != kAuto) known = &check_built(asked, kits_of_this_build()).name;
  set_by_program.store(known, std::memory_order_relaxed);
}

std::string describe_kit() {
  return describe_kit_of(current_device());
}

}  // namespace tilemoe::cuda
