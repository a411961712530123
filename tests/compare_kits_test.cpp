// What `tilemoe doctor --compare` does, with kits that are made up: the CPU backend computes, and the
// memory between spoils what one of them computed.
#include "compare_kits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "verify/registry.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;

// The host's, less one bit of what is read back while `spoils` says so.
class SpoilingMemory final : public verify::Memory {
 public:
  Device device() const override { return host_.device(); }
  void* allocate(size_t bytes) override { return host_.allocate(bytes); }
  void release(void* memory) override { host_.release(memory); }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    host_.copy_in(to, from_host, bytes);
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    host_.copy_out(to_host, from, bytes);
    if (bytes > 0 && spoils()) static_cast<unsigned char*>(to_host)[bytes / 2] ^= 1;
  }
  std::unique_ptr<verify::OtherWork> do_other_work() override { return host_.do_other_work(); }

  std::function<bool()> spoils = [] { return false; };

 private:
  verify::Memory& host_ = verify::host_memory();
};

class ComparedKits : public testing::Test {
 protected:
  std::vector<json> compare(int64_t repeats = 3) {
    std::vector<json> events;
    compare_kits({.kit = "sm100",
                  .reference = "sm80",
                  .cases = {*verify::find_case("one-token/bfloat16"),
                            *verify::find_case("every-expert/float16")},
                  .repeats = repeats,
                  .memory = memory_,
                  .use_kit =
                      [&](const std::string& kit) {
                        kit_ = kit;
                        on_kit_();
                      },
                  .tell = [&](const json& event) { events.push_back(event); }});
    return events;
  }
  static std::vector<std::string> told(const std::vector<json>& events, const char* what) {
    std::vector<std::string> texts;
    for (const json& event : events)
      if (event.contains(what)) texts.push_back(event.at(what).get<std::string>());
    return texts;
  }

  SpoilingMemory memory_;
  std::string kit_;
  std::function<void()> on_kit_ = [] {};
};

TEST_F(ComparedKits, Agree) {
  const std::vector<json> events = compare();
  EXPECT_EQ(
      told(events, "step"),
      (std::vector<std::string>{
          "one-token/bfloat16 by sm80, against float64",
          "one-token/bfloat16 by sm100, against float64",
          "one-token/bfloat16 by sm80 and sm100, bit for bit",
          "every-expert/float16 by sm80, against float64",
          "every-expert/float16 by sm100, against float64",
          "every-expert/float16 by sm80 and sm100, bit for bit",
          "one-token/bfloat16 by sm80, 3 times", "one-token/bfloat16 by sm100, 3 times",
          "every-expert/float16 by sm80, 3 times", "every-expert/float16 by sm100, 3 times"}));
  EXPECT_EQ(told(events, "disagreed"), std::vector<std::string>());
  EXPECT_EQ(events.front().at("done"), 0.0);
  EXPECT_EQ(events.at(9).at("done"), 0.9);
  const json& finished = events.back().at("finished");
  EXPECT_EQ(finished.at("cases"), 2);
  EXPECT_GE(finished.at("tensors").get<int>(), 2 * 2 * 5);
  EXPECT_EQ(finished.at("repeats"), 3);
}

// One bit is within every bound of float64; the other kit has it otherwise.
TEST_F(ComparedKits, DisagreeInOneBit) {
  memory_.spoils = [&] { return kit_ == "sm100"; };
  const std::vector<json> events = compare();
  const std::vector<std::string> disagreed = told(events, "disagreed");
  const auto says = [&](const std::string& part) {
    return std::any_of(disagreed.begin(), disagreed.end(), [&](const std::string& line) {
      return line.find(part) != std::string::npos;
    });
  };
  EXPECT_TRUE(says("one-token/bfloat16, O: other bits than sm80's"));
  EXPECT_TRUE(says("every-expert/float16, dX: other bits than sm80's"));
  EXPECT_FALSE(says("sm80, one-"));
  EXPECT_TRUE(says("sm100, one-token/bfloat16 (integers)")) << "which are exact";
  EXPECT_EQ(events.back().at("finished").at("repeats"), 0) << "no need to go on";
}

// Each kit by itself: the reference, too.
TEST_F(ComparedKits, AreRepeated) {
  for (const std::string bad : {"sm80", "sm100"}) {
    int64_t runs = 0;
    on_kit_ = [&] { runs = 0; };
    bool repeating = false;
    memory_.spoils = [&] { return repeating && kit_ == bad && ++runs > 200; };
    std::vector<std::string> disagreed;
    compare_kits({.kit = "sm100",
                  .reference = "sm80",
                  .cases = {*verify::find_case("one-token/bfloat16")},
                  .repeats = 100,
                  .memory = memory_,
                  .use_kit =
                      [&](const std::string& kit) {
                        kit_ = kit;
                        on_kit_();
                      },
                  .tell =
                      [&](const json& event) {
                        if (event.contains("step"))
                          repeating = event.at("step").get<std::string>().ends_with("times");
                        if (event.contains("disagreed")) disagreed.push_back(event.at("disagreed"));
                      }});
    ASSERT_EQ(disagreed.size(), 1u) << bad;
    EXPECT_EQ(disagreed[0].rfind(bad + ", one-token/bfloat16: run ", 0), 0u) << disagreed[0];
    EXPECT_NE(disagreed[0].find("has other bits than run 0"), std::string::npos);
  }
}

TEST_F(ComparedKits, SayWhatStoppedThem) {
  on_kit_ = [&] {
    if (kit_ == "sm100") throw std::runtime_error("cudaErrorIllegalAddress");
  };
  const std::vector<json> events = compare();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[1].at("step"), "one-token/bfloat16 by sm100, against float64");
  EXPECT_EQ(events[2], json({{"error", "cudaErrorIllegalAddress"}}));
}

}  // namespace
}  // namespace tilemoe::app
