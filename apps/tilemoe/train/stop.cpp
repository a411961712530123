#include "stop.h"

#include <csignal>

namespace tilemoe::train {
namespace {

struct Taken {
  int signal;
  struct sigaction earlier {};
};

volatile std::sig_atomic_t received = 0, pipe_closed = 0;
Taken taken[] = {{SIGINT}, {SIGTERM}, {SIGHUP}, {SIGPIPE}, {SIGXFSZ}};

bool is_ignored(const Taken& one) {
  return (one.earlier.sa_flags & SA_SIGINFO) == 0 && one.earlier.sa_handler == SIG_IGN;
}

bool is_stop_request(int signal) {
  return signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
}

// From here on a second signal ends the process.
void remember(int signal) {
  if (received == 0) received = signal;
  if (signal == SIGPIPE) pipe_closed = 1;
  if (!is_stop_request(signal)) return;
  struct sigaction end {};
  end.sa_handler = SIG_DFL;
  for (const Taken& one : taken)
    if (is_stop_request(one.signal) && !is_ignored(one)) sigaction(one.signal, &end, nullptr);
}

}  // namespace

StopSignal::StopSignal() {
  received = 0;
  pipe_closed = 0;
  for (Taken& one : taken) {
    sigaction(one.signal, nullptr, &one.earlier);
    if (is_ignored(one)) continue;
    struct sigaction action {};
    action.sa_handler = remember;
    if (one.signal == SIGXFSZ) action.sa_handler = SIG_IGN;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    sigaction(one.signal, &action, nullptr);
  }
}

// Output that stdio still has for a closed pipe is written when the process ends; that must not be
// how it ends.
StopSignal::~StopSignal() {
  for (Taken& one : taken) {
    if (one.signal == SIGPIPE && pipe_closed) one.earlier.sa_handler = SIG_IGN;
    sigaction(one.signal, &one.earlier, nullptr);
  }
}

bool StopSignal::requested() const {
  return received != 0;
}

int StopSignal::signal() const {
  return static_cast<int>(received);
}

}  // namespace tilemoe::train
