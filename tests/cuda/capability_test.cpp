// What GPUs of each compute capability are asked to run, by which kit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "cuda/core/device_code.h"
#include "cuda/device_verdict.h"
#include "cuda/kit_choice.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {
namespace {

constexpr BuiltKit kBoth[] = {{KitName::kSm80, "80"}, {KitName::kSm90, "90a"}};
constexpr BuiltKit kOnlySm90[] = {{KitName::kSm90, "90a"}};
constexpr BuiltKit kOnlySm80[] = {{KitName::kSm80, "80"}};

DeviceInfo gpu(int major, int minor) {
  return {.index = 0,
          .multiprocessors = 108,
          .major = major,
          .minor = minor,
          .l2_bytes = 40 << 20,
          .shared_bytes = 163 * 1024,
          .name = "Some GPU"};
}

constexpr std::pair<int, int> kCapabilities[] = {{7, 5}, {8, 0},  {8, 6},  {8, 9},
                                                 {9, 0}, {10, 0}, {10, 3}, {12, 0}};

struct Refusal {
  Status status{};
  std::string text;
};

// What `call` throws; empty where it throws nothing.
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

TEST(Capability, OfTheRowwiseKernelsIsAtLeast80) {
  for (const auto& [major, minor] : kCapabilities) {
    const Refusal refused = refusal([&] { require_any_kernel(gpu(major, minor)); });
    if (major >= 8)
      EXPECT_EQ(refused.text, "") << major << "." << minor;
    else
      expect_part(refused, Status::kUnsupported,
                  "Some GPU has compute capability " + gpu(major, minor).capability() +
                      ", the CUDA backend needs 8.0 or newer");
  }
}

TEST(Capability, OfNoDeviceSaysWhatToDo) {
  const auto why = why_no_device;
  EXPECT_EQ(why(cudaErrorInsufficientDriver, 0),
            "no CUDA device here, since no NVIDIA driver is installed: install one, or use the CPU "
            "backend");
  const std::string old = why(cudaErrorInsufficientDriver, 11080);
  EXPECT_EQ(old.find("the NVIDIA driver here supports CUDA 11.8, and this build needs CUDA "), 0u)
      << old;
  const std::string needed = CUDART_VERSION >= 13000 ? "CUDA 13 (driver 580 or newer): update the "
                                                     : "CUDA 12 (driver 525 or newer): update the ";
  EXPECT_NE(old.find(needed), std::string::npos) << old;
  for (cudaError_t found : {cudaErrorNoDevice, cudaSuccess})
    EXPECT_EQ(why(found, 13000),
              "no CUDA device here: no NVIDIA GPU is to be seen; use the CPU backend");
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

// A kit that the device would run, and that was compiled for others.
TEST(Kit, NeedsCodeForTheDevice) {
  constexpr BuiltKit kBlackwell[] = {{KitName::kSm80, "100,120"}, {KitName::kSm90, "90a"}};
  EXPECT_EQ(choose_kit(gpu(10, 3), {}, kBlackwell), KitName::kSm80);
  EXPECT_EQ(choose_kit(gpu(9, 0), {}, kBlackwell), KitName::kSm90);
  expect_part(refusal([&] {
                choose_kit(gpu(9, 0), {"sm80", "TILEMOE_KIT"}, kBlackwell);
              }),
              Status::kUnsupported,
              "the sm80 kit, asked for by TILEMOE_KIT, has no code for it in this build, which has "
              "sm90 for 90a and sm80 for 100,120");
  expect_part(refusal([&] { choose_kit(gpu(8, 6), {}, kBlackwell); }), Status::kUnsupported,
              "for which this build has no kit");
  constexpr BuiltKit kOnHopper[] = {{KitName::kSm80, "100,90"}, {KitName::kSm90, "90a"}};
  EXPECT_EQ(choose_kit(gpu(9, 0), {"sm80", "TILEMOE_KIT"}, kOnHopper), KitName::kSm80);
}

TEST(Kit, IsTheNewestThatTheDeviceRuns) {
  for (const auto& [major, minor] : kCapabilities) {
    const DeviceInfo device = gpu(major, minor);
    SCOPED_TRACE(device.capability());
    if (major < 8) {
      expect_part(refusal([&] { choose_kit(device, {}, kBoth); }), Status::kUnsupported,
                  "Some GPU has compute capability 7.5, for which this build has no kit");
      continue;
    }
    const bool hopper = major == 9;
    EXPECT_EQ(choose_kit(device, {}, kBoth), hopper ? KitName::kSm90 : KitName::kSm80);
    EXPECT_EQ(describe_choice(device, {}, kBoth),
              std::string(hopper ? "sm90" : "sm80") + ", the newest for compute capability " +
                  device.capability() +
                  (major == 10 ? " in this build, which has no sm100 kit" : ""));
    EXPECT_EQ(choose_kit(device, {}, kOnlySm80), KitName::kSm80);
  }
}

TEST(Kit, IsTheOneAskedFor) {
  for (const auto& [major, minor] : kCapabilities) {
    const DeviceInfo device = gpu(major, minor);
    SCOPED_TRACE(device.capability());
    const KitRequest sm80{"sm80", "TILEMOE_KIT"}, sm90{"sm90", "the program"};
    if (major >= 8) {
      EXPECT_EQ(choose_kit(device, sm80, kBoth), KitName::kSm80);
      EXPECT_EQ(describe_choice(device, sm80, kBoth), "sm80, asked for by TILEMOE_KIT");
    } else {
      expect_part(refusal([&] { choose_kit(device, sm80, kBoth); }), Status::kUnsupported,
                  "has compute capability 7.5, the sm80 kit, asked for by TILEMOE_KIT, needs 8.0");
    }
    if (major == 9) {
      EXPECT_EQ(choose_kit(device, sm90, kBoth), KitName::kSm90);
      EXPECT_EQ(describe_choice(device, sm90, kBoth), "sm90, asked for by the program");
    } else {
      expect_part(refusal([&] { choose_kit(device, sm90, kBoth); }), Status::kUnsupported,
                  "has compute capability " + device.capability() +
                      ", the sm90 kit, asked for by the program, needs 9.0");
    }
  }
}

// On every device: no other kit takes the place of one that was asked for.
TEST(Kit, ThatTheBuildLacksIsRefused) {
  for (const auto& [major, minor] : kCapabilities) {
    const DeviceInfo device = gpu(major, minor);
    SCOPED_TRACE(device.capability());
    const auto ask = [&](const char* kit, std::span<const BuiltKit> built) {
      return refusal([&] { describe_choice(device, {kit, "TILEMOE_KIT"}, built); });
    };
    expect_part(ask("sm100", kBoth), Status::kUnsupported,
                "this build has no sm100 kit, asked for by TILEMOE_KIT: it has sm90 for "
                "90a and sm80 for 80");
    expect_part(ask("sm80", kOnlySm90), Status::kUnsupported, "this build has no sm80 kit");
    expect_part(ask("sm90", kOnlySm80), Status::kUnsupported, "it has sm80 for 80");
    if (major == 9) continue;
    expect_part(
        refusal([&] { choose_kit(device, {}, kOnlySm90); }), Status::kUnsupported,
        "for which this build has no kit of the layer's grouped GEMMs (it has sm90 for 90a)");
  }
}

FoundVerdict found(Outcome outcome, const std::string& what) {
  Verdict verdict{.key = {.library = "0.2.0", .driver = "580.95.05", .gpu = "B200", .kit = "sm100"},
                  .outcome = outcome,
                  .date = "2026-11-23",
                  .what = what};
  return {.verdict = verdict, .why_none = {}};
}

constexpr BuiltKit kAll[] = {
    {KitName::kSm80, "80,100f"}, {KitName::kSm90, "90a"}, {KitName::kSm100, "100f"}};

TEST(Kit, ThatNobodyRanAwaitsItsVerdict) {
  const FoundVerdict agreed = found(Outcome::kAgreed, "agreed with sm80 in 40 cases");
  for (const int minor : {0, 3}) {
    const DeviceInfo blackwell = gpu(10, minor);
    EXPECT_EQ(choose_kit(blackwell, {}, kAll), KitName::kSm80);
    EXPECT_EQ(describe_choice(blackwell, {}, kAll),
              "sm80, since `tilemoe doctor --blackwell` has not run");
    EXPECT_EQ(choose_kit(blackwell, {}, kAll, agreed), KitName::kSm100);
    EXPECT_EQ(describe_choice(blackwell, {}, kAll, agreed),
              "sm100, which agreed with sm80 in 40 cases, on 2026-11-23 with driver 580.95.05");
    for (Outcome bad : {Outcome::kDisagreed, Outcome::kHung, Outcome::kCrashed, Outcome::kError}) {
      EXPECT_EQ(choose_kit(blackwell, {}, kAll, found(bad, "")), KitName::kSm80);
      EXPECT_EQ(describe_choice(blackwell, {}, kAll, found(bad, "hung after 600 s")),
                "sm80, since sm100 hung after 600 s, on 2026-11-23 with driver 580.95.05");
    }
  }
}

TEST(Kit, NeedsNoVerdictWhereItIsAskedFor) {
  const FoundVerdict hung = found(Outcome::kHung, "hung");
  const FoundVerdict agreed = found(Outcome::kAgreed, "agreed with sm80");
  const KitRequest sm100{"sm100", "TILEMOE_KIT"}, sm80{"sm80", "TILEMOE_KIT"};
  EXPECT_EQ(choose_kit(gpu(10, 0), sm100, kAll, hung), KitName::kSm100);
  EXPECT_EQ(describe_choice(gpu(10, 0), sm100, kAll, hung), "sm100, asked for by TILEMOE_KIT");
  EXPECT_EQ(choose_kit(gpu(10, 0), sm80, kAll, agreed), KitName::kSm80);
}

// Nor is it taken for want of another.
TEST(Kit, WithoutAVerdictIsNoneWhereThereIsNoOther) {
  constexpr BuiltKit kOnlySm100[] = {{KitName::kSm100, "100f"}};
  for (const auto& [major, minor] : kCapabilities)
    expect_part(refusal([&] { choose_kit(gpu(major, minor), {}, kOnlySm100); }),
                Status::kUnsupported,
                "for which this build has no kit of the layer's grouped GEMMs");
}

TEST(Kit, WithAVerdictIsNotForOtherGpus) {
  const FoundVerdict agreed = found(Outcome::kAgreed, "agreed with sm80");
  for (const auto& [major, minor] : kCapabilities) {
    if (major < 8 || major == 10) continue;
    const DeviceInfo device = gpu(major, minor);
    EXPECT_EQ(describe_choice(device, {}, kAll, agreed), describe_choice(device, {}, kBoth));
    expect_part(refusal([&] {
                  choose_kit(device, {"sm100", "TILEMOE_KIT"}, kAll, agreed);
                }),
                Status::kUnsupported,
                "has compute capability " + device.capability() +
                    ", the sm100 kit, asked for by TILEMOE_KIT, needs 10.0");
  }
  // Nor where the build lacks it, or its code for the device.
  constexpr BuiltKit kElsewhere[] = {{KitName::kSm80, "80"}, {KitName::kSm100, "120"}};
  EXPECT_EQ(choose_kit(gpu(10, 0), {}, kBoth, agreed), KitName::kSm80);
  EXPECT_EQ(choose_kit(gpu(10, 0), {}, kElsewhere, agreed), KitName::kSm80);
}

// Of a device that no other test asks about, in a folder of its own.
TEST(Verdict, IsReadOnceADevice) {
  std::string folder = testing::TempDir() + "verdict-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  setenv("TILEMOE_STATE_DIR", folder.c_str(), 1);
  DeviceInfo first = gpu(10, 0), second = gpu(10, 0), other = gpu(10, 3);
  first.index = 40, second.index = 41, other.index = 42;
  const VerdictKey key = verdict_key(first, "sm100");
  EXPECT_EQ(verdict_key(second, "sm100"), key) << "two of a kind share a verdict";
  EXPECT_NE(verdict_key(other, "sm100"), key);
  setenv("TILEMOE_PAIRS", "1", 1);
  EXPECT_EQ(verdict_key(first, "sm100").kit, "sm100-pairs");
  EXPECT_EQ(verdict_key(first, "sm90").kit, "sm90");
  unsetenv("TILEMOE_PAIRS");
  EXPECT_TRUE(key.library.starts_with(std::string(tilemoe_version()) + ", sources "))
      << key.library;
  EXPECT_FALSE(verdict_of(first).verdict);
  std::ofstream(verdict_file(folder, key))
      << text_of({.key = key, .outcome = Outcome::kAgreed, .date = "2026-11-23", .what = "agreed"});
  EXPECT_FALSE(verdict_of(first).verdict) << "what was found once holds for the process";
  EXPECT_TRUE(verdict_of(second).agreed());
  EXPECT_FALSE(verdict_of(other).verdict);
  std::filesystem::remove_all(folder);
  EXPECT_TRUE(verdict_of(second).agreed());
}

TEST(Kit, HasAName) {
  for (const auto& [major, minor] : kCapabilities)
    for (const char* name : {"sm70", "SM90", "sm_90", "90", "sm80,sm90", "sm80 ", "cpu"})
      expect_part(refusal([&] {
                    choose_kit(gpu(major, minor), {name, "TILEMOE_KIT"}, kBoth);
                  }),
                  Status::kInvalidArgument,
                  "the kit '" + std::string(name) +
                      "', asked for by TILEMOE_KIT, is not known: expected auto, sm80, sm90 or "
                      "sm100");
}

// TILEMOE_KIT of this process is what tests/CMakeLists.txt sets it to.
TEST(Kit, OfTheEnvironmentIsReadAtTheCallAndTheProgramWins) {
  const DeviceInfo hopper = gpu(9, 0), ampere = gpu(8, 0);
  const std::string environment = std::getenv("TILEMOE_KIT") ? std::getenv("TILEMOE_KIT") : "";
  if (environment == "sm90") {
    EXPECT_EQ(describe_kit_of(hopper), "sm90, asked for by TILEMOE_KIT");
    expect_part(refusal([&] { kit_of(ampere); }), Status::kUnsupported, "needs 9.0");
  } else if (environment == "nonsense") {
    expect_part(refusal([&] { kit_of(hopper); }), Status::kInvalidArgument, "'nonsense'");
  } else {
    EXPECT_EQ(environment, "");
    EXPECT_EQ(describe_kit_of(hopper), "sm90, the newest for compute capability 9.0");
  }
  setenv("TILEMOE_KIT", "sm100", 1);  // once read, it is not read again
  EXPECT_EQ(refusal([&] { kit_of(hopper); }).text.find("sm100 kit"), std::string::npos);

  EXPECT_EQ(tilemoe_set_cuda_kit("auto"), TILEMOE_SUCCESS);
  EXPECT_EQ(describe_kit_of(hopper), "sm90, the newest for compute capability 9.0");
  EXPECT_EQ(tilemoe_set_cuda_kit("sm90"), TILEMOE_SUCCESS);
  EXPECT_EQ(describe_kit_of(hopper), "sm90, asked for by the program");
#ifndef TILEMOE_WITH_SM100
  EXPECT_EQ(tilemoe_set_cuda_kit("sm100"), TILEMOE_UNSUPPORTED);
#endif
  EXPECT_EQ(tilemoe_set_cuda_kit("nonsense"), TILEMOE_INVALID_ARGUMENT);
  EXPECT_EQ(describe_kit_of(hopper), "sm90, asked for by the program")
      << "a refusal changes nothing";
  EXPECT_EQ(tilemoe_set_cuda_kit(nullptr), TILEMOE_SUCCESS);
  EXPECT_EQ(kit_of(hopper), KitName::kSm90);
}

}  // namespace
}  // namespace tilemoe::cuda
