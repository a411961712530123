// fuzz_seeds FOLDER: what the fuzzers begin with, in FOLDER/<target>. Without it they would have to
// guess the keys of a checkpoint, and the interface's would make calls of three bytes.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>

#include "train/checkpoint.h"
#include "train/log.h"
#include "train/run_folder.h"
#include "train/safetensors.h"

namespace tilemoe::train {
namespace {

namespace fs = std::filesystem;

void write(const fs::path& path, const std::string& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The header's length is to follow its text: see file_of in fuzz_file.h.
std::string with_open_length(std::string bytes) {
  bytes.at(7) = '\xff';
  return bytes;
}

void write_checkpoints(const fs::path& folder, const fs::path& scratch) {
  float weights[4] = {1, 2, 3, 4}, moments[4] = {};
  const nlohmann::json options = {{"lr", 1e-3}, {"seed", 7}, {"layers", {{"count", 2}}}};
  RunFolder run(scratch);
  for (const int64_t step : {0, 1, 20}) {
    const fs::path file =
        save_checkpoint(run, step, {{"w", {4}, weights}, {"optimizer.m.w", {2, 2}, moments}},
                        {{"step", step}, {"config", options}, {"list", {1, "a", nullptr}}}, 3);
    write(folder / ("whole-" + std::to_string(step)), read(file));
    write(folder / ("open-" + std::to_string(step)), with_open_length(read(file)));
  }
}

void write_safetensors(const fs::path& folder) {
  const float numbers[6] = {};
  const std::string header = safetensors_header(
      {{"a", "F32", {2, 3}, numbers}, {"b", "BF16", {}, numbers}, {"c", "I64", {0}, numbers}},
      {{"format", "pt"}});
  const std::string file = header + std::string(26, '\1');
  write(folder / "whole", file);
  write(folder / "open", with_open_length(file));
}

// The target's first byte is the step to continue from.
void write_logs(const fs::path& folder, const fs::path& scratch) {
  JsonLog log = JsonLog::create(scratch);
  log.write({{"event", "start"}, {"config", {{"lr", 1e-3}}}});
  for (int step = 1; step <= 4; ++step)
    log.write({{"event", "step"}, {"step", step}, {"loss", 5.5}, {"expert_load", {{3, 5}}}});
  log.write({{"event", "end"}, {"step", 4}, {"reason", "done"}});
  const std::string text = read(scratch);
  write(folder / "whole", "\2" + text);
  write(folder / "cut", "\4" + text.substr(0, text.size() - 9));
}

void write_calls(const fs::path& folder) {
  for (unsigned seed = 0; seed < 32; ++seed) {
    std::mt19937 generator(seed);
    std::string bytes(1024, '\0');
    for (char& byte : bytes) byte = static_cast<char>(generator());
    write(folder / std::to_string(seed), bytes);
  }
}

void write_seeds(const fs::path& folder) {
  const fs::path scratch = folder / "scratch";
  fs::create_directories(scratch);
  write_checkpoints(folder / "checkpoint", scratch / "run");
  write_safetensors(folder / "safetensors");
  write_logs(folder / "log", scratch / "log.jsonl");
  write_calls(folder / "c_interface");
  fs::remove_all(scratch);
}

}  // namespace
}  // namespace tilemoe::train

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds FOLDER\n");
    return 2;
  }
  try {
    tilemoe::train::write_seeds(arguments[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
