#include "log.h"

#include <fcntl.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tilemoe::train {
namespace {

// Length of the log's part up to step `step`: whole lines only.
size_t part_until(std::string_view log, int64_t step) {
  size_t kept = 0;
  for (;;) {
    const size_t end = log.find('\n', kept);
    if (end == log.npos) return kept;
    const auto line = nlohmann::json::parse(log.substr(kept, end - kept), nullptr, false);
    if (!line.is_object()) return kept;
    const auto at = line.find("step");
    if (at != line.end() && at->is_number() && at->get<int64_t>() > step) return kept;
    kept = end + 1;
  }
}

}  // namespace

JsonLog JsonLog::create(const std::filesystem::path& path) {
  return JsonLog(File(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, "write"));
}

JsonLog JsonLog::resume(const std::filesystem::path& path, int64_t step) {
  File file(path, O_RDWR | O_CREAT | O_APPEND, "write");
  std::string log(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, log.data(), log.size());
  file.truncate(part_until(log, step));
  return JsonLog(std::move(file));
}

void JsonLog::write(const nlohmann::ordered_json& line) {
  const std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  file_.write(text.data(), text.size());
}

}  // namespace tilemoe::train
