// The report of `check` on a case, right and wrong.
#include "verify/outcome.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "verify/digest.h"
#include "verify/json_text.h"
#include "verify/registry.h"
#include "verify/selection.h"

namespace {

using namespace tilemoe;
using nlohmann::json;
using verify::Case;
using verify::Outcome;

constexpr uint64_t kSeed = 1;

Outcome run(const char* name, verify::Memory& memory = verify::host_memory()) {
  return verify::run_case(*verify::find_case(name), kSeed, 0, memory, verify::Passes::kAll);
}

// The host's memory; one large tensor is read with its first element changed by a part in 16.
class WrongMemory final : public verify::Memory {
 public:
  Device device() const override { return Device::kCpu; }
  void* allocate(size_t bytes) override { return host_.allocate(bytes); }
  void release(void* memory) override { host_.release(memory); }
  void copy_in(void* to, const void* from, size_t bytes) override {
    host_.copy_in(to, from, bytes);
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    host_.copy_out(to, from, bytes);
    if (bytes != kBytesOfO) return;
    float value = 0;
    std::memcpy(&value, to, sizeof(value));
    value += std::fabs(value) / 16 + 1;
    std::memcpy(to, &value, sizeof(value));
  }
  std::unique_ptr<verify::OtherWork> do_other_work() override { return host_.do_other_work(); }

 private:
  static constexpr size_t kBytesOfO = sizeof(float) * 203 * 136;  // of swiglu: (T, d)
  verify::Memory& host_ = verify::host_memory();
};

TEST(Outcome, OfARightResult) {
  const Outcome outcome = run("swiglu/float32");
  EXPECT_EQ(outcome.rows.size(), 12u);  // six tensors, of both forms
  EXPECT_TRUE(outcome.failures.empty());
  EXPECT_EQ(outcome.spoilings, 36);
  EXPECT_EQ(outcome.refused, 0);
}

TEST(Outcome, OfAWrongResult) {
  WrongMemory memory;
  const Outcome outcome = run("swiglu/float32", memory);
  int wrong = 0;
  for (const Outcome::Row& row : outcome.rows) {
    const bool of_that_size = row.tensor.output == verify::kO || row.tensor.output == verify::kDX;
    if (of_that_size) {
      EXPECT_FALSE(row.good()) << row.name;
    }
    wrong += !row.good();
  }
  EXPECT_EQ(wrong, 4);
  EXPECT_GE(outcome.failures.size(), 4u);
  EXPECT_EQ(outcome.failures.front().rfind("swiglu/float32", 0), 0u) << outcome.failures.front();
}

TEST(Outcome, IsJson) {
  const Outcome outcome = run("one-token/bfloat16");
  const json read = json::parse(verify::to_json(outcome));
  ASSERT_EQ(read.at("rows").size(), outcome.rows.size());
  for (size_t i = 0; i < outcome.rows.size(); ++i) {
    const Outcome::Row& row = outcome.rows[i];
    const json& entry = read.at("rows").at(i);
    EXPECT_EQ(entry.at("case"), row.name);
    EXPECT_EQ(entry.at("tensor"), verify::output_name(row.tensor.output));
    EXPECT_EQ(entry.at("frobenius"), row.tensor.figures.frobenius);
    EXPECT_EQ(entry.at("frobenius_limit"), row.tensor.limit.frobenius);
    EXPECT_EQ(entry.at("worst_row"), row.tensor.figures.worst_row);
    EXPECT_EQ(entry.at("worst_row_limit"), row.tensor.limit.worst_row);
    EXPECT_EQ(entry.at("passed"), row.good());
    EXPECT_EQ(entry.at("bits"), verify::hexadecimal(row.tensor.bits));
  }
  EXPECT_EQ(read.at("spoilings"), outcome.spoilings);
}

TEST(Json, OfTextsAndNumbers) {
  const std::string text = "a \"quoted\" \\ line\nand \x01 more";
  EXPECT_EQ(json::parse(verify::json_text(text)), text);
  EXPECT_EQ(json::parse(verify::json_number(0.1)), 0.1);
  EXPECT_TRUE(json::parse(verify::json_number(std::nan(""))).is_null());
  EXPECT_TRUE(json::parse(verify::json_number(std::numeric_limits<double>::infinity())).is_null());
}

TEST(Selection, HasEveryQuickCase) {
  const verify::Selection reduced{.patterns = {}, .reduced = true};
  size_t quick = 0, of_gpu = 0, of_other_archs = 0, of_fp8 = 0;
  for (const Case& one : verify::verification_cases()) {
    quick += one.reduced;
    if (!one.reduced || one.dtype == DType::kFloat32) continue;
    const bool computes = verify::arch_computes(tilemoe_cuda_arch(), one);
    of_gpu += computes, of_other_archs += !computes, of_fp8 += one.recipe != Recipe::kBf16;
  }
  const std::vector<Case> cases = reduced.choose(Device::kCpu);
  EXPECT_EQ(cases.size(), quick);
  EXPECT_GT(quick, 50u);
  EXPECT_EQ(reduced.choose(Device::kCuda).size(), of_gpu);
  EXPECT_GE(of_gpu + of_other_archs, quick / 3 * 2);
  EXPECT_TRUE(of_other_archs == 0 || of_other_archs == of_fp8);  // an arch may lack the recipes
  EXPECT_EQ(json::parse(verify::to_json(cases)).size(), quick);
  EXPECT_EQ(json::parse(verify::to_json(cases)).front().at("case"), cases.front().name);
}

TEST(Selection, NamesAPatternThatMatchesNothing) {
  const verify::Selection wrong{.patterns = {"swiglu", "nothing"}};
  EXPECT_EQ(wrong.complaint(wrong.choose(Device::kCpu), "list"),
            "no case matches nothing; `list` names them all");
}

}  // namespace
