#include "train/json.h"

#include <set>
#include <stdexcept>
#include <vector>

namespace tilemoe::train {

using Json = nlohmann::json;

Json parse_json(std::string_view text, int deepest) {
  using Event = Json::parse_event_t;
  std::vector<std::set<std::string>> open_objects;  // their keys so far
  const auto callback = [&](int depth, Event event, Json& parsed) {
    if ((event == Event::object_start || event == Event::array_start) && depth >= deepest)
      throw std::runtime_error("is nested more than " + std::to_string(deepest) + " levels deep");
    if (event == Event::object_start) open_objects.emplace_back();
    if (event == Event::object_end) open_objects.pop_back();
    if (event == Event::key) {
      // nlohmann keeps the last of two equal keys.
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second)
        throw std::runtime_error("has '" + key + "' twice");
    }
    return true;
  };
  try {
    return Json::parse(text, callback);
  } catch (const Json::exception&) {
    throw std::runtime_error("is not JSON");
  }
}

bool is_utf8(const std::string& text) {
  try {
    return !Json(text).dump().empty();
  } catch (const Json::exception&) {
    return false;
  }
}

}  // namespace tilemoe::train
