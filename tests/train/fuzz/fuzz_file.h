// A file of the fuzzer's bytes, for what reads files by name.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

namespace tilemoe::train {

// The same one for every input, gone with the process.
inline std::filesystem::path file_with(std::string_view bytes) {
  struct Temporary {
    Temporary() {
      if ((descriptor = ::mkstemp(path.data())) < 0) std::abort();
    }
    ~Temporary() { ::unlink(path.c_str()); }
    std::string path = std::filesystem::temp_directory_path() / "tilemoe-fuzz-XXXXXX";
    int descriptor = -1;
  };
  static const Temporary file;
  if (::ftruncate(file.descriptor, 0) != 0 || ::pwrite(file.descriptor, bytes.data(), bytes.size(),
                                                       0) != static_cast<ssize_t>(bytes.size()))
    std::abort();
  return file.path;
}

// The bytes as a file that begins with its header's length. A fuzzer that changes the header's size
// does not mend the length, so one beyond any file's (its last byte not 0) becomes that of the header
// up to its last brace.
inline std::string file_of(const uint8_t* data, size_t bytes) {
  constexpr size_t kField = 8;
  std::string file(reinterpret_cast<const char*>(data), bytes);
  if (bytes < kField || file[kField - 1] == 0) return file;
  const size_t brace = file.rfind('}');
  const uint64_t length = brace == file.npos || brace < kField ? 0 : brace + 1 - kField;
  for (size_t i = 0; i < kField; ++i) file[i] = static_cast<char>(length >> (8 * i) & 0xff);
  return file;
}

}  // namespace tilemoe::train
