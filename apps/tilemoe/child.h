// A program that may hang or crash, run beside this one without harm to it.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace tilemoe::app {

struct ChildEnd {
  enum class How {
    kExited,    // with the status `number`
    kSignalled  // by the signal `number`
  };
  How how = How::kExited;
  int number = 0;
  bool silent = false;  // it was killed, after it had been silent for too long

  // "signal 11 (Segmentation fault)"
  std::string signal_name() const;
};

// Runs `command`, a program's path and its arguments, with an empty standard input. `on_line` gets
// each whole line of its standard output, and says whether that is a sign of life. A child that
// gives none for `most_silent` is killed, with whatever it started; time in which this program was
// stopped does not count. Where this program ends before its child, in whatever way, the system
// kills the child.
//
// Throws std::runtime_error where the child cannot be started.
ChildEnd run_child(const std::vector<std::string>& command, std::chrono::milliseconds most_silent,
                   const std::function<bool(const std::string& line)>& on_line);

}  // namespace tilemoe::app
