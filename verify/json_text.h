// JSON that the PyTorch package reads from its operators, which link no JSON library.
#pragma once

#include <string>
#include <string_view>

namespace tilemoe::verify {

// In quotes; `text` is UTF-8.
std::string json_text(std::string_view text);
// null for NaN and infinity, which JSON does not have.
std::string json_number(double value);

// [write(item), ...]
template <class Items, class Write>
std::string json_list(const Items& items, Write&& write) {
  std::string text = "[";
  for (const auto& item : items) text += (text.size() > 1 ? ", " : "") + write(item);
  return text + "]";
}

}  // namespace tilemoe::verify
