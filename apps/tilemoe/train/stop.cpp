#include "stop.h"

#include <csignal>

namespace tilemoe::train {
namespace {

volatile std::sig_atomic_t received = 0;
struct sigaction earlier_interrupt, earlier_terminate, earlier_file_size;

// SA_RESETHAND gives the signal back to the system as soon as this runs, so that a second one ends
// the process; the other signal is given back here.
void remember(int signal) {
  received = signal;
  struct sigaction end {};
  end.sa_handler = SIG_DFL;
  sigaction(signal == SIGINT ? SIGTERM : SIGINT, &end, nullptr);
}

}  // namespace

StopSignal::StopSignal() {
  received = 0;
  struct sigaction action {};
  action.sa_handler = remember;
  sigemptyset(&action.sa_mask);
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, &earlier_interrupt);
  sigaction(SIGTERM, &action, &earlier_terminate);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &ignore, &earlier_file_size);
}

StopSignal::~StopSignal() {
  sigaction(SIGINT, &earlier_interrupt, nullptr);
  sigaction(SIGTERM, &earlier_terminate, nullptr);
  sigaction(SIGXFSZ, &earlier_file_size, nullptr);
}

bool StopSignal::requested() const {
  return received != 0;
}

int StopSignal::signal() const {
  return static_cast<int>(received);
}

}  // namespace tilemoe::train
