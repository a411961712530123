// Any bytes as a checkpoint, with the hash that they have (a fuzzer does not guess one), and what
// the command line does with its state.
#include <stdexcept>

#include "fuzz_file.h"
#include "train/checkpoint.h"
#include "train/sha256.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace tilemoe::train;
  std::string file = file_of(data, bytes);
  const std::string key = "\"file_sha256\":\"";
  if (const size_t at = file.find(key); at != file.npos && at + key.size() + 64 <= file.size()) {
    file.replace(at + key.size(), 64, std::string(64, '0'));
    Sha256 hash;
    hash.update(file.data(), file.size());
    file.replace(at + key.size(), 64, hash.hex());
  }
  const auto path = file_with(file);
  float weights[4] = {};
  try {
    const CheckpointSummary summary = read_checkpoint(path);
    if (summary.step < 0 || summary.weights < 0) std::abort();
    changed_options(summary.state, {{"step", 1}});
    load_checkpoint(path, {{"w", {4}, weights}}, "optimizer.");
  } catch (const std::runtime_error&) {
  }
  return 0;
}
