// The training log: JSON lines, one object a line, each handed to the system at once. Lines of one
// step carry it as "step" (the number of steps done), in ascending order. The trainer writes all
// lines of a step, and has them on the disk, before it saves that step's checkpoint.
//   {"event":"start", "config":{...}, "text":{...}, "version":...}   a run begins
//   {"event":"resume", "step":600, "checkpoint":"..."}             it continues from a checkpoint,
//    and if options have changed:
//    "changed":{"steps":{"from":600, "to":2000}}
//   {"event":"step", "step":1, "loss":..., "lr":..., "grad_norm":..., "tokens_per_s":...,
//    "expert_load":[[...E numbers...], ...one list a layer]}         tokens an expert got
//   {"event":"eval", "step":600, "loss":..., "bits_per_byte":...}    the validation text
//   {"event":"end", "step":600, "reason":"done" | "stopped"}
// Losses are in nats a byte. A number that is not finite is null.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "file.h"

namespace tilemoe::train {

class JsonLog {
 public:
  // An empty log. The file's contents are lost if it was a log; any other text is an error.
  static JsonLog create(const std::filesystem::path& path);
  // Continues after step `step`: lines of later steps, and a last line cut short, are removed. A
  // missing file is an empty one. Throws std::runtime_error naming any other line that is broken,
  // the file left as it was.
  static JsonLog resume(const std::filesystem::path& path, int64_t step);

  // Throws std::runtime_error when the line cannot be written whole.
  void write(const nlohmann::ordered_json& line);
  // Returns when all lines are on the disk.
  void sync();

 private:
  explicit JsonLog(const std::filesystem::path& path);

  File file_;
};

}  // namespace tilemoe::train
