// A run's folder, and what is written down there about the run itself: `run.json`, which names the
// checkpoints that the run has saved and the options that it continues with.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

namespace tilemoe::train {

class File;

// Made if missing, and for one process alone: a second one that opens it gets an error. Files that
// an interrupted save left there are removed.
class RunFolder {
 public:
  explicit RunFolder(std::filesystem::path path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  // The options that a run in `folder` continues with, {"keep": 3, ...}; an empty object if none
  // are written down. Throws std::runtime_error if run.json is damaged.
  static nlohmann::json options_of(const std::filesystem::path& folder);
  // Writes them down, here and with every checkpoint from now on.
  void set_options(nlohmann::json options);

  // Whether a file of that name is a checkpoint of this run: only such a one may be replaced or
  // removed.
  bool owns(const std::string& name) const { return checkpoints_.contains(name); }
  // Makes it one, before the file exists: whatever ends the process, no checkpoint of the run is
  // taken for somebody else's.
  void claim(const std::string& name);

 private:
  void write_down() const;

  std::filesystem::path path_;
  std::unique_ptr<File> lock_;
  nlohmann::json options_ = nlohmann::json::object();
  std::set<std::string> checkpoints_;
};

}  // namespace tilemoe::train
