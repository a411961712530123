// Errors of the C++ interface: every call throws tilemoe::Error if the C interface returns an error
// status.
#pragma once

#include <stdexcept>
#include <string>

#include "tilemoe/tilemoe.h"

namespace tilemoe {

enum class Status : int {
  kInvalidArgument = TILEMOE_INVALID_ARGUMENT,
  kUnsupported = TILEMOE_UNSUPPORTED,
  kDeviceError = TILEMOE_DEVICE_ERROR,
  kInternalError = TILEMOE_INTERNAL_ERROR,
};

// The reason, as a sentence with the shape seen, the file and the line.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& what) : std::runtime_error(what), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

// Throws the message of tilemoe_last_error() unless `status` is success.
inline void check(tilemoe_status status) {
  if (status != TILEMOE_SUCCESS) throw Error(static_cast<Status>(status), tilemoe_last_error());
}

}  // namespace tilemoe
