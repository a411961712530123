// JSON that somebody else may have written.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tilemoe::train {

// Strict: a key that an object has twice is an error, and so are lists and objects nested more than
// `deepest` deep (what walks over the value afterwards may use the stack). Throws
// std::runtime_error whose text continues a subject: "is no JSON", "names 'x' twice".
nlohmann::json parse_json(std::string_view text, int deepest);

// Whether a JSON string can hold it.
bool is_utf8(const std::string& text);

}  // namespace tilemoe::train
