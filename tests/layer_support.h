// Common code of the layer's tests: cases as parameters, and reports as failures.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <initializer_list>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "verify/check.h"
#include "verify/problem.h"
#include "verify/registry.h"

namespace tilemoe::verify {

// How GoogleTest names a parameter.
inline void PrintTo(const Case& test_case, std::ostream* out) {
  *out << test_case.name;
}

inline std::string test_name(const testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  // Short, so that names fit in a line of ctest.
  if (const size_t at = name.rfind("float"); at != std::string::npos && at > 0)
    name.replace(name[at - 1] == 'b' ? at - 1 : at, std::string::npos,
                 name[at - 1] == 'b' ? "bf16" : "fp" + name.substr(at + 5));
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

inline void expect_passed(const Report& report) {
  for (const std::string& line : report.damage) ADD_FAILURE() << line;
  EXPECT_FALSE(report.tensors.empty());
  for (const TensorReport& tensor : report.tensors) {
    EXPECT_TRUE(tensor.passed) << output_name(tensor.output) << ": "
                               << describe(tensor.figures, tensor.limit);
    for (const std::string& spoiling : tensor.missed_spoilings)
      ADD_FAILURE() << output_name(tensor.output) << " passes even when spoiled: " << spoiling;
  }
}

inline Case named_case(const std::string& name) {
  const Case* found = find_case(name);
  if (!found) throw std::runtime_error("no case is called " + name);
  return *found;
}

inline std::vector<Case> named_cases(std::initializer_list<const char*> names,
                                     std::initializer_list<const char*> dtypes) {
  std::vector<Case> cases;
  for (const char* name : names)
    for (const char* dtype : dtypes) cases.push_back(named_case(std::string(name) + "/" + dtype));
  return cases;
}

// The first element whose bits differ, or -1.
inline int64_t first_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return static_cast<int64_t>(i);
  return -1;
}

inline void expect_same_bits(const Computed& a, const Computed& b) {
  for (size_t output = 0; output < kOutputs; ++output)
    EXPECT_EQ(first_difference(a[output], b[output]), -1)
        << "in " << output_name(static_cast<Output>(output));
}

// A layer whose backward is divided gives the bits of one call; the addend of dX is dX itself.
inline void expect_the_bits_of_one_call(Case one, bool Case::*divided, Memory& memory) {
  one.addend = true;
  for (const bool dH_over_H : {false, true}) {
    SCOPED_TRACE(one.name + (dH_over_H ? ", dH over H" : ""));
    one.dH_over_H = dH_over_H;
    Case parts = one;
    parts.*divided = true;
    const auto run = [&](const Case& test_case) {
      Problem problem(make_inputs(test_case, 3), memory);
      problem.run();
      EXPECT_TRUE(problem.damage().empty());
      return problem.computed();
    };
    expect_same_bits(run(one), run(parts));
  }
}

}  // namespace tilemoe::verify
