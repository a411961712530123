#include "checkpoint.h"

#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "exit_status.h"
#include "file.h"
#include "json.h"
#include "run_folder.h"
#include "safetensors.h"
#include "sha256.h"

namespace tilemoe::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kFormat[] = "tilemoe-checkpoint";
constexpr char kFormatVersion[] = "2";
// The hash covers the header too: its step, learning rate and seed decide a resumed run as the
// weights do.
constexpr char kHash[] = "file_sha256";
constexpr size_t kHashDigits = 64;
constexpr int kDeepestState = 8;
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr size_t kReadChunk = size_t{4} << 20;

std::string file_name(int64_t step) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%08lld", static_cast<long long>(step));
  return std::string(kPrefix).append(digits).append(kSuffix);
}

// The step in a file's name, if it is the name of a checkpoint.
std::optional<int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!std::string_view(name).starts_with(kPrefix) || !std::string_view(name).ends_with(kSuffix) ||
      name.size() <= kPrefix.size() + kSuffix.size())
    return std::nullopt;
  const char* begin = name.data() + kPrefix.size();
  const char* end = name.data() + name.size() - kSuffix.size();
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

// `"file_sha256":"<digits>"`, as it stands in a header.
std::string hash_field(const std::string& digits) {
  return std::string("\"").append(kHash).append("\":\"").append(digits).append("\"");
}

const std::string& field(const fs::path& path, const SafetensorsHeader& header, const char* key) {
  const auto at = header.metadata.find(key);
  if (at == header.metadata.end())
    refuse(path, std::string("damaged: its metadata has no '") + key + "'");
  return at->second;
}

void require_intact(const fs::path& path, const File& file, const SafetensorsHeader& header) {
  const std::string& expected = field(path, header, kHash);
  std::string head(static_cast<size_t>(header.data_begin), '\0');
  file.read_at(0, head.data(), head.size());
  const size_t at_field = head.find(hash_field(expected));
  if (expected.size() == kHashDigits && at_field != head.npos)
    head.replace(at_field, hash_field(expected).size(), hash_field(std::string(kHashDigits, '0')));
  Sha256 hash;
  hash.update(head.data(), head.size());
  std::vector<char> chunk(kReadChunk);
  for (uint64_t at = header.data_begin, end = file.size(); at < end;) {
    const auto bytes = static_cast<size_t>(std::min<uint64_t>(kReadChunk, end - at));
    file.read_at(at, chunk.data(), bytes);
    hash.update(chunk.data(), bytes);
    at += bytes;
  }
  if (hash.hex() != expected)
    refuse(path, "damaged: the file does not have the SHA-256 written in its header");
}

int64_t step_in(const fs::path& path, const Json& state) {
  const auto step = state.find("step");
  if (step == state.end() || !step->is_number_unsigned() ||
      step->get<uint64_t>() > uint64_t{INT64_MAX})
    refuse(path, "its state has no integer \"step\"");
  return step->get<int64_t>();
}

CheckpointSummary checked_summary(const fs::path& path, const File& file,
                                  const SafetensorsHeader& header) {
  const auto& metadata = header.metadata;
  const auto format = metadata.find("format");
  if (format == metadata.end() || format->second != kFormat)
    refuse(path, "a safetensors file, but not a checkpoint of `tilemoe train`");
  const std::string& version = field(path, header, "format_version");
  if (version != kFormatVersion)
    refuse(path, "the version of the checkpoint format is '" + version + "', expected '" +
                     kFormatVersion + "'");
  require_intact(path, file, header);

  CheckpointSummary summary;
  try {
    summary.state = parse_json(field(path, header, "state"), kDeepestState);
  } catch (const std::runtime_error& error) {
    refuse(path, std::string("its state ") + error.what());
  }
  if (!summary.state.is_object()) refuse(path, "its state is not a JSON object");
  summary.step = step_in(path, summary.state);
  if (const auto named = step_of(path); named && *named != summary.step)
    refuse(path, "its state has step " + std::to_string(summary.step) + ", expected step " +
                     std::to_string(*named) + " of its file name");
  for (const TensorInfo& tensor : header.tensors)
    if (!tensor.name.starts_with(kOptimizerPrefix))
      summary.weights += static_cast<int64_t>((tensor.end - tensor.begin) / sizeof(float));
  return summary;
}

void require_tensors(const fs::path& path, const SafetensorsHeader& header,
                     const std::vector<TensorRef>& tensors, const std::string& ignored_prefix) {
  std::map<std::string_view, const TensorRef*> wanted;
  for (const TensorRef& tensor : tensors) wanted[tensor.name] = &tensor;
  for (const TensorInfo& found : header.tensors) {
    const auto at = wanted.find(found.name);
    if (at == wanted.end()) {
      if (!ignored_prefix.empty() && found.name.starts_with(ignored_prefix)) continue;
      refuse(path, "tensor '" + found.name + "' is not a tensor of this model");
    }
    if (found.dtype != "F32")
      refuse(path, "tensor '" + found.name + "' has type " + found.dtype + ", expected F32");
    if (found.shape != at->second->shape)
      refuse(path, "tensor '" + found.name + "' has shape " + shape_text(found.shape) +
                       ", expected " + shape_text(at->second->shape));
    wanted.erase(at);
  }
  if (!wanted.empty())
    refuse(path, "tensor '" + std::string(wanted.begin()->first) + "' is missing");
}

