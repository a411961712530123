#include "cuda/arch.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/check.h"
#include "cuda/core/device.h"
#include "cuda/cuda_backend.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {
namespace {

struct Arch {
  std::string_view name;
  ArchName arch;
  const char* needs;  // of compute capability
  bool (*runs_on)(const DeviceInfo&);
  bool tested = true;  // on a GPU
};

constexpr std::string_view kAuto = "auto", kByProgram = "the program";
// The newest first. No other generation runs wgmma and TMA as sm_90a has them, older or newer.
constexpr Arch kArchs[] = {
    {"sm100", ArchName::kSm100, "10.0", [](const DeviceInfo& device) { return device.major == 10; },
     false},
    {"sm90", ArchName::kSm90, "9.0",
     [](const DeviceInfo& device) { return device.major == 9 && device.minor == 0; }},
    {"sm80", ArchName::kSm80, "8.0 or newer",
     [](const DeviceInfo& device) { return device.major >= 8; }},
};

const Arch* find(std::string_view name) {
  const auto* const found = std::find_if(std::begin(kArchs), std::end(kArchs),
                                         [&](const Arch& k) { return k.name == name; });
  return found == std::end(kArchs) ? nullptr : found;
}

const BuiltArch* find(std::span<const BuiltArch> built, const Arch& arch) {
  const auto found = std::find_if(built.begin(), built.end(),
                                  [&](const BuiltArch& one) { return arch.arch == one.arch; });
  return found == built.end() ? nullptr : &*found;
}

// "sm90 for 90a and sm80 for 80"
std::string names_of(std::span<const BuiltArch> built) {
  std::string names;
  for (const Arch& arch : kArchs)
    if (const BuiltArch* const one = find(built, arch))
      names.append(names.empty() ? "" : " and ")
          .append(arch.name)
          .append(" for ")
          .append(one->cuda_archs);
  return names.empty() ? "none" : names;
}

const Arch& check_built(const ArchRequest& request, std::span<const BuiltArch> built) {
  const Arch* const arch = find(request.arch);
  TILEMOE_CHECK(arch, "arch must be 'auto', 'sm80', 'sm90' or 'sm100', got '"
                          << request.arch << "', set by " << request.by);
  TILEMOE_CHECK_SUPPORTED(find(built, *arch), "this build has no arch " << arch->name << ", set by "
                                                                        << request.by << "; it has "
                                                                        << names_of(built));
  return *arch;
}

bool runs(const Arch& arch, const DeviceInfo& device, std::span<const BuiltArch> built) {
  const BuiltArch* const one = find(built, arch);
  return arch.runs_on(device) && one && has_code(one->cuda_archs, device);
}

const Arch& choose(const DeviceInfo& device, const ArchRequest& request,
                   std::span<const BuiltArch> built) {
  if (request.arch == kAuto) {
    for (const Arch& arch : kArchs)
      if (arch.tested && runs(arch, device, built)) return arch;
    TILEMOE_CHECK_SUPPORTED(
        false, device.name << " has compute capability " << device.capability()
                           << ", for which this build has no arch (it has " << names_of(built)
                           << "); only routing and the router run on it, for the layer "
                              "use the CPU backend");
  }
  const Arch& arch = check_built(request, built);
  TILEMOE_CHECK_SUPPORTED(arch.runs_on(device),
                          device.name << " has compute capability " << device.capability()
                                      << ", the arch " << arch.name << ", set by " << request.by
                                      << ", requires " << arch.needs);
  TILEMOE_CHECK_SUPPORTED(runs(arch, device, built),
                          device.name << " has compute capability " << device.capability()
                                      << ", the arch " << arch.name << ", set by " << request.by
                                      << ", has no code for it in this build, which "
                                      << "has " << names_of(built));
  return arch;
}

// Those with a row in the table of products.
std::span<const BuiltArch> archs_of_this_build() {
  static const std::vector<BuiltArch> built = [] {
    std::vector<BuiltArch> archs = {{ArchName::kSm80, TILEMOE_CUDA_ARCHS_OF_SM80},
                                    {ArchName::kSm90, TILEMOE_CUDA_ARCHS_OF_SM90},
                                    {ArchName::kSm100, TILEMOE_CUDA_ARCHS_OF_SM100}};
    std::erase_if(archs, [](const BuiltArch& one) {
      return std::none_of(std::begin(instances::kRows), std::end(instances::kRows),
                          [&](const instances::Row& row) { return row.key.arch == one.arch; });
    });
    return archs;
  }();
  return built;
}

// One of the names above; null until the program selects one.
std::atomic<const std::string_view*> set_by_program = nullptr;
std::atomic<uint32_t> requests_by_program = 0;

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

ArchRequest request() {
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

void report_untested(const ArchRequest& requested) {
  static const int reported = std::fprintf(
      stderr, "tilemoe: warning: %s selects kernels that were never executed on a GPU\n",
      (std::string(requested.by) + "=" + std::string(requested.arch)).c_str());
  static_cast<void>(reported);
}

}  // namespace

ArchName choose_arch(const DeviceInfo& device, const ArchRequest& request,
                     std::span<const BuiltArch> built) {
  return choose(device, request, built).arch;
}

std::string describe_choice(const DeviceInfo& device, const ArchRequest& request,
                            std::span<const BuiltArch> built) {
  const Arch& arch = choose(device, request, built);
  std::string text(arch.name);
  if (request.arch != kAuto) {
    text.append(", set by ").append(request.by);
    return arch.tested ? text : text + ", never executed on a GPU";
  }
  text += ", the newest for compute capability " + device.capability();
  for (const Arch& newer : kArchs)
    if (!newer.tested && newer.runs_on(device))
      text.append(" without ")
          .append(newer.name)
          .append(runs(newer, device, built) ? ", which was never executed on a GPU"
                                             : ", which this build lacks");
  return text;
}

ArchName arch_of(const DeviceInfo& device) {
  const ArchRequest requested = request();
  const Arch& arch = choose(device, requested, archs_of_this_build());
  // A program that selects it by name knows the arch from the documentation.
  if (!arch.tested && requested.by != kByProgram) report_untested(requested);
  return arch.arch;
}

std::string describe_arch_of(const DeviceInfo& device) {
  return describe_choice(device, request(), archs_of_this_build());
}

ArchName built_arch(const char* name) {
  const std::span<const BuiltArch> built = archs_of_this_build();
  if (const ArchRequest requested{name ? name : kAuto, "cuda_arch"}; requested.arch != kAuto)
    return check_built(requested, built).arch;
  for (const Arch& arch : kArchs)
    if (arch.tested && find(built, arch)) return arch.arch;
  TILEMOE_CHECK_SUPPORTED(
      false, "this build has the archs " << names_of(built) << "; set cuda_arch to one of them");
}

void set_arch(const char* name) {
  const ArchRequest requested{name ? name : kAuto, kByProgram};
  const std::string_view* known = &kAuto;
  if (requested.arch != kAuto) known = &check_built(requested, archs_of_this_build()).name;
  set_by_program.store(known, std::memory_order_relaxed);
  requests_by_program.fetch_add(1, std::memory_order_release);
}

uint32_t arch_requests() {
  return requests_by_program.load(std::memory_order_acquire);
}

std::string describe_arch() {
  return describe_arch_of(current_device());
}

}  // namespace tilemoe::cuda
