// Ctrl-C and SIGTERM: the first asks the trainer to save and end well, the second ends it at once.
// A limit on the size of files (SIGXFSZ), which would end it too, becomes an error of the write.
#pragma once

namespace tilemoe::train {

// Takes the signals while it lives; one at a time.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool requested() const;
  // The signal's number, 0 when none came.
  int signal() const;
};

}  // namespace tilemoe::train
