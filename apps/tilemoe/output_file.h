// Files that a command writes its report to.
#pragma once

#include <fstream>
#include <stdexcept>
#include <string>

namespace tilemoe::app {

// Before minutes of work, not after them. Leaves what is in the file. Without a name, nothing.
inline void check_writable(const std::string& file) {
  if (!file.empty() && !std::ofstream(file, std::ios::app))
    throw std::runtime_error("cannot write " + file);
}

inline void write_file(const std::string& file, const std::string& text) {
  if (file.empty()) return;
  std::ofstream out(file);
  out << text;
  out.close();
  if (!out) throw std::runtime_error("cannot write " + file);
}

}  // namespace tilemoe::app
