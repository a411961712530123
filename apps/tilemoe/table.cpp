#include "table.h"

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <stdexcept>

namespace tilemoe::app {

void Table::add(std::vector<std::string> cells) {
  if (cells.size() != columns_.size())
    throw std::logic_error("Table: a row has " + std::to_string(cells.size()) +
                           " cells, expected " + std::to_string(columns_.size()));
  rows_.push_back(std::move(cells));
}

void Table::print(std::ostream& out) const {
  std::vector<size_t> widths;
  for (size_t i = 0; i < columns_.size(); ++i) {
    size_t width = columns_[i].title.size();
    for (const auto& row : rows_) width = std::max(width, row[i].size());
    widths.push_back(width);
  }
  const auto print_row = [&](const auto& cell) {
    std::string line;
    for (size_t i = 0; i < columns_.size(); ++i) {
      const std::string text = cell(i);
      const std::string padding(widths[i] - text.size(), ' ');
      line += i ? "  " : "";
      line += columns_[i].align == Align::kLeft ? text + padding : padding + text;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  };
  print_row([&](size_t i) { return columns_[i].title; });
  print_row([&](size_t i) { return std::string(widths[i], '-'); });
  for (const auto& row : rows_) print_row([&](size_t i) { return row[i]; });
}

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string scientific(double value, int digits) {
  std::ostringstream text;
  text << std::scientific << std::setprecision(digits) << value;
  return text.str();
}

std::string bytes(double count) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (count >= 1024 && unit + 1 < std::size(units)) count /= 1024, ++unit;
  return fixed(count, unit ? 1 : 0) + " " + units[unit];
}

}  // namespace tilemoe::app
