/// @file
/// Errors of the C++ interface: every call throws tilemoe::Error if the C interface returns an
/// error status.
#pragma once

#include <stdexcept>
#include <string>

#include "tilemoe/tilemoe.h"

namespace tilemoe {

/// Reason of an error: a tilemoe_status except success.
enum class Status : int {
  kInvalidArgument = TILEMOE_INVALID_ARGUMENT,
  kUnsupported = TILEMOE_UNSUPPORTED,
  kDeviceError = TILEMOE_DEVICE_ERROR,
  kInternalError = TILEMOE_INTERNAL_ERROR,
};

/// Exception of every failed call. `what()` is the message of tilemoe_last_error(), with the shape
/// seen, file and line.
class Error : public std::runtime_error {
 public:
  /// Makes an error with a status and a message.
  Error(Status status, const std::string& what) : std::runtime_error(what), status_(status) {}
  /// Returns the status of the call.
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

/// Throws Error with the message of tilemoe_last_error() unless `status` is success.
inline void check(tilemoe_status status) {
  if (status != TILEMOE_SUCCESS) throw Error(static_cast<Status>(status), tilemoe_last_error());
}

}  // namespace tilemoe
