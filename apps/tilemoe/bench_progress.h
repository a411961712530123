// How far a benchmark is, on standard error: its numbers are on standard output.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "train/status_line.h"

namespace tilemoe::app {

class BenchProgress {
 public:
  // `rounds` rounds of the case of that name.
  BenchProgress(std::string name, int rounds) : name_(std::move(name)), rounds_(rounds) {
    line_.draw({name_ + ": warming up"}, 0);
  }
  ~BenchProgress() { finish(); }
  void finish() { line_.clear(); }

  // Before each round; the first sets the clock.
  void next_round() {
    if (done_ == 0) left_ = {};
    const double part = static_cast<double>(done_) / rounds_;
    std::vector<std::string> parts = {name_ + ": round " + std::to_string(done_ + 1) + "/" +
                                      std::to_string(rounds_)};
    if (done_ > 0) parts.push_back(left_.left(part));
    line_.draw(parts, part);
    ++done_;
  }

 private:
  std::string name_;
  int rounds_;
  int done_ = 0;
  train::StatusLine line_{stderr};
  train::Countdown left_;
};

}  // namespace tilemoe::app
