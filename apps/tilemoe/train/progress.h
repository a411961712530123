// What a person sees of a running training: one bar at the bottom of a terminal, or a plain line
// every few seconds where the output is a file or a pipe.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace tilemoe::train {

struct StepReport {
  int64_t step = 0;  // steps done
  double loss = 0;   // nats a byte, of this step or smoothed
  double tokens_per_second = 0;
};

class Progress {
 public:
  // `total` steps of which `first` are already done (a resumed run).
  Progress(int64_t first, int64_t total, std::FILE* out = stdout);
  ~Progress();  // leaves the cursor on a fresh line

  // Draws at most ten times a second (a plain line at most every five), and always the last step.
  void update(const StepReport& report);
  // A line of its own above the bar, e.g. "step 600: held-out 1.84 bits a byte".
  void note(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;

  std::FILE* out_;
  bool terminal_;
  int64_t first_, total_;
  Clock::time_point start_, last_drawn_;
  std::string bar_;  // what stands on the last line of the terminal
};

// The text of a bar of at most `width` columns; parts that do not fit are left out, the bar first.
std::string progress_line(const StepReport& report, int64_t total, double seconds_left, int width);
// "42s", "3m07s", "2h05m"; "?" for what is not finite.
std::string short_duration(double seconds);

}  // namespace tilemoe::train
