#include "checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <map>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "file.h"
#include "safetensors.h"
#include "sha256.h"

namespace tilemoe::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kFormat[] = "tilemoe-checkpoint";
constexpr char kFormatVersion[] = "1";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kUnfinishedSuffix = ".safetensors.unfinished";
constexpr size_t kReadChunk = size_t{4} << 20;

std::string file_name(int64_t step, std::string_view suffix) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%08lld", static_cast<long long>(step));
  return std::string(kPrefix).append(digits).append(suffix);
}

// The step that a file's name tells, if it is the name of a checkpoint (or of an unfinished one).
std::optional<int64_t> step_of(const fs::path& path, std::string_view suffix) {
  const std::string name = path.filename().string();
  if (!std::string_view(name).starts_with(kPrefix) || !std::string_view(name).ends_with(suffix) ||
      name.size() <= kPrefix.size() + suffix.size())
    return std::nullopt;
  const char* begin = name.data() + kPrefix.size();
  const char* end = name.data() + name.size() - suffix.size();
  int64_t step = 0;
  const auto [stop, error] = std::from_chars(begin, end, step);
  if (error != std::errc() || stop != end || step < 0) return std::nullopt;
  return step;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "(" + text + ")";
}

[[noreturn]] void refuse(const fs::path& path, const std::string& what) {
  throw std::runtime_error(path.string() + ": " + what);
}

struct Opened {
  SafetensorsHeader header;
  Json state;
};

Opened open_checkpoint(const fs::path& path) {
  Opened opened{read_safetensors_header(path), Json()};
  const auto& metadata = opened.header.metadata;
  const auto field = [&](const char* key) {
    const auto at = metadata.find(key);
    return at == metadata.end() ? std::string() : at->second;
  };
  if (field("format") != kFormat)
    refuse(path, "a safetensors file, but no checkpoint of `tilemoe train`");
  if (field("format_version") != kFormatVersion)
    refuse(path, "written in version '" + field("format_version") +
                     "' of the checkpoint format; this program reads version " + kFormatVersion);
  opened.state = Json::parse(field("state"), nullptr, /*allow_exceptions=*/false);
  if (!opened.state.is_object()) refuse(path, "its state is no JSON object");
  return opened;
}

void require_tensors(const fs::path& path, const SafetensorsHeader& header,
                     const std::vector<TensorRef>& tensors, const std::string& ignored_prefix) {
  std::map<std::string_view, const TensorRef*> wanted;
  for (const TensorRef& tensor : tensors) wanted[tensor.name] = &tensor;
  for (const TensorInfo& found : header.tensors) {
    const auto at = wanted.find(found.name);
    if (at == wanted.end()) {
      if (!ignored_prefix.empty() && found.name.starts_with(ignored_prefix)) continue;
      refuse(path, "tensor '" + found.name + "' is not one of this model");
    }
    if (found.dtype != "F32")
      refuse(path, "tensor '" + found.name + "' has type " + found.dtype + ", expected F32");
    if (found.shape != at->second->shape)
      refuse(path, "tensor '" + found.name + "' has shape " + shape_text(found.shape) +
                       ", this model's is " + shape_text(at->second->shape));
    wanted.erase(at);
  }
  if (!wanted.empty())
    refuse(path, "tensor '" + std::string(wanted.begin()->first) + "' is missing");
}

void require_intact_data(const fs::path& path, const File& file, const SafetensorsHeader& header) {
  const auto expected = header.metadata.find("data_sha256");
  Sha256 hash;
  std::vector<char> chunk(kReadChunk);
  for (uint64_t at = header.data_begin, end = file.size(); at < end;) {
    const auto bytes = static_cast<size_t>(std::min<uint64_t>(kReadChunk, end - at));
    file.read_at(at, chunk.data(), bytes);
    hash.update(chunk.data(), bytes);
    at += bytes;
  }
  if (expected == header.metadata.end() || hash.hex() != expected->second)
    refuse(path, "damaged: the data do not have the SHA-256 written in the header");
}

// Runs `read`; a damaged file is reported with the older checkpoint to go on from, where there is
// one.
template <class Read>
auto with_way_out(const fs::path& path, Read&& read) {
  try {
    return read();
  } catch (const std::runtime_error& error) {
    const auto step = step_of(path, kSuffix);
    for (const CheckpointFile& other : list_checkpoints(path.parent_path())) {
      if (!step || other.step >= *step) continue;
      throw std::runtime_error(std::string(error.what()) +
                               "\nThe checkpoint before it can be tried with\n  --resume " +
                               other.path.string());
    }
    throw;
  }
}

void flatten(const Json& value, const std::string& name, std::map<std::string, Json>& options) {
  if (!value.is_object()) {
    options[name] = value;
    return;
  }
  for (const auto& [key, inner] : value.items())
    flatten(inner, name.empty() ? key : name + "." + key, options);
}

}  // namespace

