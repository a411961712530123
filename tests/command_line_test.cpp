// The program as a user runs it: its output and its exit status.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "core/activation_kinds.h"

namespace {

using nlohmann::json;

constexpr int kDone = 0, kFailed = 1, kWrongUsage = 2;

struct Outcome {
  int status;
  std::string text;  // standard output and standard error
};

Outcome run_shell(const std::string& command) {
  Outcome outcome{.status = -1, .text = {}};
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return outcome;
  std::array<char, 4096> piece;
  while (const size_t size = fread(piece.data(), 1, piece.size(), pipe))
    outcome.text.append(piece.data(), size);
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

Outcome tilemoe(const std::string& arguments) {
  return run_shell("'" TILEMOE_PROGRAM "' " + arguments + " 2>&1");
}

// One clear sentence, and no crash.
void expect_error(const std::string& arguments, int status, const std::string& part) {
  const Outcome outcome = tilemoe(arguments);
  EXPECT_EQ(outcome.status, status) << outcome.text;
  EXPECT_EQ(outcome.text.rfind("tilemoe: error: ", 0), 0u) << outcome.text;
  EXPECT_NE(outcome.text.find(part), std::string::npos) << outcome.text;
  EXPECT_EQ(outcome.text.find("terminate"), std::string::npos) << outcome.text;
}

constexpr char kBuiltWithoutCuda[] = "TileMoE was built without CUDA";

bool has_cuda() {
  return tilemoe("info").text.find(kBuiltWithoutCuda) == std::string::npos;
}
// Why this machine, which has no GPU, has no CUDA device: the build or the machine.
std::string why_no_cuda() {
  return has_cuda() ? "use the CPU backend" : kBuiltWithoutCuda;
}

TEST(CommandLine, HelpNamesEverySubcommand) {
  const Outcome outcome = tilemoe("--help");
  EXPECT_EQ(outcome.status, kDone);
  for (const char* name :
       {"train", "generate", "plot", "check", "digest", "doctor", "help", "info"}) {
    EXPECT_NE(outcome.text.find(std::string("\n  ") + name), std::string::npos) << name;
    EXPECT_EQ(tilemoe(std::string(name) + " --help").status, kDone) << name;
  }
}

TEST(CommandLine, HelpIsACommandToo) {
  EXPECT_EQ(tilemoe("help").text, tilemoe("--help").text);
  EXPECT_EQ(tilemoe("help train").text, tilemoe("train --help").text);
  EXPECT_EQ(tilemoe("help help").status, kDone);
}

TEST(CommandLine, ExitStatusesAreExplainedOnce) {
  const auto explains = [](const std::string& arguments) {
    return tilemoe(arguments).text.find("Exit status") != std::string::npos;
  };
  EXPECT_TRUE(explains("--help"));
  for (const char* name : {"train", "check", "info"})
    EXPECT_FALSE(explains(std::string(name) + " --help")) << name;
}

TEST(CommandLine, VersionIsTheLibrarys) {
  for (const char* option : {"--version", "-v"}) {
    const Outcome outcome = tilemoe(option);
    EXPECT_EQ(outcome.status, kDone);
    EXPECT_EQ(outcome.text, "tilemoe " TILEMOE_PROGRAM_VERSION "\n");
  }
}

TEST(CommandLine, WrongUsageIsSaid) {
  expect_error("", kWrongUsage, "a command is required");
  expect_error("dance", kWrongUsage, "dance");
  expect_error("check --repeat many", kWrongUsage, "many");
  expect_error("check --repeat -1", kWrongUsage, "--repeat");
  expect_error("check --threads -1", kWrongUsage, "--threads");
  expect_error("check --dtype int8", kWrongUsage, "--dtype");
}

TEST(CommandLine, CudaSaysWhyItIsAbsent) {
  for (const char* command : {"check", "digest"})
    expect_error(std::string(command) + " --device cuda", kFailed, why_no_cuda());
}

TEST(Digest, IsOfEveryTensorAndOfTheSeed) {
  const auto digest = [](const std::string& more) {
    const Outcome outcome = tilemoe("digest calibration-relu/bfloat16 --device cpu " + more);
    EXPECT_EQ(outcome.status, kDone) << outcome.text;
    const json report = json::parse(outcome.text);
    EXPECT_EQ(report["cases"].size(), 1u);
    EXPECT_EQ(report["cases"][0]["case"], "calibration-relu/bfloat16");
    return report["cases"][0];
  };
  const json first = digest("");
  for (const char* name : {"H", "O", "dX", "ds", "dW1", "dW2", "db1", "db2"})
    EXPECT_EQ(first["tensors"][name].get<std::string>().size(), 16u) << name;
  EXPECT_EQ(digest(""), first);
  const json other = digest("--seed 2");
  EXPECT_NE(other["inputs"], first["inputs"]);
  EXPECT_NE(other["tensors"]["H"], first["tensors"]["H"]);
  const json forward = digest("--pass forward");
  EXPECT_EQ(forward["tensors"].size(), 2u);
  EXPECT_EQ(forward["tensors"]["O"], first["tensors"]["O"]);
  expect_error("digest no-such-case", kWrongUsage, "no case matches");
}

TEST(Check, WritesJson) {
  const std::string file = testing::TempDir() + "check.json";
  const Outcome outcome = tilemoe("check --case one-token/float32 --json '" + file + "'");
  ASSERT_EQ(outcome.status, kDone) << outcome.text;
  const json report = json::parse(run_shell("cat '" + file + "'").text);
  // As python/tilemoe/_command/check.py has them (tests/torch/command_test.py).
  for (const char* key : {"version", "device", "pass", "seed", "repeats", "cases", "rows",
                          "failures", "impossible", "spoilings", "refused"})
    EXPECT_TRUE(report.contains(key)) << key;
  EXPECT_EQ(report.size(), 11u);
  EXPECT_EQ(report.at("rows").size(), 16u);
  EXPECT_EQ(report.at("cases"), 1);
  expect_error("check one-token/float32 --json /nowhere/out.json", kFailed,
               "cannot write /nowhere");
}

TEST(Doctor, NeedsAGpuAndSaysWhatElseThereIs) {
  expect_error("doctor", kFailed, why_no_cuda());
  expect_error("doctor --arch sm80", kFailed,
               "; `tilemoe check --device cpu` compares the CPU's results");
  for (const char* device : {"cpu", "cuda:", "cuda:x", "cuda:-1", "cuda1", "cuda:1000"})
    expect_error(std::string("doctor --device ") + device, kWrongUsage, "expected cuda or cuda:N");
  expect_error("doctor --device cuda:1", kFailed, "");
  expect_error("doctor --arch sm70", kWrongUsage, "--arch");
  expect_error("doctor --json /nowhere/out.json", kFailed, "cannot write /nowhere");
}

TEST(Doctor, SaysWhatABuildWithoutCudaLacks) {
  if (has_cuda()) return;  // a build with it gives its own reasons: cuda/capability_test.cpp
  const std::string empty = "PATH=/nowhere '" TILEMOE_PROGRAM "' doctor 2>&1";
  const bool elsewhere = access("/usr/local/cuda/bin/nvcc", X_OK) == 0;
  const std::string missing = run_shell(empty).text;
  EXPECT_NE(missing.find("rebuild with TILEMOE_CUDA=ON"), std::string::npos) << missing;
  EXPECT_NE(missing.find(elsewhere ? "found: /usr/local/cuda/bin/nvcc" : "not found on PATH"),
            std::string::npos)
      << missing;
  EXPECT_NE(missing.find("an NVIDIA driver >= 580"), std::string::npos) << missing;

  const std::string folder = testing::TempDir() + "nvcc";
  const Outcome made = run_shell("mkdir -p '" + folder + "' && cp /bin/true '" + folder + "/nvcc'");
  ASSERT_EQ(made.status, 0) << made.text;
  const std::string found =
      run_shell("PATH='" + folder + "' '" TILEMOE_PROGRAM "' doctor 2>&1").text;
  EXPECT_NE(found.find("found: " + folder + "/nvcc"), std::string::npos) << found;
}

TEST(Check, OfAnArchNeedsAGpu) {
  const std::string why = why_no_cuda();
  expect_error("check --arch sm80", kFailed, why);
  expect_error("check --arch sm100 --against sm80 --reduced", kFailed, "--arch sm100: ");
  expect_error("check --arch sm100 --against sm80 --reduced", kFailed, why);
  expect_error("check --arch sm70", kWrongUsage, "--arch");
  expect_error("check --against sm80", kWrongUsage, "--against requires --arch");
  expect_error("check --arch sm80 --against sm80", kWrongUsage,
               "--against must differ from --arch");
  expect_error("check --arch sm80 --device cpu", kWrongUsage,
               "--arch requires a GPU, got --device cpu");
  expect_error("check --arch sm90 --against sm80 no-such-case", kWrongUsage, "no case matches");
  expect_error("check --arch sm90 --against sm80 --limit 0", kWrongUsage, "--limit");
  expect_error("check --arch sm90 --kit sm80", kWrongUsage, "--arch sm90 and --kit sm80");
  const Outcome older = tilemoe("check --kit sm90");
  EXPECT_EQ(older.status, kFailed);
  EXPECT_EQ(older.text.rfind("tilemoe: warning: --kit is the older name of --arch\n", 0), 0u)
      << older.text;
  EXPECT_EQ(tilemoe("check --list one-token/bfloat16 --arch sm90 --against sm80").status, kDone);
}

TEST(Info, JsonSaysWhatIsSupported) {
  const Outcome outcome = tilemoe("info --json");
  ASSERT_EQ(outcome.status, kDone);
  const json info = json::parse(outcome.text);
  for (const char* key : {"version", "commit", "build_type", "compiler", "devices", "limits"})
    EXPECT_TRUE(info.contains(key)) << key;
  const json& cpu = info.at("backends").at(0);
  EXPECT_EQ(cpu.at("name"), "cpu");
  EXPECT_TRUE(cpu.at("available").get<bool>());
  const json& supports = cpu.at("supports");
  EXPECT_EQ(supports.at("dtypes"), json({"float32", "bfloat16", "float16"}));
  EXPECT_EQ(supports.at("activations").size(), tilemoe::kActivations.size());
  EXPECT_EQ(supports.at("gate_layouts"), json({"concatenated", "interleaved", "split"}));
  EXPECT_EQ(supports.at("routings").size(), 8u);
  const json& cuda = info.at("backends").at(1);
  EXPECT_FALSE(cuda.at("available").get<bool>());
  EXPECT_NE(cuda.at("reason").get<std::string>().find(why_no_cuda()), std::string::npos);
}

TEST(Check, JudgesTheCasesThatMatch) {
  const Outcome outcome = tilemoe("check 'one-tok*' --dtype bfloat16");
  EXPECT_EQ(outcome.status, kDone) << outcome.text;
  EXPECT_NE(outcome.text.find("one-token/bfloat16"), std::string::npos) << outcome.text;
  EXPECT_NE(outcome.text.find("1 cases"), std::string::npos) << outcome.text;
  EXPECT_EQ(outcome.text.find("float32"), std::string::npos) << outcome.text;
  expect_error("check no-such-case", kWrongUsage,
               "no case matches no-such-case; `tilemoe check --list`");
  // One of several patterns, which must not be ignored silently.
  expect_error("check one-token/bfloat16 no-such-case", kWrongUsage,
               "no case matches no-such-case");
  expect_error("check one-token/float32 --dtype bfloat16", kWrongUsage,
               "no case matches one-token/float32");
}

TEST(Check, ListsWithoutRunning) {
  const Outcome outcome = tilemoe("check --list 'rounded-*'");
  EXPECT_EQ(outcome.status, kDone);
  EXPECT_NE(outcome.text.find("rounded-balanced/float16"), std::string::npos);
  EXPECT_EQ(outcome.text.find("swiglu"), std::string::npos);
  EXPECT_EQ(outcome.text.find("ok"), std::string::npos);
}

TEST(Bench, NamesWhatReplacesIt) {
  for (const char* arguments : {"bench", "bench --config cpu-t512", "bench --help"}) {
    expect_error(arguments, kWrongUsage, "`python -m tilemoe bench`");
    expect_error(arguments, kWrongUsage, "`tilemoe_kernels`");
  }
}

}  // namespace
