#include "cuda/kit_choice.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "check.h"
#include "cuda/backend.h"
#include "cuda/core/device_code.h"
#include "cuda/device_verdict.h"
#include "cuda/instances/table.h"

namespace tilemoe::cuda {
namespace {

struct Kit {
  std::string_view name;
  KitName kit;
  const char* needs;  // of compute capability
  bool (*runs_on)(const DeviceInfo&);
  bool awaits_verdict = false;  // never run where it was written
};

constexpr std::string_view kAuto = "auto";
// The newest first. No other generation runs wgmma and TMA as sm_90a has them, older or newer.
constexpr Kit kKits[] = {
    {"sm100", KitName::kSm100, "10.0", [](const DeviceInfo& device) { return device.major == 10; },
     true},
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
  TILEMOE_CHECK(kit, "the kit '" << request.kit << "', asked for by " << request.by
                                 << ", is not known: expected auto, sm80, sm90 or sm100");
  TILEMOE_CHECK_SUPPORTED(find(built, *kit), "this build has no "
                                                 << kit->name << " kit, asked for by " << request.by
                                                 << ": it has " << names_of(built));
  return *kit;
}

bool runs(const Kit& kit, const DeviceInfo& device, std::span<const BuiltKit> built) {
  const BuiltKit* const one = find(built, kit);
  return kit.runs_on(device) && one && has_code(one->archs, device);
}

const Kit& choose(const DeviceInfo& device, const KitRequest& request,
                  std::span<const BuiltKit> built, const FoundVerdict& verdict) {
  if (request.kit == kAuto) {
    for (const Kit& kit : kKits)
      if (runs(kit, device, built) && (!kit.awaits_verdict || verdict.agreed())) return kit;
    TILEMOE_CHECK_SUPPORTED(false, device.name
                                       << " has compute capability " << device.capability()
                                       << ", for which this build has no kit of the layer's "
                                          "grouped GEMMs (it has "
                                       << names_of(built)
                                       << "): routing, the router's backward and its losses run "
                                          "here, for the layer use the CPU backend");
  }
  const Kit& kit = check_built(request, built);
  TILEMOE_CHECK_SUPPORTED(kit.runs_on(device),
                          device.name << " has compute capability " << device.capability()
                                      << ", the " << kit.name << " kit, asked for by " << request.by
                                      << ", needs " << kit.needs);
  TILEMOE_CHECK_SUPPORTED(runs(kit, device, built),
                          device.name << " has compute capability " << device.capability()
                                      << ", the " << kit.name << " kit, asked for by " << request.by
                                      << ", has no code for it in this build, which "
                                      << "has " << names_of(built));
  return kit;
}

// Whether a verdict decides here.
bool awaiting(const DeviceInfo& device, std::span<const BuiltKit> built) {
  return std::any_of(std::begin(kKits), std::end(kKits), [&](const Kit& kit) {
    return kit.awaits_verdict && runs(kit, device, built);
  });
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

// No file is looked for where no choice depends on it.
const FoundVerdict& verdict_awaited_on(const DeviceInfo& device) {
  static const FoundVerdict none;
  return awaiting(device, kits_of_this_build()) ? verdict_of(device) : none;
}

// One of the names above; null until the program asks.
std::atomic<const std::string_view*> asked_by_program = nullptr;

KitRequest request() {
  static const std::string environment = [] {
    const char* const value = std::getenv("TILEMOE_KIT");
    return std::string(value ? value : "");
  }();
  if (const std::string_view* const name = asked_by_program.load(std::memory_order_relaxed))
    return {*name, "the program"};
  if (!environment.empty()) return {environment, "TILEMOE_KIT"};
  return {};
}

}  // namespace

KitName choose_kit(const DeviceInfo& device, const KitRequest& request,
                   std::span<const BuiltKit> built, const FoundVerdict& verdict) {
  return choose(device, request, built, verdict).kit;
}

std::string describe_choice(const DeviceInfo& device, const KitRequest& request,
                            std::span<const BuiltKit> built, const FoundVerdict& verdict) {
  const Kit& kit = choose(device, request, built, verdict);
  std::string text(kit.name);
  if (request.kit != kAuto) return text.append(", asked for by ").append(request.by);
  if (kit.awaits_verdict) return text + ", which " + in_words(*verdict.verdict);
  if (awaiting(device, built)) return text + ", since " + verdict.words();
  text += ", the newest for compute capability " + device.capability();
  for (const Kit& newer : kKits)
    if (newer.awaits_verdict && newer.runs_on(device))
      text.append(" in this build, which has no ").append(newer.name).append(" kit");
  return text;
}

KitName kit_of(const DeviceInfo& device) {
  return choose_kit(device, request(), kits_of_this_build(), verdict_awaited_on(device));
}

std::string describe_kit_of(const DeviceInfo& device) {
  return describe_choice(device, request(), kits_of_this_build(), verdict_awaited_on(device));
}

void set_kit(const char* name) {
  const KitRequest asked{name ? name : kAuto, "the program"};
  const std::string_view* known = &kAuto;
  if (asked.kit != kAuto) known = &check_built(asked, kits_of_this_build()).name;
  asked_by_program.store(known, std::memory_order_relaxed);
}

std::string describe_kit() {
  return describe_kit_of(current_device());
}

}  // namespace tilemoe::cuda
