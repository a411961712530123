// The exit statuses of `tilemoe`, the same for every command.
#pragma once

#include <stdexcept>

namespace tilemoe::app {

constexpr int kDone = 0;
constexpr int kFailed = 1;      // the work could not be done, or was found wanting
constexpr int kWrongUsage = 2;  // the command line is wrong; nothing was done
// Plus the number of the signal that ended the work, as a shell reports it.
constexpr int kEndedBySignal = 128;

constexpr char kExitStatusHelp[] =
    "Exit status: 0 done; 1 the work failed; 2 wrong usage; 128 and the number of the signal that "
    "ended it: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 141 closed pipe.";

// The command line is wrong: one sentence that names the option. Ends with kWrongUsage.
struct WrongUsage : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace tilemoe::app
