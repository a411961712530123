// The arch that each compute capability runs. No kernel runs here; the simulator's build has this
// test too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cuda/arch.h"
#include "cuda/core/device.h"
#include "cuda/cuda_backend.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {
namespace {

constexpr BuiltArch kBoth[] = {{ArchName::kSm80, "80"}, {ArchName::kSm90, "90a"}};
constexpr BuiltArch kOnlySm90[] = {{ArchName::kSm90, "90a"}};
constexpr BuiltArch kOnlySm80[] = {{ArchName::kSm80, "80"}};

DeviceInfo gpu(int major, int minor) {
  return {.index = 0,
          .sms = 108,
          .major = major,
          .minor = minor,
          .l2_bytes = 40 << 20,
          .shared_bytes = 163 * 1024,
          .memory_bytes_per_s = 3.35e12,
          .name = "Some GPU"};
}

constexpr std::pair<int, int> kCapabilities[] = {{7, 5}, {8, 0},  {8, 6},  {8, 9},
                                                 {9, 0}, {10, 0}, {10, 3}, {12, 0}};

struct Refusal {
  Status status{};
  std::string text;
};

// The message that `call` throws; empty if it throws nothing.
Refusal refusal(const std::function<void()>& call) {
  try {
    call();
    return {};
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
}

void expect_part(const Refusal& refused, Status status, const std::string& part) {
  EXPECT_EQ(refused.status, status) << refused.text;
  EXPECT_NE(refused.text.find(part), std::string::npos) << refused.text << "\nlacks: " << part;
}

TEST(Capability, OfTheOtherKernelsIsAtLeast80) {
  for (const auto& [major, minor] : kCapabilities) {
    const Refusal refused = refusal([&] { require_any_kernel(gpu(major, minor)); });
    if (major >= 8)
      EXPECT_EQ(refused.text, "") << major << "." << minor;
    else
      expect_part(refused, Status::kUnsupported,
                  "Some GPU has compute capability " + gpu(major, minor).capability() +
                      ", expected 8.0 or newer");
  }
}

TEST(Capability, OfNoDeviceSaysWhatToDo) {
  const auto why = why_no_device;
  EXPECT_EQ(
      why(cudaErrorInsufficientDriver, 0),
      "no CUDA device found: no NVIDIA driver is installed; install one or use the CPU backend");
  const std::string old = why(cudaErrorInsufficientDriver, 11080);
  EXPECT_EQ(old.find("the NVIDIA driver supports CUDA 11.8, this build requires CUDA "), 0u) << old;
  const std::string needed = CUDART_VERSION >= 13000 ? "CUDA 13 (driver 580 or newer); update the "
                                                     : "CUDA 12 (driver 525 or newer); update the ";
  EXPECT_NE(old.find(needed), std::string::npos) << old;
  for (cudaError_t found : {cudaErrorNoDevice, cudaSuccess})
    EXPECT_EQ(why(found, 13000), "no CUDA device found: no NVIDIA GPU; use the CPU backend");
  const std::string other = why(cudaErrorSystemNotReady, 13000);
  EXPECT_NE(other.find("cudaErrorSystemNotReady"), std::string::npos) << other;
  EXPECT_NE(other.find("use the CPU backend"), std::string::npos) << other;
}

TEST(Capability, OfABuildIsWhatItHasCodeFor) {
  struct {
    const char* archs;
    std::vector<std::pair<int, int>> run;
  } const builds[] = {
      {"", {}},
      {"80", {{8, 0}, {8, 6}, {8, 9}, {9, 0}, {10, 0}, {10, 3}, {12, 0}}},
      {"90a", {{9, 0}}},
      {"90", {{9, 0}}},
      {"100", {{10, 0}, {10, 3}}},
      {"100f", {{10, 0}, {10, 3}}},
      {"120", {{12, 0}}},
      {"90a,100", {{9, 0}, {10, 0}, {10, 3}}},
      {"100,120,90", {{9, 0}, {10, 0}, {10, 3}, {12, 0}}},
  };
  for (const auto& build : builds)
    for (const auto& [major, minor] : kCapabilities) {
      const DeviceInfo device = gpu(major, minor);
      SCOPED_TRACE(std::string(build.archs) + " on " + device.capability());
      const bool runs =
          std::find(build.run.begin(), build.run.end(), std::pair(major, minor)) != build.run.end();
      EXPECT_EQ(has_code(build.archs, device), runs);
      const Refusal refused = refusal([&] { require_code(build.archs, device); });
      EXPECT_EQ(refused.text.empty(), runs);
      if (!runs)
        expect_part(refused, Status::kUnsupported,
                    std::string("this build has code for ") + build.archs);
    }
}

// An arch that the device would run, but that was compiled for other devices.
TEST(Arch, NeedsCodeForTheDevice) {
  constexpr BuiltArch kBlackwell[] = {{ArchName::kSm80, "100,120"}, {ArchName::kSm90, "90a"}};
  EXPECT_EQ(choose_arch(gpu(10, 3), {}, kBlackwell), ArchName::kSm80);
  EXPECT_EQ(choose_arch(gpu(9, 0), {}, kBlackwell), ArchName::kSm90);
  expect_part(refusal([&] {
                choose_arch(gpu(9, 0), {"sm80", "TILEMOE_ARCH"}, kBlackwell);
              }),
              Status::kUnsupported,
              "the arch sm80, set by TILEMOE_ARCH, has no code for it in this build, which has "
              "sm90 for 90a and sm80 for 100,120");
  expect_part(refusal([&] { choose_arch(gpu(8, 6), {}, kBlackwell); }), Status::kUnsupported,
              "for which this build has no arch");
  constexpr BuiltArch kOnHopper[] = {{ArchName::kSm80, "100,90"}, {ArchName::kSm90, "90a"}};
  EXPECT_EQ(choose_arch(gpu(9, 0), {"sm80", "TILEMOE_ARCH"}, kOnHopper), ArchName::kSm80);
}

TEST(Arch, IsTheNewestThatTheDeviceRuns) {
  for (const auto& [major, minor] : kCapabilities) {
    const DeviceInfo device = gpu(major, minor);
    SCOPED_TRACE(device.capability());
    if (major < 8) {
      expect_part(refusal([&] { choose_arch(device, {}, kBoth); }), Status::kUnsupported,
                  "Some GPU has compute capability 7.5, for which this build has no arch");
      continue;
    }
    const bool hopper = major == 9;
    EXPECT_EQ(choose_arch(device, {}, kBoth), hopper ? ArchName::kSm90 : ArchName::kSm80);
    EXPECT_EQ(describe_choice(device, {}, kBoth),
              std::string(hopper ? "sm90" : "sm80") + ", the newest for compute capability " +
                  device.capability() +
                  (major == 10 ? " without sm100, which this build lacks" : ""));
    EXPECT_EQ(choose_arch(device, {}, kOnlySm80), ArchName::kSm80);
  }
}

TEST(Arch, IsTheRequestedOne) {
  for (const auto& [major, minor] : kCapabilities) {
    const DeviceInfo device = gpu(major, minor);
    SCOPED_TRACE(device.capability());
    const ArchRequest sm80{"sm80", "TILEMOE_ARCH"}, sm90{"sm90", "the program"};
    if (major >= 8) {
      EXPECT_EQ(choose_arch(device, sm80, kBoth), ArchName::kSm80);
      EXPECT_EQ(describe_choice(device, sm80, kBoth), "sm80, set by TILEMOE_ARCH");
    } else {
      expect_part(refusal([&] { choose_arch(device, sm80, kBoth); }), Status::kUnsupported,
                  "has compute capability 7.5, the arch sm80, set by TILEMOE_ARCH, requires 8.0");
    }
    if (major == 9) {
      EXPECT_EQ(choose_arch(device, sm90, kBoth), ArchName::kSm90);
      EXPECT_EQ(describe_choice(device, sm90, kBoth), "sm90, set by the program");
    } else {
      expect_part(refusal([&] { choose_arch(device, sm90, kBoth); }), Status::kUnsupported,
                  "has compute capability " + device.capability() +
                      ", the arch sm90, set by the program, requires 9.0");
    }
  }
}

// On every device: no other arch replaces one that was selected.
TEST(Arch, ThatTheBuildLacksIsRefused) {
  for (const auto& [major, minor] : kCapabilities) {
    const DeviceInfo device = gpu(major, minor);
    SCOPED_TRACE(device.capability());
    const auto message_for = [&](const char* arch, std::span<const BuiltArch> built) {
      return refusal([&] { describe_choice(device, {arch, "TILEMOE_ARCH"}, built); });
    };
    expect_part(message_for("sm100", kBoth), Status::kUnsupported,
                "this build has no arch sm100, set by TILEMOE_ARCH; it has sm90 for "
                "90a and sm80 for 80");
    expect_part(message_for("sm80", kOnlySm90), Status::kUnsupported,
                "this build has no arch sm80");
    expect_part(message_for("sm90", kOnlySm80), Status::kUnsupported, "it has sm80 for 80");
    if (major == 9) continue;
    expect_part(refusal([&] { choose_arch(device, {}, kOnlySm90); }), Status::kUnsupported,
                "for which this build has no arch (it has sm90 for 90a)");
  }
}

constexpr BuiltArch kAll[] = {
    {ArchName::kSm80, "80,100f"}, {ArchName::kSm90, "90a"}, {ArchName::kSm100, "100f"}};

TEST(Arch, ThatWasNeverExecutedRunsOnlyIfSelected) {
  constexpr BuiltArch kOnlySm100[] = {{ArchName::kSm100, "100f"}};
  const ArchRequest automatic{"auto", "TILEMOE_ARCH"}, sm100{"sm100", "TILEMOE_ARCH"};
  for (const auto& [major, minor] : kCapabilities) {
    const DeviceInfo device = gpu(major, minor);
    SCOPED_TRACE(device.capability());
    expect_part(refusal([&] { choose_arch(device, {}, kOnlySm100); }), Status::kUnsupported,
                "for which this build has no arch (it has sm100 for 100f)");
    if (major == 10) {
      EXPECT_EQ(choose_arch(device, {}, kAll), ArchName::kSm80);
      EXPECT_EQ(choose_arch(device, automatic, kAll), ArchName::kSm80);
      EXPECT_EQ(describe_choice(device, {}, kAll),
                "sm80, the newest for compute capability " + device.capability() +
                    " without sm100, which was never executed on a GPU");
      EXPECT_EQ(choose_arch(device, sm100, kAll), ArchName::kSm100);
      EXPECT_EQ(describe_choice(device, sm100, kAll),
                "sm100, set by TILEMOE_ARCH, never executed on a GPU");
      continue;
    }
    if (major >= 8) {
      EXPECT_EQ(describe_choice(device, {}, kAll), describe_choice(device, {}, kBoth));
    }
    expect_part(refusal([&] { choose_arch(device, sm100, kAll); }), Status::kUnsupported,
                "has compute capability " + device.capability() +
                    ", the arch sm100, set by TILEMOE_ARCH, requires 10.0");
  }
  // Nor does its code for another device.
  constexpr BuiltArch kElsewhere[] = {{ArchName::kSm80, "80"}, {ArchName::kSm100, "120"}};
  EXPECT_EQ(choose_arch(gpu(10, 0), {}, kElsewhere), ArchName::kSm80);
  expect_part(refusal([&] { choose_arch(gpu(10, 0), sm100, kElsewhere); }), Status::kUnsupported,
              "has no code for it");
}

TEST(Arch, HasAName) {
  for (const auto& [major, minor] : kCapabilities)
    for (const char* name : {"sm70", "SM90", "sm_90", "90", "sm80,sm90", "sm80 ", "cpu"})
      expect_part(refusal([&] {
                    choose_arch(gpu(major, minor), {name, "TILEMOE_ARCH"}, kBoth);
                  }),
                  Status::kInvalidArgument,
                  "arch must be 'auto', 'sm80', 'sm90' or 'sm100', got '" + std::string(name) +
                      "', set by TILEMOE_ARCH");
}

// arch_environment_tests() sets the variables of this process.
TEST(Arch, OfTheEnvironmentIsReadOnceAndTheProgramWins) {
  const DeviceInfo hopper = gpu(9, 0), ampere = gpu(8, 0), blackwell = gpu(10, 0);
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value ? value : "");
  };
  const std::string arch = variable("TILEMOE_ARCH"), older = variable("TILEMOE_KIT");
  SCOPED_TRACE("TILEMOE_ARCH=" + arch + " TILEMOE_KIT=" + older);
  std::string reported;
  testing::internal::CaptureStderr();
  for (int call = 0; call < 2; ++call) {
    if (!older.empty() && !arch.empty() && older != arch) {
      const Refusal refused = refusal([&] { arch_of(hopper); });
      expect_part(refused, Status::kInvalidArgument, "TILEMOE_ARCH is " + arch);
      expect_part(refused, Status::kInvalidArgument, "TILEMOE_KIT, its older name, is " + older);
    } else if (arch == "nonsense") {
      expect_part(refusal([&] { arch_of(hopper); }), Status::kInvalidArgument, "'nonsense'");
    } else if (arch == "sm100") {
#ifdef TILEMOE_WITH_SM100
      EXPECT_EQ(arch_of(blackwell), ArchName::kSm100);
      reported =
          "tilemoe: warning: TILEMOE_ARCH=sm100 selects kernels that were never executed on "
          "a GPU\n";
#endif
      EXPECT_EQ(refusal([&] { arch_of(hopper); }).status, Status::kUnsupported);
    } else if (arch == "sm90" || older == "sm90") {
      EXPECT_EQ(describe_arch_of(hopper),
                std::string("sm90, set by ") + (arch.empty() ? "TILEMOE_KIT" : "TILEMOE_ARCH"));
      expect_part(refusal([&] { arch_of(ampere); }), Status::kUnsupported, "requires 9.0");
      if (arch.empty())
        reported = "tilemoe: warning: TILEMOE_KIT is the older name of TILEMOE_ARCH\n";
    } else {
      EXPECT_EQ(arch + older, "");
      EXPECT_EQ(describe_arch_of(hopper), "sm90, the newest for compute capability 9.0");
    }
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), reported);
  const Refusal before = refusal([&] { arch_of(hopper); });
  setenv("TILEMOE_ARCH", "sm70", 1);  // once read, it is not read again
  EXPECT_EQ(refusal([&] { arch_of(hopper); }).text, before.text);

  EXPECT_EQ(tilemoe_set_cuda_arch("auto"), TILEMOE_SUCCESS);
  EXPECT_EQ(describe_arch_of(hopper), "sm90, the newest for compute capability 9.0");
  EXPECT_EQ(refusal([&] { arch_of(blackwell); }).text.find("sm100"), std::string::npos);
  EXPECT_EQ(tilemoe_set_cuda_arch("sm90"), TILEMOE_SUCCESS);
  EXPECT_EQ(describe_arch_of(hopper), "sm90, set by the program");
#ifdef TILEMOE_WITH_SM100
  EXPECT_EQ(tilemoe_set_cuda_arch("sm100"), TILEMOE_SUCCESS);
  EXPECT_EQ(arch_of(blackwell), ArchName::kSm100);
  EXPECT_EQ(tilemoe_set_cuda_arch("sm90"), TILEMOE_SUCCESS);
#else
  EXPECT_EQ(tilemoe_set_cuda_arch("sm100"), TILEMOE_UNSUPPORTED);
#endif
  EXPECT_EQ(tilemoe_set_cuda_arch("nonsense"), TILEMOE_INVALID_ARGUMENT);
  EXPECT_EQ(describe_arch_of(hopper), "sm90, set by the program") << "a refusal changes nothing";
  EXPECT_EQ(tilemoe_set_cuda_arch(nullptr), TILEMOE_SUCCESS);
  EXPECT_EQ(arch_of(hopper), ArchName::kSm90);
}

}  // namespace
}  // namespace tilemoe::cuda
