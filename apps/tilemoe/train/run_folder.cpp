#include "run_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "checkpoint.h"
#include "file.h"
#include "json.h"

namespace tilemoe::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kName[] = "run.json";
constexpr char kFormat[] = "tilemoe-run";

struct WrittenDown {
  Json options = Json::object();
  std::set<std::string> checkpoints;
};

WrittenDown read(const fs::path& folder) {
  const fs::path path = folder / kName;
  if (!fs::exists(path)) return {};
  const File file(path, O_RDONLY, "read");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, text.data(), text.size());
  try {
    const Json json = parse_json(text, 4);
    if (json.at("format") != kFormat || !json.at("options").is_object())
      throw std::runtime_error("is not what `tilemoe train` writes");
    return {json.at("options"), json.at("checkpoints").get<std::set<std::string>>()};
  } catch (const std::exception& error) {
    throw std::runtime_error(path.string() + " is damaged (" + error.what() +
                             "); if it is removed, the run continues with the default options "
                             "and keeps the existing checkpoints");
  }
}

bool is_unfinished(const fs::path& path) {
  fs::path whole = path;
  whole.replace_extension();
  return path.extension() == kUnfinishedSuffix &&
         (is_checkpoint_name(whole) || whole.filename() == kName);
}

}  // namespace

RunFolder::RunFolder(fs::path path) : path_(std::move(path)) {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error)
    throw std::runtime_error("cannot create the folder " + path_.string() + ": " + error.message());
  // The lock is on the folder itself, so it leaves no file behind and ends with the process. Some
  // network file systems have none: there the user takes care.
  lock_ = std::make_unique<File>(path_, O_RDONLY | O_DIRECTORY, "open the folder");
  if (::flock(lock_->descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw std::runtime_error("another process is training in " + path_.string());
  for (const auto& entry : fs::directory_iterator(path_))
    if (is_unfinished(entry.path())) fs::remove(entry.path());
  WrittenDown found = read(path_);
  options_ = std::move(found.options);
  for (const std::string& name : found.checkpoints)
    if (fs::exists(path_ / name)) checkpoints_.insert(name);
}

RunFolder::~RunFolder() = default;

Json RunFolder::options_of(const fs::path& folder) {
  return read(folder).options;
}

void RunFolder::set_options(Json options) {
  if (options_ == options && fs::exists(path_ / kName)) return;
  options_ = std::move(options);
  write_down();
}

void RunFolder::claim(const std::string& name) {
  if (owns(name)) return;
  const std::set<std::string> before = checkpoints_;
  std::erase_if(checkpoints_, [&](const std::string& old) { return !fs::exists(path_ / old); });
  checkpoints_.insert(name);
  try {
    write_down();
  } catch (...) {
    checkpoints_ = before;
    throw;
  }
}

void RunFolder::write_down() const {
  const nlohmann::ordered_json json = {
      {"format", kFormat}, {"options", options_}, {"checkpoints", checkpoints_}};
  const std::string text = json.dump(1) + "\n";
  write_whole(path_ / kName, [&](File& file) { file.write(text.data(), text.size()); });
}

}  // namespace tilemoe::train
