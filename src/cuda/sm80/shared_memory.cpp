#include "cuda/sm80/shared_memory.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "check.h"

namespace tilemoe::cuda::sm80 {
namespace {

// INT_MAX: not set.
int shared_kib_asked_for() {
  const char* const text = std::getenv("TILEMOE_SHARED_KIB");
  if (text == nullptr || *text == '\0') return INT_MAX;
  int kib = 0;
  const char* const end = text + std::strlen(text);
  const auto read = std::from_chars(text, end, kib);
  TILEMOE_CHECK(read.ec == std::errc() && read.ptr == end && kib >= 99 && kib <= 227,
                "TILEMOE_SHARED_KIB is '" << text << "', expected a number of KiB from 99 to 227");
  return kib;
}

}  // namespace

int shared_bytes_of_block(const DeviceInfo& device) {
  const int kib = shared_kib_asked_for();
  return kib == INT_MAX ? device.shared_bytes : std::min(device.shared_bytes, kib * 1024);
}

}  // namespace tilemoe::cuda::sm80
