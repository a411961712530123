// A line with the progress of something: redrawn at the bottom of a terminal, or a plain line
// every few seconds if the output is a file or a pipe.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

namespace tilemoe::train {

class StatusLine {
 public:
  using Clock = std::chrono::steady_clock;

  explicit StatusLine(std::FILE* out = stdout);
  ~StatusLine();  // leaves the cursor on a fresh line
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  // Whether draw() would do something: ten times a second at most, a plain line every five.
  bool due() const;
  // `parts` in the order in which they may be left out, the last ones first; `done` in [0, 1].
  // Draws at once if it `must`.
  void draw(const std::vector<std::string>& parts, double done, bool must = false);
  // A line of its own above that one.
  void note(const std::string& line);
  // Takes the line away from a terminal.
  void clear();

 private:
  std::FILE* out_;
  bool terminal_;
  Clock::time_point last_drawn_;
  std::string line_;  // what stands on the last line of the terminal
};

// The text of a line of at most `width` columns; parts that do not fit are left out, the bar first.
std::string status_text(const std::vector<std::string>& parts, double done, int width);

// The time left of work that began when this was made.
class Countdown {
 public:
  // "12s left", by the time that the part `done` of it took.
  std::string left(double done) const;

 private:
  StatusLine::Clock::time_point start_ = StatusLine::Clock::now();
};

// "42s", "3m07s", "2h05m"; "?" for what is not finite.
std::string short_duration(double seconds);

}  // namespace tilemoe::train
