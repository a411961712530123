// Text against what it stands for, a stream.
#include "core/text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

namespace tilemoe {
namespace {

template <class... Parts>
void expect_as_a_stream(const Parts&... parts) {
  Text text;
  std::ostringstream stream;
  (text << ... << parts);
  (stream << ... << parts);
  EXPECT_EQ(text.str(), stream.str());
}

TEST(Text, HasWhatAStreamHas) {
  expect_as_a_stream("T is ", 4, ", expected at least ", 0);
  expect_as_a_stream(std::string("a"), std::string_view("b"), 'c', "", true, false);
  expect_as_a_stream(INT64_MIN, ' ', INT64_MAX, ' ', UINT64_MAX, ' ', INT32_MIN, ' ', uint16_t{7});
  expect_as_a_stream(short{-3}, ' ', 5u, ' ', 6l, ' ', 7ll, ' ', sizeof(int));
  for (const double number : {0.0, -0.5, 1.0, 1.0 / 3, 123456.0, 1234567.0, 1e-5, 6.02e23})
    expect_as_a_stream(number, ' ', static_cast<float>(number));
  expect_as_a_stream(std::numeric_limits<double>::infinity(), ' ',
                     std::numeric_limits<float>::quiet_NaN());
  const int place = 0;
  void* const address = const_cast<int*>(&place);
  expect_as_a_stream(static_cast<const void*>(&place), ' ', address);
  expect_as_a_stream(static_cast<const void*>(nullptr));
}

}  // namespace
}  // namespace tilemoe
