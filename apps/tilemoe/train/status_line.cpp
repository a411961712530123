#include "status_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "text_format.h"

namespace tilemoe::train {
namespace {

constexpr std::chrono::milliseconds kTerminalInterval{100};
constexpr std::chrono::seconds kPlainInterval{5};
constexpr int kPlainWidth = 100;
constexpr int kNarrowestBar = 10, kWidestBar = 40;
constexpr char kEraseLine[] = "\r\x1b[K";

int terminal_width(std::FILE* out) {
  constexpr int kUsualWidth = 80;
  winsize size{};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsualWidth;
  return size.ws_col;
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

std::string Countdown::left(double done) const {
  const std::chrono::duration<double> spent = StatusLine::Clock::now() - start_;
  return short_duration(spent.count() / done * (1 - done)) + " left";
}

std::string status_text(const std::vector<std::string>& parts, double done, int width) {
  const auto room = static_cast<size_t>(std::max(width, 0));
  std::string line = parts.front().substr(0, room);
  for (size_t i = 1; i < parts.size(); ++i) {
    if (line.size() + 2 + parts[i].size() > room) return line;
    line.append("  ").append(parts[i]);
  }

  constexpr size_t kBrackets = 3;  // "[", "]" and a space
  if (line.size() + kBrackets + kNarrowestBar > room) return line;
  const size_t cells = std::min<size_t>(room - line.size() - kBrackets, kWidestBar);
  const auto filled = static_cast<size_t>(std::clamp(done, 0.0, 1.0) * static_cast<double>(cells));
  std::string bar = "[";
  bar.append(filled, '#').append(cells - filled, '.').append("] ");
  return bar.append(line);
}

StatusLine::StatusLine(std::FILE* out)
    : out_(out), terminal_(::isatty(::fileno(out)) != 0), last_drawn_(Clock::now()) {}

StatusLine::~StatusLine() {
  if (!line_.empty()) std::fputs("\n", out_);
  std::fflush(out_);
}

bool StatusLine::due() const {
  const auto interval = terminal_ ? Clock::duration(kTerminalInterval) : kPlainInterval;
  return Clock::now() - last_drawn_ >= interval;
}

void StatusLine::draw(const std::vector<std::string>& parts, double done, bool must) {
  if (!must && !due()) return;
  last_drawn_ = Clock::now();
  // The last column stays free: some terminals wrap as soon as it is written.
  const int width = terminal_ ? terminal_width(out_) - 1 : kPlainWidth;
  const std::string line = status_text(parts, done, width);
  if (terminal_) {
    line_ = line;
    std::fprintf(out_, "%s%s", kEraseLine, line.c_str());
  } else {
    std::fprintf(out_, "%s\n", line.c_str());
  }
  std::fflush(out_);
}

void StatusLine::note(const std::string& line) {
  if (line_.empty())
    std::fprintf(out_, "%s\n", line.c_str());
  else
    std::fprintf(out_, "%s%s\n%s", kEraseLine, line.c_str(), line_.c_str());
  std::fflush(out_);
}

void StatusLine::clear() {
  if (line_.empty()) return;
  line_.clear();
  std::fputs(kEraseLine, out_);
  std::fflush(out_);
}

}  // namespace tilemoe::train
