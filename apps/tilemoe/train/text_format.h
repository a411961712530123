// Short texts with numbers in them.
#pragma once

#include <cstdio>
#include <string>

namespace tilemoe::train {

// As printf; what is longer than a short line is cut.
template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[160];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

}  // namespace tilemoe::train
