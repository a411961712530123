// tilemoe_simulate as a user runs it: a seed replays exactly, the bits of settings are compared,
// and the drawing shows the pipeline as it ran.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace tilemoe::simulator_test {
namespace {

struct Ended {
  int status;
  std::string output;
  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    std::istringstream stream(output);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
  }
};
Ended simulate(const std::string& options) {
  FILE* const pipe = popen((TILEMOE_SIMULATE " " + options + " 2>&1").c_str(), "r");
  Ended ended{-1, {}};
  std::array<char, 4096> bytes;
  while (const size_t count = fread(bytes.data(), 1, bytes.size(), pipe))
    ended.output.append(bytes.data(), count);
  const int status = pclose(pipe);
  ended.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ended;
}

// "trace 93c715f1e8c83741" of each line that has one.
std::vector<std::string> traces(const Ended& ended) {
  std::vector<std::string> found;
  for (const std::string& line : ended.lines())
    if (const size_t at = line.find("trace "); at != std::string::npos)
      found.push_back(line.substr(at + 6, 16));
  return found;
}

TEST(Simulate, ReplaysASeedAcrossBlocks) {
  // Several blocks, clusters and launches with PDL.
  const std::string options = "every-expert/bfloat16 --device sm90 --seeds 2";
  const Ended once = simulate(options), again = simulate(options + " --jobs 2");
  ASSERT_EQ(once.status, 0) << once.output;
  ASSERT_EQ(traces(once).size(), 2u) << once.output;
  EXPECT_EQ(traces(once), traces(again));
  EXPECT_NE(traces(once)[0], traces(once)[1]) << "seeds make a difference";
  // A seed alone gives what it gave after other seeds.
  const Ended second = simulate("every-expert/bfloat16 --device sm90 --seed 2");
  ASSERT_EQ(traces(second).size(), 1u) << second.output;
  EXPECT_EQ(traces(second)[0], traces(once)[1]);
}

TEST(Simulate, ReplaysASeedOfAnOrderedSchedule) {
  for (const std::string schedule : {"by-rank", "in-step"}) {
    const std::string options = "smallest/bfloat16 --device sm90 --seeds 2 --schedule " + schedule;
    const Ended once = simulate(options), again = simulate(options + " --jobs 2");
    ASSERT_EQ(once.status, 0) << once.output;
    ASSERT_EQ(traces(once).size(), 2u) << once.output;
    EXPECT_EQ(traces(once), traces(again));
    EXPECT_NE(traces(once), traces(simulate("smallest/bfloat16 --device sm90 --seeds 2")));
  }
}

TEST(Simulate, ComparesTheBitsOfArchs) {
  const std::string file = testing::TempDir() + "/simulate_test.json";
  const Ended ended =
      simulate("biases/float16 --device sm90,sm80-on-90,sm80 --jobs 2 --json " + file);
  ASSERT_EQ(ended.status, 0) << ended.output;
  const nlohmann::json report = nlohmann::json::parse(std::ifstream(file));
  std::filesystem::remove(file);
  EXPECT_EQ(report.at("device"), "CPU");
  ASSERT_EQ(report.at("items").size(), 3u);
  const auto bits = [&](size_t i) { return report.at("items")[i].at("bits").get<std::string>(); };
  for (const nlohmann::json& item : report.at("items")) {
    EXPECT_EQ(item.at("case"), "biases/float16");
    EXPECT_EQ(item.at("seeds_done"), 1);
    EXPECT_EQ(item.at("seeds_wrong"), 0);
    EXPECT_EQ(item.at("seeds_with_findings"), 0);
  }
  EXPECT_EQ(bits(0), bits(1));
  EXPECT_NE(bits(0), bits(2)) << "an A100's tensor cores keep fewer bits than an H100's";
}

// What follows the label of a line.
std::string drawn(const std::vector<std::string>& lines, size_t at) {
  constexpr size_t kLabel = 34;
  return at < lines.size() && lines[at].size() > kLabel ? lines[at].substr(kLabel) : "";
}

TEST(Simulate, DrawsThePipelineAsItRan) {
  const Ended ended = simulate("smallest/bfloat16 --device sm90 --trace --columns 200");
  ASSERT_EQ(ended.status, 0) << ended.output;
  const std::vector<std::string> lines = ended.lines();
  // The down-projection, which stores by TMA.
  size_t launch = 0;
  for (int gemms = 0; launch < lines.size(); ++launch)
    if (lines[launch].find("sm90::grouped_gemm") != std::string::npos && ++gemms == 2) break;
  ASSERT_LT(launch + 2, lines.size()) << ended.output;
  EXPECT_NE(lines[launch + 1].find(" block 0"), std::string::npos) << lines[launch + 1];

  // One tile: a stage is loaded, full, and free again, in this order.
  const std::string stage = drawn(lines, launch + 2);
  ASSERT_EQ(lines[launch + 2].substr(0, 9), "  stage 0") << lines[launch + 2];
  const size_t loading = stage.find('~'), full = stage.find('='), free = stage.find(' ', full);
  ASSERT_NE(full, std::string::npos) << stage;
  ASSERT_NE(free, std::string::npos) << stage;
  EXPECT_LT(loading, full);
  EXPECT_LT(full, free);

  size_t loads = std::string::npos, multiplies = std::string::npos;
  bool stores = false, waits = false;
  for (size_t i = launch + 2; i < lines.size() && lines[i].substr(0, 2) == "  "; ++i) {
    const std::string warp = drawn(lines, i);
    if (lines[i].find("loads") != std::string::npos) loads = std::min(loads, warp.find('L'));
    if (lines[i].find("multiplies") == std::string::npos) continue;
    multiplies = std::min(multiplies, warp.find('#'));
    waits = waits || warp.find('.') < warp.find('#');
    if (lines[i].find("stores") != std::string::npos)
      stores = stores || warp.rfind('S') > warp.rfind('#');
  }
  ASSERT_NE(loads, std::string::npos) << ended.output;
  EXPECT_LT(loads, full) << "a stage is full when everything that was requested has landed";
  EXPECT_GE(multiplies, full) << "nothing is multiplied before the stage is full";
  EXPECT_LE(multiplies, free);
  EXPECT_TRUE(waits);
  EXPECT_TRUE(stores);
}

TEST(Simulate, LeavesOutWhatIsExcepted) {
  const Ended all = simulate("--list wide*/bfloat16"),
              some = simulate("--list wide*/bfloat16 --except wide/*");
  EXPECT_EQ(all.output, "wide/bfloat16\n" + some.output);
  EXPECT_NE(some.output, "");
  EXPECT_EQ(simulate("--list --except no-such-case").status, 2);
}

TEST(Simulate, RefusesWhatItDoesNotKnow) {
  const Ended wrong = simulate("smallest/bfloat16 no-such-case");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_EQ(wrong.output,
            "no case matches no-such-case; `tilemoe_simulate --list` names them all\n");
  EXPECT_NE(simulate("smallest/bfloat16 --device sm70").status, 0);
  EXPECT_NE(simulate("smallest/bfloat16 --schedule none").status, 0);
}

}  // namespace
}  // namespace tilemoe::simulator_test
