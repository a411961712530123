// Which arch a device's GEMMs are made of: the newest that its compute capability runs, or the one
// that TILEMOE_ARCH or tilemoe_set_cuda_arch() selects. A selected arch that cannot be used is an
// error; no other replaces it. An arch that was never executed on a GPU runs only if selected.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cuda/core/device.h"
#include "cuda/core/variant.h"

namespace tilemoe::cuda {

// An arch of a build, and what its GEMMs are compiled for: "80,100" of TILEMOE_CUDA_ARCHS.
struct BuiltArch {
  ArchName arch;
  std::string_view cuda_archs;
};

struct ArchRequest {
  std::string_view arch = "auto";  // auto, sm80, sm90, sm100
  std::string_view by = {};        // who selects it, for errors; empty: nobody does
};

// Of the archs that a build has. Throws Error(kInvalidArgument) for an unknown name, and
// Error(kUnsupported) if the build lacks the arch, or the device does not run it.
ArchName choose_arch(const DeviceInfo& device, const ArchRequest& request,
                     std::span<const BuiltArch> built);
// "sm90, the newest for compute capability 9.0", "sm80, set by TILEMOE_ARCH". Throws the same.
std::string describe_choice(const DeviceInfo& device, const ArchRequest& request,
                            std::span<const BuiltArch> built);

// The same of this build and of the current selection: the program's, else the environment's, which
// is read once. The first choice of an untested arch by the environment is reported on stderr.
ArchName arch_of(const DeviceInfo& device);
std::string describe_arch_of(const DeviceInfo& device);

// An arch of this build by name; null or "auto": the newest that is tested. Throws as choose_arch().
ArchName built_arch(const char* name);

// The number of selections by the program so far: as long as it is the same, so is the arch.
uint32_t arch_requests();

}  // namespace tilemoe::cuda
