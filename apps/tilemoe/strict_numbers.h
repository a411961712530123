// Numbers of a command line as a user writes them. CLI11 takes 010 for eight, cuts what does not
// fit to the largest number, and lets "nan" pass every bound.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

namespace tilemoe::app {

namespace strict_numbers {

template <class Value>
bool parses(std::string_view text, Value& value) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && stop == text.data() + text.size();
}

// "0", "17", "-3"; no sign of plus, no zero before other digits, nothing past 64 bits.
inline std::string complaint_of_whole(const std::string& text) {
  const std::string_view digits = std::string_view(text).substr(text.starts_with('-') ? 1 : 0);
  int64_t value = 0;
  if (parses(text, value) && (digits.size() == 1 || digits.front() != '0')) return "";
  return "expected an integer, got '" + text + "'";
}

// The same with a fraction and an exponent: finite, and 0.5 rather than 00.5.
inline std::string complaint_of_real(const std::string& text) {
  const std::string_view digits = std::string_view(text).substr(text.starts_with('-') ? 1 : 0);
  double value = 0;
  const bool padded = digits.size() > 1 && digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9';
  if (parses(text, value) && std::isfinite(value) && !padded) return "";
  return "expected a finite number, got '" + text + "'";
}

}  // namespace strict_numbers

// Holds every numeric option of `app` and of its subcommands to that. Call it when all are added.
inline void require_strict_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type.starts_with("INT") || type.starts_with("UINT"))
      option->check(CLI::Validator(strict_numbers::complaint_of_whole, ""));
    else if (type.starts_with("FLOAT"))
      option->check(CLI::Validator(strict_numbers::complaint_of_real, ""));
  }
  for (CLI::App* command : app.get_subcommands({})) require_strict_numbers(*command);
}

}  // namespace tilemoe::app
