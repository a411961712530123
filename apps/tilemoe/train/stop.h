// Ctrl-C, SIGTERM, the end of the terminal (SIGHUP) and of the program that reads our output
// (SIGPIPE): the first one makes the trainer save and end well, a second one ends it at once, but
// for SIGPIPE, which comes with every line. A limit on the size of files (SIGXFSZ), which would end
// it too, becomes an error of the write. Signals that are ignored at the start (nohup) stay so.
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
  // The signal's number, 0 if none came.
  int signal() const;
};

}  // namespace tilemoe::train
