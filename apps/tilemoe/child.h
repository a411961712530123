// Work in a child process, which a crash or a kernel that hangs ends alone.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace tilemoe::app {

struct ChildEnd {
  bool hung = false;  // killed, after it had been silent for too long
  int signal = 0;     // that ended it; 0: it exited with `status`
  int status = 0;

  // "crashed by signal 11 (Segmentation fault)"
  std::string words() const;
};

using Emit = std::function<void(const std::string& line)>;

// Calls `work` in a child of this process, which must not have used a GPU before. `on_line` gets each
// line that `work` emits, in this process. A child that emits none for `max_silence` is killed.
ChildEnd run_child(std::chrono::milliseconds max_silence,
                   const std::function<void(const Emit& emit)>& work, const Emit& on_line);

}  // namespace tilemoe::app
