#include "progress.h"

#include <cmath>
#include <numbers>
#include <numeric>

#include "text_format.h"

namespace tilemoe::train {
namespace {

std::string short_count(double value) {
  if (!std::isfinite(value)) return "?";
  if (value >= 1e6) return format("%.2fM", value / 1e6);
  if (value >= 1e3) return format("%.1fk", value / 1e3);
  return format("%.0f", value);
}

}  // namespace

void RunningMean::add(double value) {
  values_.push_back(value);
  if (count() > kMax) values_.pop_front();
}

double RunningMean::mean() const {
  return std::accumulate(values_.begin(), values_.end(), 0.0) / static_cast<double>(count());
}

std::vector<std::string> step_parts(const StepReport& report, int64_t total,
                                    const RunningMean& loss, const std::string& left) {
  const std::string steps =
      loss.count() == 1 ? "this step"
                        : format("mean of the last %d steps", static_cast<int>(loss.count()));
  return {
      format("step %lld/%lld", static_cast<long long>(report.step), static_cast<long long>(total)),
      format("%.3f bits/byte (%s)", loss.mean() / std::numbers::ln2, steps.c_str()),
      left,
      short_count(report.tokens_per_second) + " tokens/s",
  };
}

Progress::Progress(const Course& course, std::FILE* out) : course_(course), line_(out) {}

void Progress::update(const StepReport& report) {
  loss_.add(report.loss);
  note_duration(report.step);
  const auto part = [](int64_t steps, int64_t of) {
    return static_cast<double>(steps) / static_cast<double>(of);
  };
  const bool must = report.step == course_.first + 1 || report.step >= course_.total;
  if (!must && !line_.due()) return;
  const double done_now = part(report.step - course_.first, course_.total - course_.first);
  line_.draw(step_parts(report, course_.total, loss_, left_.left(done_now)),
             part(report.step, course_.total), must);
}

// The first step is slower than all others.
void Progress::note_duration(int64_t step) {
  constexpr int64_t kMeasured = 5;
  constexpr double kLongEnough = 2;  // seconds
  const auto now = StatusLine::Clock::now();
  const int64_t measured = step - course_.first - 1, left = course_.total - step;
  if (measured == 0) after_first_step_ = now;
  if (!after_first_step_ || measured == 0) return;
  const double seconds = std::chrono::duration<double>(now - *after_first_step_).count();
  if (measured < kMeasured && seconds < kLongEnough) return;
  after_first_step_.reset();
  const double a_step = seconds / static_cast<double>(measured);
  note(format("about %s left: %lld steps and the evaluation",
              short_duration(a_step * (static_cast<double>(left) + course_.evaluations)).c_str(),
              static_cast<long long>(left)));
}

void Progress::evaluating(double done) {
  if (done == 0) evaluation_left_ = {};
  if (!line_.due()) return;
  line_.draw({format("evaluating %.0f %%", 100 * done), evaluation_left_.left(done)}, done);
}

}  // namespace tilemoe::train
