// The training log: JSON lines, one object a line, each handed to the system at once. Lines of one
// step carry it as "step" (the number of steps done), in ascending order. The trainer writes all
// lines of a step before it saves that step's checkpoint.
//   {"event":"start", "config":{...}, "text":{...}, "version":...}   a run begins
//   {"event":"resume", "step":600, "checkpoint":"..."}               it goes on from a checkpoint
//   {"event":"step", "step":1, "loss":..., "lr":..., "grad_norm":..., "tokens_per_s":...,
//    "expert_load":[[...E numbers...], ...one list a layer]}         tokens an expert got
//   {"event":"eval", "step":600, "loss":..., "bits_per_byte":...}    the held-out text
//   {"event":"end", "step":600, "reason":"done" | "stopped"}
// Losses are in nats a byte. A number that is not finite is null.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <utility>

#include "file.h"

namespace tilemoe::train {

class JsonLog {
 public:
  // An empty log; what the file held is lost.
  static JsonLog create(const std::filesystem::path& path);
  // Goes on after step `step`: lines of later steps, and a last line cut short, are removed. A
  // missing file is an empty one.
  static JsonLog resume(const std::filesystem::path& path, int64_t step);

  // Throws std::runtime_error when the line cannot be written whole.
  void write(const nlohmann::ordered_json& line);

 private:
  explicit JsonLog(File file) : file_(std::move(file)) {}

  File file_;
};

}  // namespace tilemoe::train
