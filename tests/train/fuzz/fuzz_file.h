// A file of the fuzzer's bytes, for what reads files by name.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace tilemoe::train {

// The same one for every input, gone with the process.
inline std::filesystem::path file_with(const uint8_t* data, size_t bytes) {
  struct Temporary {
    Temporary() {
      if ((descriptor = ::mkstemp(path.data())) < 0) std::abort();
    }
    ~Temporary() { ::unlink(path.c_str()); }
    std::string path = std::filesystem::temp_directory_path() / "tilemoe-fuzz-XXXXXX";
    int descriptor = -1;
  };
  static const Temporary file;
  if (::ftruncate(file.descriptor, 0) != 0 ||
      ::pwrite(file.descriptor, data, bytes, 0) != static_cast<ssize_t>(bytes))
    std::abort();
  return file.path;
}

}  // namespace tilemoe::train
