#include "child.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace tilemoe::app {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kCannotStart = 127;          // as a shell has it
constexpr milliseconds kLook = 50ms;       // between two looks at the child
constexpr milliseconds kMostElapsed = 1s;  // between two looks; what is longer, we were stopped for
constexpr milliseconds kLeave = 10s;  // for a killed child to go; in a driver's hands it may never
constexpr size_t kMostBytes = 1 << 20;  // of a line

[[noreturn]] void fail(const char* what) {
  throw std::runtime_error(std::string(what) + ": " + std::generic_category().message(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void close() {
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

// In the child, after fork(): system calls and nothing else.
[[noreturn]] void become(char* const* arguments, int input, int output, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(kCannotStart);  // it ended before
  if (::dup2(input, STDIN_FILENO) >= 0 && ::dup2(output, STDOUT_FILENO) >= 0)
    ::execv(arguments[0], arguments);
  ::_exit(kCannotStart);
}

class Process {
 public:
  Process(const std::vector<std::string>& command, int input, int output) {
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    std::signal(SIGCHLD, SIG_DFL);  // ignored, it would take the child's end from us
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) fail("cannot start a process");
    if (pid_ == 0) become(arguments.data(), input, output, parent);
    ::setpgid(pid_, pid_);  // whoever of the two is first
  }
  ~Process() { kill(); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Whether it ended by itself. It stays a zombie until kill(), so that its number is not another's.
  bool ended() const {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid_;
  }
  // Ends it and what it started, and returns its status as waitpid() has it; -1 where it does not
  // go away.
  int kill() {
    if (pid_ < 0) return status_;
    ::kill(-pid_, SIGKILL);
    for (const auto until = Clock::now() + kLeave; Clock::now() < until;) {
      const pid_t reaped = ::waitpid(pid_, &status_, WNOHANG);
      if (reaped == pid_) break;
      status_ = -1;
      std::this_thread::sleep_for(kLook / 10);
    }
    pid_ = -1;
    return status_;
  }

 private:
  pid_t pid_ = -1;
  int status_ = -1;
};

// The whole lines of what arrives, piece by piece.
class Lines {
 public:
  // Takes what there is to be read; false at its end.
  bool read(int descriptor) {
    std::array<char, 4096> piece;
    for (;;) {
      const ssize_t got = ::read(descriptor, piece.data(), piece.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno == EAGAIN;
      if (got == 0) return false;
      text_.append(piece.data(), static_cast<size_t>(got));
      if (text_.size() > kMostBytes) return true;
    }
  }
  // Whether one of them was a sign of life.
  bool give(const std::function<bool(const std::string&)>& on_line) {
    bool alive = false;
    size_t at = 0;
    for (size_t end; (end = text_.find('\n', at)) != text_.npos; at = end + 1)
      alive |= on_line(text_.substr(at, end - at));
    text_.erase(0, at);
    if (text_.size() > kMostBytes) text_.clear();
    return alive;
  }

 private:
  std::string text_;
};

ChildEnd end_of(int status, bool silent) {
  if (status >= 0 && WIFEXITED(status))
    return {.how = ChildEnd::How::kExited, .number = WEXITSTATUS(status), .silent = silent};
  return {.how = ChildEnd::How::kSignalled,
          .number = status >= 0 ? WTERMSIG(status) : SIGKILL,
          .silent = silent};
}

}  // namespace

std::string ChildEnd::signal_name() const {
  return "signal " + std::to_string(number) + " (" + ::strsignal(number) + ")";
}

ChildEnd run_child(const std::vector<std::string>& command, milliseconds most_silent,
                   const std::function<bool(const std::string& line)>& on_line) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail("cannot make a pipe");
  const Descriptor output(ends[0]);
  Descriptor written(ends[1]);
  const Descriptor nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (nothing.get() < 0) fail("cannot open /dev/null");
  if (::fcntl(output.get(), F_SETFL, O_NONBLOCK) != 0) fail("cannot read a pipe");
  Process process(command, nothing.get(), written.get());
  written.close();

  Lines lines;
  bool open = true, spoke = false;
  milliseconds silent = 0ms;
  for (auto last = Clock::now();;) {
    pollfd ready{.fd = open ? output.get() : -1, .events = POLLIN, .revents = 0};
    ::poll(&ready, 1, static_cast<int>(kLook.count()));
    const bool ended = process.ended();  // before its last words are read, which it then has said
    if (open) open = lines.read(output.get());
    const bool alive = lines.give(on_line);
    spoke |= alive;
    if (ended) break;
    const auto now = Clock::now();
    const auto elapsed = std::chrono::duration_cast<milliseconds>(now - std::exchange(last, now));
    silent = alive ? 0ms : silent + std::min(elapsed, kMostElapsed);
    if (silent >= most_silent) return end_of(process.kill(), true);
  }
  const ChildEnd end = end_of(process.kill(), false);
  if (!spoke && end.how == ChildEnd::How::kExited && end.number == kCannotStart)
    throw std::runtime_error("cannot start " + command.front());
  return end;
}

}  // namespace tilemoe::app
