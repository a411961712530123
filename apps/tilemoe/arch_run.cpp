#include "arch_run.h"

#include <algorithm>
#include <map>

#include "child.h"
#include "tilemoe/tilemoe.h"
#include "verify/outcome.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;

constexpr size_t kFailuresShown = 20;

std::string why_not_selected(const ArchTask& task) {
  try {
    return task.select(task.arch);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// In the child, which emits JSON, an object a line.
void run_cases(const ArchTask& task, const Emit& emit) {
  const auto event = [&](const json& what) {
    emit(what.dump(-1, ' ', false, json::error_handler_t::replace));
  };
  if (const std::string why = why_not_selected(task); !why.empty())
    return event({{"skipped", why}});
  verify::Memory& memory = task.memory();
  event({{"device", tilemoe_device_description(to_c(memory.device()))}});
  for (size_t i = 0; i < task.cases.size(); ++i) {
    event({{"case", i}});
    try {
      event({{"outcome", json::parse(verify::to_json(verify::run_case(
                             task.cases[i], task.seed, task.repeats, memory, task.passes)))}});
    } catch (const std::exception& error) {  // the GPU does no more for this process
      return event({{"error", error.what()}});
    }
  }
}

// In the parent.
class Reader {
 public:
  explicit Reader(const ArchTask& task) : task_(task) { run_.arch = task.arch; }

  void read(const std::string& line) {
    const json event = json::parse(line);
    if (event.contains("skipped")) run_.skipped = event["skipped"];
    if (event.contains("device")) run_.device = event["device"];
    if (event.contains("case")) task_.on_case(current_ = event["case"]);
    if (event.contains("error")) error_ = event["error"];
    if (event.contains("outcome")) add(event["outcome"]);
  }

  ArchRun finish(const ChildEnd& end) {
    if (!run_.skipped.empty() || run_.cases == task_.cases.size()) return run_;
    std::string why = task_.cases[current_].name + ": " + (error_.empty() ? end.words() : error_);
    if (end.hung) why += " for " + std::to_string(task_.max_silence.count() / 1000) + " s";
    if (const size_t rest = task_.cases.size() - run_.cases - 1; rest > 0)
      why += "; " + std::to_string(rest) + " later cases were not run";
    run_.failures.insert(run_.failures.begin(), why);
    return run_;
  }

 private:
  void add(const json& outcome) {
    ++run_.cases;
    for (const json& row : outcome["rows"]) {
      ++run_.tensors;
      if (!row["bits"].is_null())
        run_.bits.push_back({.of_case = row["case"], .name = row["tensor"], .bits = row["bits"]});
    }
    for (const json& failure : outcome["failures"]) run_.failures.push_back(failure);
  }

  const ArchTask& task_;
  ArchRun run_;
  size_t current_ = 0;
  std::string error_;
};

using Place = std::pair<std::string, std::string>;

std::map<Place, std::string> by_place(const ArchRun& run) {
  std::map<Place, std::string> found;
  for (const ArchRun::Tensor& one : run.bits) found[{one.of_case, one.name}] = one.bits;
  return found;
}

}  // namespace

ArchRun run_arch(const ArchTask& task) {
  Reader reader(task);
  const ChildEnd end = run_child(
      task.max_silence, [&](const Emit& emit) { run_cases(task, emit); },
      [&](const std::string& line) { reader.read(line); });
  return reader.finish(end);
}

std::string ArchRun::text() const {
  if (!skipped.empty()) return arch + ": not run: " + skipped + "\n";
  std::string lines = arch + ": " + std::to_string(cases) + " cases, " + std::to_string(tensors) +
                      " tensors, " + std::to_string(failures.size()) + " failures\n";
  const size_t shown = std::min(failures.size(), kFailuresShown);
  for (size_t i = 0; i < shown; ++i) lines += "  " + failures[i] + "\n";
  if (shown < failures.size())
    lines += "  and " + std::to_string(failures.size() - shown) + " more\n";
  return lines;
}

json ArchRun::json() const {
  if (!skipped.empty()) return {{"arch", arch}, {"skipped", skipped}};
  return {{"arch", arch},
          {"device", device},
          {"cases", cases},
          {"tensors", tensors},
          {"failures", failures}};
}

size_t tensors_compared(const ArchRun& one, const ArchRun& other) {
  const auto others = by_place(other);
  return static_cast<size_t>(
      std::count_if(one.bits.begin(), one.bits.end(), [&](const auto& tensor) {
        return others.contains({tensor.of_case, tensor.name});
      }));
}

std::vector<std::string> differences(const ArchRun& one, const ArchRun& other) {
  const auto others = by_place(other);
  std::vector<std::pair<std::string, std::string>> found;  // a case, and its tensors
  for (const ArchRun::Tensor& tensor : one.bits) {
    const auto same = others.find({tensor.of_case, tensor.name});
    if (same == others.end() || same->second == tensor.bits) continue;
    if (found.empty() || found.back().first != tensor.of_case)
      found.emplace_back(tensor.of_case, tensor.name);
    else
      found.back().second += ", " + tensor.name;
  }
  std::vector<std::string> lines;
  lines.reserve(found.size());
  for (const auto& [name, tensors] : found)
    lines.push_back(name + ": " + tensors + " by " + one.arch + " have other bits than by " +
                    other.arch);
  return lines;
}

}  // namespace tilemoe::app
