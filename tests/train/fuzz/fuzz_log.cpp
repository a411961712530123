// Any bytes as a log that a run continues with: either refused and left as they are, or cut to
// whole lines.
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "fuzz_file.h"
#include "train/log.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace tilemoe::train;
  if (bytes == 0) return 0;
  const int64_t step = data[0];
  const std::string before(reinterpret_cast<const char*>(data) + 1, bytes - 1);
  const auto path = file_with(before);
  bool refused = false;
  try {
    JsonLog::resume(path, step);
  } catch (const std::runtime_error&) {
    refused = true;
  }
  std::ifstream file(path, std::ios::binary);
  const std::string after{std::istreambuf_iterator<char>(file), {}};
  const bool whole = after.empty() || after.back() == '\n';
  if (refused ? after != before : !whole || !before.starts_with(after)) std::abort();
  return 0;
}
