// The text of an error or a description: strings and numbers, joined by << as a std::ostringstream
// joins them. Every kernel's file has checks, and the header of streams is half a megabyte of code
// to compile.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace tilemoe {

class Text {
 public:
  Text& operator<<(std::string_view part);
  Text& operator<<(const char* part);  // not as an address
  Text& operator<<(char part);
  template <std::signed_integral Number>
  Text& operator<<(Number number) {
    return add(int64_t{number});
  }
  template <std::unsigned_integral Number>
  Text& operator<<(Number number) {
    return add(uint64_t{number});
  }
  Text& operator<<(double number);        // six digits
  Text& operator<<(const void* address);  // 0x7f00

  const std::string& str() const { return text_; }

 private:
  Text& add(int64_t number);
  Text& add(uint64_t number);

  std::string text_;
};

}  // namespace tilemoe
