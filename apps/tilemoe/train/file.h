// Files by descriptor, with errors that name the file and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>

namespace tilemoe::train {

class File {
 public:
  // `flags` and `mode` as for open(2); throws std::runtime_error "cannot <what> <path>: <reason>".
  File(std::filesystem::path path, int flags, const char* what, unsigned mode = 0666);
  ~File();
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  File& operator=(File&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }

  uint64_t size() const;
  // Not a device, a pipe or a folder: what is written stays, and can be read again and cut.
  bool is_regular() const;
  // Reads all `bytes` at `offset`; a shorter file is an error.
  void read_at(uint64_t offset, void* data, size_t bytes) const;
  // Writes all `bytes` at the file's position.
  void write(const void* data, size_t bytes);
  void truncate(uint64_t bytes);
  // Returns when all is on the disk; at once if it has no disk (a pipe, a folder of /proc).
  void sync();
  // Closes now, so that an error which the system kept for this moment is not lost.
  void close();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path path_;
  int descriptor_ = -1;
};

// Makes what was renamed or removed in a folder last.
void sync_folder(const std::filesystem::path& folder);

// A file appears under its own name, in place of an earlier one, only when all that `write` gives
// it is on the disk: it is written next to it with the suffix below, synced, renamed, and the
// folder synced. On any failure throws std::runtime_error, and all is as it was.
void write_whole(const std::filesystem::path& path, const std::function<void(File&)>& write);
constexpr char kUnfinishedSuffix[] = ".unfinished";

}  // namespace tilemoe::train
