// The progress of a running training for a person: steps, evaluations, and how long they take.
#pragma once

#include <cstdint>
#include <cstdio>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "status_line.h"

namespace tilemoe::train {

// The mean of the last values, of fewer at first: it neither starts at zero nor
// remembers what was before.
class RunningMean {
 public:
  static constexpr int64_t kMax = 20;

  void add(double value);
  double mean() const;
  int64_t count() const { return std::ssize(values_); }

 private:
  std::deque<double> values_;
};

struct StepReport {
  int64_t step = 0;  // steps done
  double loss = 0;   // nats a byte, of this step
  double tokens_per_second = 0;
};

// The work before a training.
struct Course {
  int64_t first = 0;       // steps done already (a resumed run)
  int64_t total = 0;       // steps of the whole
  double evaluations = 0;  // what evaluating takes in all, in steps
};

class Progress {
 public:
  explicit Progress(const Course& course, std::FILE* out = stdout);

  // Shows the first step, the last, and as many in between as StatusLine does. After a few steps it
  // notes once how long the whole takes.
  void update(const StepReport& report);
  // The same of an evaluation of which the part `done` is behind; it begins with 0.
  void evaluating(double done);
  // A line of its own, e.g. "step 600: validation 1.8400 bits per byte".
  void note(const std::string& line) { line_.note(line); }

 private:
  void note_duration(int64_t step);

  Course course_;
  StatusLine line_;
  Countdown left_, evaluation_left_;
  RunningMean loss_;
  std::optional<StatusLine::Clock::time_point> after_first_step_;  // none once the note is made
};

// The parts of the line of a step: "step 300/600", "2.000 bits/byte (mean of the last 20 steps)".
std::vector<std::string> step_parts(const StepReport& report, int64_t total,
                                    const RunningMean& loss, const std::string& left);

}  // namespace tilemoe::train
