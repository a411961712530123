#include "log.h"

#include <fcntl.h>

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "json.h"

namespace tilemoe::train {
namespace {

namespace fs = std::filesystem;

// The step that a line carries; -1 for a line without one, "start". Throws std::runtime_error for
// what is no line of a log.
int64_t step_of_line(std::string_view line) {
  constexpr int kDeepest = 16;  // options in "start" may become deeper than they are today
  const nlohmann::json json = parse_json(line, kDeepest);
  if (!json.is_object()) throw std::runtime_error("is not a JSON object");
  const auto event = json.find("event");
  if (event == json.end() || !event->is_string()) throw std::runtime_error("has no \"event\"");
  const auto step = json.find("step");
  if (step == json.end()) return -1;
  if (!step->is_number_unsigned()) throw std::runtime_error("has a \"step\" that is not a number");
  return step->get<int64_t>();
}

// Length of the log's part up to step `step`. A last line may be broken, as a line is that the end
// of a process or of a machine cut short; any other is an error, since only the user can know
// what it was.
size_t part_until(const fs::path& path, std::string_view log, int64_t step) {
  size_t kept = 0, begin = 0;
  for (int64_t number = 1; begin < log.size(); ++number) {
    const size_t end = log.find('\n', begin);
    if (end == log.npos) break;
    try {
      if (step_of_line(log.substr(begin, end - begin)) <= step && kept == begin) kept = end + 1;
    } catch (const std::runtime_error& error) {
      if (end + 1 == log.size()) break;
      throw std::runtime_error(path.string() + " line " + std::to_string(number) + " " +
                               error.what() +
                               "; nothing after it was changed: repair or remove the line, or "
                               "choose another file with --log");
    }
    begin = end + 1;
  }
  return kept;
}

// The contents of an existing log. A file of another kind may be the user's only copy.
std::string read_log(const fs::path& path) {
  const File file(path, O_RDONLY, "read");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, text.data(), text.size());
  if (!text.empty() && !text.starts_with(R"({"event":)"))
    throw std::runtime_error(path.string() +
                             " exists and is not a training log; choose another file with --log");
  return text;
}

}  // namespace

JsonLog::JsonLog(const fs::path& path) : file_(path, O_WRONLY | O_CREAT | O_APPEND, "write") {
  const fs::path folder = path.parent_path();
  sync_folder(folder.empty() ? "." : folder);
}

JsonLog JsonLog::create(const fs::path& path) {
  JsonLog log(path);
  if (log.file_.is_regular()) {
    read_log(path);
    log.file_.truncate(0);
  }
  return log;
}

JsonLog JsonLog::resume(const fs::path& path, int64_t step) {
  JsonLog log(path);
  if (log.file_.is_regular()) log.file_.truncate(part_until(path, read_log(path), step));
  return log;
}

void JsonLog::write(const nlohmann::ordered_json& line) {
  const std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  file_.write(text.data(), text.size());
}

void JsonLog::sync() {
  file_.sync();
}

}  // namespace tilemoe::train
