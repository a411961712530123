// Checkpoints: one safetensors file a step, `step-00001234.safetensors`, in the run's folder. It
// holds the weights under their plain names, the optimiser's tensors under `optimizer.`, and in its
// metadata the format, its version, the trainer's state as JSON (step, random state, data position,
// configuration, SHA-256 of the text), and `file_sha256`: the SHA-256 of the whole file, from its
// first byte to its last, with zeros for this field's 64 digits. Version 1 had a hash of the data
// alone; it is refused.
//
// A file appears under its own name only when all of it is on the disk (write_whole). So whatever
// ends the process, every checkpoint in the folder is whole, and the newest is the last one whose
// save returned (or one whose rename had just passed).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/file.h"
#include "train/safetensors.h"

namespace tilemoe::train {

class RunFolder;

// float32 tensors of the trainer; saving reads them, loading writes them.
struct TensorRef {
  std::string name;
  std::vector<int64_t> shape;
  float* data = nullptr;
};

struct CheckpointFile {
  int64_t step = 0;
  std::filesystem::path path;
};

bool is_checkpoint_name(const std::filesystem::path& path);

// The checkpoints of a folder, newest first; empty if the folder does not exist.
std::vector<CheckpointFile> list_checkpoints(const std::filesystem::path& folder);

// The file of --resume PATH: a file is itself, a folder means its newest checkpoint. Throws
// std::runtime_error if there is no checkpoint.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

// Saves, then removes all but the newest `keep` of the run's own checkpoints. On any failure (a
// full disk, say) throws std::runtime_error with the reason; the unfinished file is gone and the
// earlier ones are intact. A file of that name which is not the run's own is such a failure.
std::filesystem::path save_checkpoint(RunFolder& folder, int64_t step,
                                      const std::vector<TensorRef>& tensors,
                                      const nlohmann::json& state, int64_t keep);

// Facts that a resuming trainer reads before it builds its tensors.
struct CheckpointSummary {
  nlohmann::json state;
  int64_t step = 0;
  int64_t weights = 0;  // numbers in the tensors that are not the optimiser's
};

// An open checkpoint, the whole of which was checked: header, SHA-256, that the state's step is the
// one in the file's name (if that is the name of a checkpoint). Whatever takes the file's place
// later, this is the one that is read.
class Checkpoint {
 public:
  // Throws std::runtime_error naming the file, what is wrong with it and, if an older checkpoint
  // lies next to it, how to continue from that.
  explicit Checkpoint(const std::filesystem::path& path);

  const CheckpointSummary& summary() const { return summary_; }
  // Fills `tensors`. Names, types and shapes are checked before the first of the caller's bytes is
  // written. Tensors of the file that are not in `tensors` are an error unless they begin with
  // `ignored_prefix` (kOptimizerPrefix to take the weights alone). Throws std::runtime_error.
  void load(const std::vector<TensorRef>& tensors, const std::string& ignored_prefix = "") const;

 private:
  File file_;
  SafetensorsHeader header_;
  CheckpointSummary summary_;
};
constexpr char kOptimizerPrefix[] = "optimizer.";

CheckpointSummary read_checkpoint(const std::filesystem::path& path);

// All of that in one call; what `check` throws comes before the first of the caller's bytes is
// written, too.
CheckpointSummary load_checkpoint(const std::filesystem::path& path,
                                  const std::vector<TensorRef>& tensors,
                                  const std::string& ignored_prefix = "",
                                  const std::function<void(const CheckpointSummary&)>& check = {});

// One changed option; a value that one side lacks is null.
struct OptionChange {
  std::string name;
  nlohmann::json saved;
  nlohmann::json now;
};

// The keys (nested ones joined by dots) in which two configurations differ, by name.
std::vector<OptionChange> changed_options(const nlohmann::json& saved, const nlohmann::json& now);

// Throws app::WrongUsage naming every changed option with both values, if any.
void require_same_options(const nlohmann::json& saved, const nlohmann::json& now,
                          const std::filesystem::path& checkpoint);

}  // namespace tilemoe::train