// Runs `read`; a damaged file is reported with the older checkpoint to continue from, if one
// exists.
template <class Read>
void with_way_out(const fs::path& path, Read&& read) {
  try {
    read();
  } catch (const std::runtime_error& error) {
    const auto step = step_of(path);
    for (const CheckpointFile& other : list_checkpoints(path.parent_path())) {
      if (!step || other.step >= *step) continue;
      throw std::runtime_error(std::string(error.what()) +
                               "; try the previous checkpoint with --resume " +
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

bool is_checkpoint_name(const fs::path& path) {
  return step_of(path).has_value();
}

std::vector<CheckpointFile> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointFile> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error))
    if (const auto step = step_of(entry.path())) files.push_back({*step, entry.path()});
  std::sort(files.begin(), files.end(),
            [](const CheckpointFile& a, const CheckpointFile& b) { return a.step > b.step; });
  return files;
}

fs::path find_checkpoint(const fs::path& path) {
  if (!fs::exists(path)) throw std::runtime_error("no checkpoint found at " + path.string());
  if (!fs::is_directory(path)) return path;
  const auto files = list_checkpoints(path);
  if (files.empty()) throw std::runtime_error("no checkpoint found in " + path.string());
  return files.front().path;
}

fs::path save_checkpoint(RunFolder& folder, int64_t step, const std::vector<TensorRef>& tensors,
                         const Json& state, int64_t keep) {
  if (step < 0 || keep < 1)
    throw std::invalid_argument("a checkpoint requires step >= 0 and keep >= 1");
  std::vector<TensorView> views;
  for (const TensorRef& tensor : tensors)
    views.push_back({tensor.name, "F32", tensor.shape, tensor.data});
  const std::string zeros(kHashDigits, '0');
  std::string header = safetensors_header(views, {{"format", kFormat},
                                                  {"format_version", kFormatVersion},
                                                  {kHash, zeros},
                                                  {"state", state.dump()}});
  Sha256 hash;
  hash.update(header.data(), header.size());
  for (const TensorView& view : views) hash.update(view.data, tensor_bytes(view.dtype, view.shape));
  header.replace(header.find(hash_field(zeros)), hash_field(zeros).size(), hash_field(hash.hex()));

  const std::string name = file_name(step);
  const fs::path path = folder.path() / name;
  try {
    if (!folder.owns(name) && fs::exists(fs::symlink_status(path)))
      refuse(path, "exists and is not a checkpoint of this run");
    folder.claim(name);
    write_whole(path, [&](File& file) {
      file.write(header.data(), header.size());
      for (const TensorView& view : views)
        file.write(view.data, tensor_bytes(view.dtype, view.shape));
    });
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("the checkpoint of step " + std::to_string(step) +
                             " was not saved: " + error.what());
  }
  // Only now may older ones go. Later ones (of a run that was taken up again from an earlier step)
  // are neither counted nor touched.
  int64_t found = 0;
  for (const CheckpointFile& other : list_checkpoints(folder.path())) {
    if (other.step > step || !folder.owns(other.path.filename().string())) continue;
    std::error_code ignored;  // an old file that stays is no reason to end a training
    if (++found > keep) fs::remove(other.path, ignored);
  }
  return path;
}

Checkpoint::Checkpoint(const fs::path& path) : file_(path, O_RDONLY, "read") {
  with_way_out(path, [&] {
    header_ = read_safetensors_header(path);
    summary_ = checked_summary(path, file_, header_);
  });
}

void Checkpoint::load(const std::vector<TensorRef>& tensors,
                      const std::string& ignored_prefix) const {
  require_tensors(file_.path(), header_, tensors, ignored_prefix);
  for (const TensorRef& tensor : tensors) {
    const TensorInfo& info = *header_.find(tensor.name);
    file_.read_at(info.begin, tensor.data, static_cast<size_t>(info.end - info.begin));
  }
}

CheckpointSummary read_checkpoint(const fs::path& path) {
  return Checkpoint(path).summary();
}

CheckpointSummary load_checkpoint(const fs::path& path, const std::vector<TensorRef>& tensors,
                                  const std::string& ignored_prefix,
                                  const std::function<void(const CheckpointSummary&)>& check) {
  const Checkpoint checkpoint(path);
  if (check) check(checkpoint.summary());
  checkpoint.load(tensors, ignored_prefix);
  return checkpoint.summary();
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
    text += (text.empty() ? "" : "; ") + change.name + ": " + change.saved.dump() +
            " in the checkpoint, " + change.now.dump() + " now";
  if (!text.empty())
    throw app::WrongUsage("cannot resume from " + checkpoint.string() +
                          " with changed options: " + text);
}

}  // namespace tilemoe::train
