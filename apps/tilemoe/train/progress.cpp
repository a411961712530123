#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace tilemoe::train {
namespace {

constexpr std::chrono::milliseconds kTerminalInterval{100};
constexpr std::chrono::seconds kPlainInterval{5};
constexpr int kPlainWidth = 100;
constexpr int kNarrowestBar = 10, kWidestBar = 40;
constexpr char kEraseLine[] = "\r\x1b[K";

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[96];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

int terminal_width(std::FILE* out) {
  constexpr int kUsualWidth = 80;
  winsize size{};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsualWidth;
  return size.ws_col;
}

std::string short_count(double value) {
  if (!std::isfinite(value)) return "?";
  if (value >= 1e6) return format("%.2fM", value / 1e6);
  if (value >= 1e3) return format("%.1fk", value / 1e3);
  return format("%.0f", value);
}

}  // namespace

std::string short_duration(double seconds) {
  constexpr double kLongest = 1e7;  // about four months
  if (!std::isfinite(seconds) || seconds < 0 || seconds > kLongest) return "?";
  const auto whole = static_cast<long>(std::lround(seconds));
  if (whole < 60) return format("%lds", whole);
  if (whole < 3600) return format("%ldm%02lds", whole / 60, whole % 60);
  return format("%ldh%02ldm", whole / 3600, whole % 3600 / 60);
}

std::string progress_line(const StepReport& report, int64_t total, double seconds_left, int width) {
  const auto room = static_cast<size_t>(std::max(width, 0));
  // In the order in which they may be left out: the last ones first.
  const std::vector<std::string> parts = {
      format("step %lld/%lld", static_cast<long long>(report.step), static_cast<long long>(total)),
      format("loss %.4f", report.loss),
      format("%.3f bits/byte", report.loss / std::numbers::ln2),
      short_duration(seconds_left) + " left",
      short_count(report.tokens_per_second) + " tokens/s",
  };
  std::string line = parts.front().substr(0, room);
  for (size_t i = 1; i < parts.size(); ++i) {
    if (line.size() + 2 + parts[i].size() > room) return line;
    line.append("  ").append(parts[i]);
  }

  constexpr size_t kBrackets = 3;  // "[", "]" and a space
  if (line.size() + kBrackets + kNarrowestBar > room) return line;
  const size_t cells = std::min<size_t>(room - line.size() - kBrackets, kWidestBar);
  const double done = total > 0 ? static_cast<double>(report.step) / static_cast<double>(total) : 1;
  const auto filled = static_cast<size_t>(std::clamp(done, 0.0, 1.0) * static_cast<double>(cells));
  std::string bar = "[";
  bar.append(filled, '#').append(cells - filled, '.').append("] ");
  return bar.append(line);
}

Progress::Progress(int64_t first, int64_t total, std::FILE* out)
    : out_(out),
      terminal_(::isatty(::fileno(out)) != 0),
      first_(first),
      total_(total),
      start_(Clock::now()),
      last_drawn_(start_) {}

Progress::~Progress() {
  if (!bar_.empty()) std::fputs("\n", out_);
  std::fflush(out_);
}

void Progress::update(const StepReport& report) {
  const auto now = Clock::now();
  const auto interval = terminal_ ? Clock::duration(kTerminalInterval) : kPlainInterval;
  const bool first_line = report.step == first_ + 1;
  if (now - last_drawn_ < interval && report.step < total_ && !first_line) return;
  last_drawn_ = now;

  const std::chrono::duration<double> spent = now - start_;
  const auto steps_done = static_cast<double>(report.step - first_);
  const double left = spent.count() / steps_done * static_cast<double>(total_ - report.step);
  // The last column stays free: some terminals wrap as soon as it is written.
  const int width = terminal_ ? terminal_width(out_) - 1 : kPlainWidth;
  if (terminal_) {
    bar_ = progress_line(report, total_, left, width);
    std::fprintf(out_, "%s%s", kEraseLine, bar_.c_str());
  } else {
    std::fprintf(out_, "%s\n", progress_line(report, total_, left, width).c_str());
  }
  std::fflush(out_);
}

void Progress::note(const std::string& line) {
  if (bar_.empty())
    std::fprintf(out_, "%s\n", line.c_str());
  else
    std::fprintf(out_, "%s%s\n%s", kEraseLine, line.c_str(), bar_.c_str());
  std::fflush(out_);
}

}  // namespace tilemoe::train
