#include "child.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <thread>

namespace tilemoe::app {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLeave(10000);  // for a killed child to go; a driver may never release it

void write_whole(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) ::_exit(1);  // the parent has ended
    done += count > 0 ? static_cast<size_t>(count) : 0;
  }
}

[[noreturn]] void be_child(pid_t parent, int output, const std::function<void(const Emit&)>& work) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int status = ::getppid() == parent ? 0 : 1;  // the parent may have ended before
  try {
    if (status == 0) work([&](const std::string& line) { write_whole(output, line + "\n"); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tilemoe: error: %s\n", error.what());
    status = 1;
  }
  std::fflush(stdout);
  ::_exit(status);  // the parent's objects are not this process's to destroy
}

// Its status, or -1 if it does not end in time.
int await_end(pid_t child, Clock::time_point until) {
  for (int status = 0;; std::this_thread::sleep_for(milliseconds(5))) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return status;
    if ((ended < 0 && errno != EINTR) || Clock::now() > until) return -1;
  }
}

}  // namespace

std::string ChildEnd::words() const {
  if (hung) return "hung";
  if (signal != 0)
    return "crashed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
  return "ended with status " + std::to_string(status);
}

ChildEnd run_child(milliseconds max_silence, const std::function<void(const Emit& emit)>& work,
                   const Emit& on_line) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(), "pipe");
  std::fflush(nullptr);  // or the child writes it again
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    be_child(parent, ends[1], work);
  }
  const int forking = errno;
  ::close(ends[1]);
  if (child < 0) {
    ::close(ends[0]);
    throw std::system_error(forking, std::generic_category(), "fork");
  }

  std::string text;
  ChildEnd end;
  for (auto until = Clock::now() + max_silence;;) {
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now());
    pollfd ready{.fd = ends[0], .events = POLLIN, .revents = 0};
    const int count = ::poll(&ready, 1, std::max(0, static_cast<int>(left.count())));
    if (count < 0 && errno == EINTR) continue;
    if (count == 0 && Clock::now() < until) continue;
    char piece[4096];
    const ssize_t got = count > 0 ? ::read(ends[0], piece, sizeof piece) : 0;
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      end.hung = count == 0;
      break;
    }
    text.append(piece, static_cast<size_t>(got));
    for (size_t size; (size = text.find('\n')) != text.npos; text.erase(0, size + 1)) {
      on_line(text.substr(0, size));
      until = Clock::now() + max_silence;
    }
  }
  ::close(ends[0]);
  // It may have closed its output and hang all the same.
  int status = end.hung ? -1 : await_end(child, Clock::now() + max_silence);
  if (status < 0) {
    end.hung = true;
    ::kill(child, SIGKILL);
    status = await_end(child, Clock::now() + kLeave);
  }
  if (status >= 0 && WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  if (status >= 0 && WIFEXITED(status)) end.status = WEXITSTATUS(status);
  return end;
}

}  // namespace tilemoe::app