RunFolder::RunFolder(fs::path path) : path_(std::move(path)) {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error)
    throw std::runtime_error("cannot make the folder " + path_.string() + ": " + error.message());
  // The lock is on the folder itself, so it leaves no file behind and ends with the process. Some
  // network file systems have none: there the user takes care.
  lock_ = std::make_unique<File>(path_, O_RDONLY | O_DIRECTORY, "open the folder");
  if (::flock(lock_->descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw std::runtime_error("another process is training in " + path_.string());
  for (const auto& entry : fs::directory_iterator(path_))
    if (step_of(entry.path(), kUnfinishedSuffix)) fs::remove(entry.path());
}

RunFolder::~RunFolder() = default;

std::vector<CheckpointFile> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointFile> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error))
    if (const auto step = step_of(entry.path(), kSuffix)) files.push_back({*step, entry.path()});
  std::sort(files.begin(), files.end(),
            [](const CheckpointFile& a, const CheckpointFile& b) { return a.step > b.step; });
  return files;
}

fs::path find_checkpoint(const fs::path& path) {
  if (!fs::exists(path)) throw std::runtime_error("there is no checkpoint " + path.string());
  if (!fs::is_directory(path)) return path;
  const auto files = list_checkpoints(path);
  if (files.empty()) throw std::runtime_error("there is no checkpoint in " + path.string());
  return files.front().path;
}

fs::path save_checkpoint(const RunFolder& folder, int64_t step,
                         const std::vector<TensorRef>& tensors, const Json& state, int keep) {
  if (step < 0 || keep < 1)
    throw std::invalid_argument("a checkpoint needs a step >= 0, and one to keep");
  std::vector<TensorView> views;
  Sha256 hash;
  for (const TensorRef& tensor : tensors) {
    views.push_back({tensor.name, "F32", tensor.shape, tensor.data});
    hash.update(tensor.data, tensor_bytes("F32", tensor.shape));
  }
  const std::string header = safetensors_header(views, {{"format", kFormat},
                                                        {"format_version", kFormatVersion},
                                                        {"data_sha256", hash.hex()},
                                                        {"state", state.dump()}});
  const fs::path path = folder.path() / file_name(step, kSuffix);
  const fs::path unfinished = folder.path() / file_name(step, kUnfinishedSuffix);
  try {
    File file(unfinished, O_WRONLY | O_CREAT | O_TRUNC, "write");
    file.write(header.data(), header.size());
    for (const TensorView& view : views)
      file.write(view.data, tensor_bytes(view.dtype, view.shape));
    file.sync();
    file.close();
    fs::rename(unfinished, path);
    sync_folder(folder.path());
  } catch (const std::runtime_error& error) {
    std::error_code ignored;  // the first error is the one to tell
    fs::remove(unfinished, ignored);
    throw std::runtime_error("the checkpoint of step " + std::to_string(step) +
                             " was not saved: " + error.what());
  }
  // Only now may older ones go. Later ones (of a run that was taken up again from an earlier step)
  // are neither counted nor touched.
  int found = 0;
  for (const CheckpointFile& other : list_checkpoints(folder.path())) {
    std::error_code ignored;  // an old file that stays is no reason to end a training
    if (other.step <= step && ++found > keep) fs::remove(other.path, ignored);
  }
  return path;
}

Json read_checkpoint_state(const fs::path& path) {
  return with_way_out(path, [&] { return open_checkpoint(path).state; });
}

Json load_checkpoint(const fs::path& path, const std::vector<TensorRef>& tensors,
                     const std::string& ignored_prefix) {
  Opened opened = with_way_out(path, [&] { return open_checkpoint(path); });
  require_tensors(path, opened.header, tensors, ignored_prefix);
  const File file(path, O_RDONLY, "read");
  with_way_out(path, [&] { require_intact_data(path, file, opened.header); });
  for (const TensorRef& tensor : tensors) {
    const TensorInfo& info = *opened.header.find(tensor.name);
    file.read_at(info.begin, tensor.data, static_cast<size_t>(info.end - info.begin));
  }
  return std::move(opened.state);
}

std::vector<OptionChange> changed_options(const Json& saved, const Json& now) {
  std::map<std::string, Json> before, after;
  flatten(saved, "", before);
  flatten(now, "", after);
  std::map<std::string, OptionChange> changes;
  for (const auto& [name, value] : before) changes[name] = {name, value, nullptr};
  for (const auto& [name, value] : after) {
    changes[name].name = name;
    changes[name].now = value;
  }
  std::vector<OptionChange> result;
  for (const auto& [name, change] : changes)
    if (change.saved != change.now) result.push_back(change);
  return result;
}

void require_same_options(const Json& saved, const Json& now, const fs::path& checkpoint) {
  std::string text;
  for (const OptionChange& change : changed_options(saved, now))
    text += "\n  " + change.name + ": " + change.saved.dump() + " in the checkpoint, " +
            change.now.dump() + " now";
  if (!text.empty())
    throw std::runtime_error("cannot resume from " + checkpoint.string() +
                             " with changed options:" + text);
}

}  // namespace tilemoe::train
