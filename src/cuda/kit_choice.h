// Which kit a device's products are made of: the newest that its compute capability runs, or the
// one that the environment's TILEMOE_KIT or tilemoe_set_cuda_kit() asks for. A kit that was asked
// for and cannot be had is an error; no other takes its place. A kit that nobody has run before is
// taken only where it was asked for, or where the doctor's verdict on it is good (cuda/verdict.h).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cuda/core/device.h"
#include "cuda/core/kit.h"
#include "cuda/verdict.h"

namespace tilemoe::cuda {

// A kit of a build, and what its products are compiled for: "80,100" of TILEMOE_CUDA_ARCHS.
struct BuiltKit {
  KitName kit;
  std::string_view archs;
};

struct KitRequest {
  std::string_view kit = "auto";  // auto, sm80, sm90, sm100
  std::string_view by = {};       // who asks, for errors; empty where nobody does
};

// Of the kits that a build has. Throws Error(kInvalidArgument) for a name that is none, and
// Error(kUnsupported) where the build lacks the kit, or the device does not run it.
KitName choose_kit(const DeviceInfo& device, const KitRequest& request,
                   std::span<const BuiltKit> built, const FoundVerdict& verdict = {});
// "sm90, the newest for compute capability 9.0", "sm80, asked for by TILEMOE_KIT", "sm80, since
// `tilemoe doctor --blackwell` has not run". Throws the same.
std::string describe_choice(const DeviceInfo& device, const KitRequest& request,
                            std::span<const BuiltKit> built, const FoundVerdict& verdict = {});

// The same of this build and of what is asked for now: by the program, else by the environment,
// which is read once.
KitName kit_of(const DeviceInfo& device);
std::string describe_kit_of(const DeviceInfo& device);

}  // namespace tilemoe::cuda
