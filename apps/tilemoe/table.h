// Plain text tables: columns padded to their widest cell, words to the left, numbers to the right.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace tilemoe::app {

class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kRight;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // As many cells as columns; throws std::logic_error otherwise.
  void add(std::vector<std::string> cells);
  void print(std::ostream& out) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// 1234.5 with 2 digits after the point: "1234.50"
std::string fixed(double value, int digits);
// 3.2e-07
std::string scientific(double value, int digits);
// Bytes in the largest binary unit that keeps the number above 1: "96.0 MiB"
std::string bytes(double count);

}  // namespace tilemoe::app
