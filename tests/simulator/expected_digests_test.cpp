// A GPU's hashes, as a results file has them, compared with those that a case computes.
#include "simulator/expected_digests.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "verify/registry.h"

namespace tilemoe::simulator {
namespace {

using nlohmann::json;
using verify::Case;
using verify::CaseDigests;

class ExpectedDigestsTest : public testing::Test {
 protected:
  // One file per test, since tests run in parallel.
  const std::string file = testing::TempDir() + "expected_digests_" +
                           testing::UnitTest::GetInstance()->current_test_info()->name() + ".jsonl";
  const Case relu = *verify::find_case("calibration-relu/bfloat16"),
             swiglu = *verify::find_case("calibration-swiglu/float16");
  const CaseDigests of_relu = verify::digest_case(relu, 3, verify::host_memory()),
                    of_swiglu = verify::digest_case(swiglu, 3, verify::host_memory());

  static json entry(const Case& one, const CaseDigests& digests) {
    json values = {{"arch", "sm90"},
                   {"case", one.name},
                   {"seed", 3},
                   {"inputs", verify::hexadecimal(digests.inputs)}};
    for (const verify::TensorDigest& tensor : digests.tensors)
      values[verify::output_name(tensor.output)] = verify::hexadecimal(tensor.hash);
    return {{"name", "digests"}, {"device", "NVIDIA H100"}, {"values", values}};
  }
  // A line for each, after the outcome of the run.
  json results() const {
    const json outcome = {{"name", "digests/calibration"}, {"values", {{"status", "passed"}}}};
    return json::array({entry(relu, of_relu), entry(swiglu, of_swiglu), outcome});
  }
  ~ExpectedDigestsTest() override { std::remove(file.c_str()); }
  ExpectedDigests read(const json& written, const std::string& arch = "sm90") const {
    std::ofstream stream(file);
    for (const json& line : written) stream << line << "\n";
    stream.close();
    return ExpectedDigests(file, arch);
  }
};

TEST_F(ExpectedDigestsTest, EqualBits) {
  const ExpectedDigests expected = read(results());
  EXPECT_EQ(expected.device(), "NVIDIA H100");
  EXPECT_TRUE(expected.has(relu.name));
  EXPECT_FALSE(expected.has("calibration-relu/float16"));
  const auto all = expected.compare(relu, 3, of_relu);
  EXPECT_EQ(all.equal, 8);
  EXPECT_TRUE(all.differences.empty());
  EXPECT_EQ(expected.compare(swiglu, 3, of_swiglu).equal, 1);  // H alone
}

TEST_F(ExpectedDigestsTest, EachTensorIsCompared) {
  const ExpectedDigests expected = read(results());
  for (size_t i = 0; i < of_relu.tensors.size(); ++i) {
    CaseDigests other = of_relu;
    ++other.tensors[i].hash;
    const auto compared = expected.compare(relu, 3, other);
    EXPECT_EQ(compared.equal, 7);
    ASSERT_EQ(compared.differences.size(), 1u);
    EXPECT_EQ(compared.differences[0], std::string(verify::output_name(other.tensors[i].output)) +
                                           ": other bits than the GPU's");
  }
  CaseDigests other = of_swiglu;
  for (verify::TensorDigest& tensor : other.tensors) ++tensor.hash;
  EXPECT_EQ(expected.compare(swiglu, 3, other).differences.size(), 1u);
}

TEST_F(ExpectedDigestsTest, WhatCannotBeComparedIsNoPass) {
  json lacking = results();
  lacking[0]["values"].erase("dX");
  EXPECT_EQ(read(lacking).compare(relu, 3, of_relu).differences,
            std::vector<std::string>{"dX: the file has no GPU value"});
  const ExpectedDigests expected = read(results());
  EXPECT_EQ(expected.compare(relu, 4, of_relu).differences.size(), 1u);
  EXPECT_EQ(expected.compare(relu, 4, of_relu).equal, 0);
  CaseDigests other = of_relu;
  ++other.inputs;
  EXPECT_EQ(expected.compare(relu, 3, other).differences.size(), 1u);
  EXPECT_EQ(expected.compare(relu, 3, other).equal, 0);
}

TEST_F(ExpectedDigestsTest, SaysWhatAFileLacks) {
  EXPECT_THROW(ExpectedDigests(testing::TempDir() + "none.json", "sm90"), std::runtime_error);
  EXPECT_THROW(read(results(), "sm80"), std::runtime_error);
  EXPECT_THROW(read(json::array()), std::runtime_error);
  json lacking = results();
  lacking[1]["values"].erase("inputs");
  EXPECT_THROW(read(lacking), std::runtime_error);
  std::ofstream(file) << "{";
  EXPECT_THROW(ExpectedDigests(file, "sm90"), std::runtime_error);
}

TEST_F(ExpectedDigestsTest, KnowsWhichBitsAreKnown) {
  for (int i = 0; i < verify::kOutputs; ++i) {
    const auto output = static_cast<verify::Output>(i);
    EXPECT_TRUE(has_known_bits(relu, output));
    EXPECT_EQ(has_known_bits(swiglu, output), output == verify::kH);
  }
}

}  // namespace
}  // namespace tilemoe::simulator
