#include "core/text.h"

#include <cinttypes>
#include <cstdio>

namespace tilemoe {
namespace {

// Not std::to_chars(), whose table of digits would be a symbol of the shared library.
template <class Number>
void append(std::string& text, const char* format, Number number) {
  char digits[32];
  std::snprintf(digits, sizeof digits, format, number);
  text += digits;
}

}  // namespace

Text& Text::operator<<(std::string_view part) {
  text_ += part;
  return *this;
}

Text& Text::operator<<(const char* part) {
  text_ += part;
  return *this;
}

Text& Text::operator<<(char part) {
  text_ += part;
  return *this;
}

Text& Text::operator<<(double number) {
  append(text_, "%g", number);
  return *this;
}

Text& Text::operator<<(const void* address) {
  append(text_, "%#" PRIxPTR, reinterpret_cast<uintptr_t>(address));  // "%p" writes "(nil)"
  return *this;
}

Text& Text::add(int64_t number) {
  append(text_, "%" PRId64, number);
  return *this;
}

Text& Text::add(uint64_t number) {
  append(text_, "%" PRIu64, number);
  return *this;
}

}  // namespace tilemoe
