// Checkpoints: one safetensors file a step, `step-00001234.safetensors`, in the run's folder. It
// holds the weights under their plain names, the optimiser's tensors under `optimizer.`, and in its
// metadata the format, its version, a SHA-256 of the data and the trainer's state as JSON (step,
// random state, data position, configuration, SHA-256 of the text).
//
// A file appears under its own name only when all of it is on the disk: it is written beside,
// synced, renamed, and the folder synced. So whatever ends the process, every checkpoint in the
// folder is whole, and the newest is the last one whose save returned (or one whose rename had just
// passed).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tilemoe::train {

class File;

// float32 tensors of the trainer; saving reads them, loading writes them.
struct TensorRef {
  std::string name;
  std::vector<int64_t> shape;
  float* data = nullptr;
};

// A run's folder, made if missing, and ours alone: a second process that opens it is told so. What
// an interrupted save left there is removed.
class RunFolder {
 public:
  explicit RunFolder(std::filesystem::path path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::unique_ptr<File> lock_;
};

struct CheckpointFile {
  int64_t step = 0;
  std::filesystem::path path;
};

// The checkpoints of a folder, newest first; empty when the folder is not there.
std::vector<CheckpointFile> list_checkpoints(const std::filesystem::path& folder);

// What --resume PATH means: a file is itself, a folder its newest checkpoint. Throws
// std::runtime_error when there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

// Saves, then removes all but the newest `keep` checkpoints. On any failure (a full disk, say)
// throws std::runtime_error with the reason; the unfinished file is gone and the earlier ones are
// intact.
std::filesystem::path save_checkpoint(const RunFolder& folder, int64_t step,
                                      const std::vector<TensorRef>& tensors,
                                      const nlohmann::json& state, int keep);

// The state alone, with the header checked: what a resuming trainer needs to build its tensors.
nlohmann::json read_checkpoint_state(const std::filesystem::path& path);

// Fills `tensors` and returns the state. Everything is checked (header, names, types, shapes,
// SHA-256 of the data) before the first of the caller's bytes is written. Tensors of the file that
// are not asked for are an error unless they begin with `ignored_prefix` ("optimizer." to take the
// weights alone). Throws std::runtime_error naming the file, what is wrong with it and, where an
// older checkpoint lies beside it, how to go on from that.
nlohmann::json load_checkpoint(const std::filesystem::path& path,
                               const std::vector<TensorRef>& tensors,
                               const std::string& ignored_prefix = "");

// One changed option; a value that one side lacks is null.
struct OptionChange {
  std::string name;
  nlohmann::json saved;
  nlohmann::json now;
};

// The keys (nested ones joined by dots) in which two configurations differ, by name.
std::vector<OptionChange> changed_options(const nlohmann::json& saved, const nlohmann::json& now);

// Throws std::runtime_error naming every changed option with both values, unless there is none.
void require_same_options(const nlohmann::json& saved, const nlohmann::json& now,
                          const std::filesystem::path& checkpoint);

}  // namespace tilemoe::train
