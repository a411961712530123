#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace tilemoe::train {
namespace {

// One call moves at most this much (Linux itself stops at 2 GiB - 4 KiB).
constexpr size_t kLargestTransfer = size_t{1} << 30;

[[noreturn]] void fail_with(const char* what, const std::filesystem::path& path, int error) {
  throw std::runtime_error(std::string("cannot ") + what + " " + path.string() + ": " +
                           std::generic_category().message(error));
}

}  // namespace

File::File(std::filesystem::path path, int flags, const char* what, unsigned mode)
    : path_(std::move(path)) {
  do {
    descriptor_ = ::open(path_.c_str(), flags | O_CLOEXEC, mode);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) fail(what);
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

uint64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("read");
  return static_cast<uint64_t>(status.st_size);
}

bool File::is_regular() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("read");
  return S_ISREG(status.st_mode);
}

void File::read_at(uint64_t offset, void* data, size_t bytes) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got =
        ::pread(descriptor_, to, std::min(bytes, kLargestTransfer), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read");
    if (got == 0) throw std::runtime_error("cannot read " + path_.string() + ": it ends too early");
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
}

void File::write(const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::write(descriptor_, from, std::min(bytes, kLargestTransfer));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("write");
    from += put;
    bytes -= static_cast<size_t>(put);
  }
}

void File::truncate(uint64_t bytes) {
  if (::ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) fail("shorten");
}

void File::sync() {
  if (::fsync(descriptor_) != 0 && errno != EINVAL) fail("write");
}

void File::close() {
  // Whatever close says, the descriptor is gone.
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("write");
}

void File::fail(const char* what) const {
  fail_with(what, path_, errno);
}

void sync_folder(const std::filesystem::path& folder) {
  File(folder, O_RDONLY | O_DIRECTORY, "open the folder").sync();
}

void write_whole(const std::filesystem::path& path, const std::function<void(File&)>& write) {
  std::filesystem::path unfinished = path;
  unfinished += kUnfinishedSuffix;
  // An existing file may be a link to elsewhere, or belong to somebody else.
  File file(unfinished, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, "write");
  try {
    write(file);
    file.sync();
    file.close();
    std::filesystem::rename(unfinished, path);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    std::filesystem::remove(unfinished, ignored);
    throw;
  }
  const std::filesystem::path folder = path.parent_path();
  sync_folder(folder.empty() ? "." : folder);
}

}  // namespace tilemoe::train
