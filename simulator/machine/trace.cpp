#include "simulator/machine/trace.h"

#include <algorithm>
#include <map>
#include <ostream>
#include <set>
#include <string_view>

namespace tilemoe::simulator {
namespace {

using Events = std::vector<TraceEvent>;  // of one block, in order

// A line of a drawing; each column stands for several events.
class Line {
 public:
  Line(size_t columns, size_t events) : text_(columns, ' '), events_(events) {}
  size_t column(size_t event) const { return event * text_.size() / events_; }
  // If several share a column, the one further back in kLetters wins.
  void put(size_t event, char letter) {
    char& at = text_[column(event)];
    if (kLetters.find(letter) > kLetters.find(at)) at = letter;
  }
  void fill(size_t from, size_t to, char letter) {
    for (size_t i = column(from), end = std::min(column(to), text_.size()); i < end; ++i)
      if (text_[i] == ' ') text_[i] = letter;
  }
  const std::string& text() const { return text_; }

 private:
  static constexpr std::string_view kLetters = " .-|SL#";
  std::string text_;
  size_t events_;
};

// A stage of a ring: the barrier at which copies land, and the one that releases the stage.
struct Stage {
  uint32_t full, empty;
};

constexpr uint32_t kNoBarrier = UINT32_MAX;

std::vector<Stage> stages_of(const Events& events) {
  std::set<uint32_t> full, empty;
  for (const TraceEvent& event : events) {
    if (event.note == Note::kLanded) full.insert(event.detail);
    if (event.note == Note::kArrive || event.note == Note::kPhaseEnds) empty.insert(event.detail);
  }
  for (const uint32_t barrier : full) empty.erase(barrier);
  // A ring uses its stages from the first on; the last ones may not be released.
  std::vector<Stage> stages;
  if (empty.size() > full.size()) return stages;
  auto free = empty.begin();
  for (const uint32_t barrier : full)
    stages.push_back({barrier, free == empty.end() ? kNoBarrier : *free++});
  return stages;
}

std::string draw_stage(const Stage& stage, const Events& events, size_t columns) {
  Line line(columns, events.size());
  char state = ' ';
  size_t since = 0;
  const auto change = [&](size_t at, char to) {
    line.fill(since, at, state);
    state = to;
    since = at;
  };
  for (size_t i = 0; i < events.size(); ++i) {
    const auto [time, launch, block, warp, note, barrier] = events[i];
    if (barrier == stage.full && note == Note::kPhaseEnds)
      change(i, '=');
    else if (barrier == stage.full && (note == Note::kArrive || note == Note::kLanded) &&
             state == ' ')
      change(i, '~');
    else if (barrier == stage.empty && note == Note::kPhaseEnds)
      change(i, ' ');
  }
  line.fill(since, events.size(), state);
  return line.text();
}

char letter_of(Note note) {
  switch (note) {
    case Note::kTurn: return '-';
    case Note::kBlockBarrier: return '|';
    case Note::kStore: return 'S';
    case Note::kCopy: return 'L';
    case Note::kMma: return '#';
    default: return ' ';
  }
}

std::string draw_warp(uint32_t warp, const Events& events, size_t columns) {
  Line line(columns, events.size());
  size_t waits_since = events.size();
  for (size_t i = 0; i < events.size(); ++i) {
    const TraceEvent& event = events[i];
    if (event.warp != warp) continue;
    line.put(i, letter_of(event.note));
    if (event.note == Note::kWait) waits_since = i;
    if (event.note == Note::kPassed) line.fill(std::min(waits_since, i), i, '.');
    if (event.note == Note::kPassed) waits_since = events.size();
  }
  line.fill(waits_since, events.size(), '.');
  return line.text();
}

// A warp's role, from what it does.
std::string role_of(uint32_t warp, const Events& events) {
  bool loads = false, multiplies = false, stores = false;
  for (const TraceEvent& event : events) {
    if (event.warp != warp) continue;
    loads = loads || event.note == Note::kCopy;
    multiplies = multiplies || event.note == Note::kMma;
    stores = stores || event.note == Note::kStore;
  }
  std::string role = loads ? " loads" : "";
  if (multiplies) role += " multiplies";
  if (stores) role += " stores";
  return role.empty() ? " idle" : role;
}

void draw_block(std::ostream& out, uint32_t block, const Events& events, size_t columns) {
  constexpr size_t kLabel = 34;
  const auto line = [&](std::string label, const std::string& text) {
    label.resize(kLabel, ' ');
    out << label << text << "\n";
  };
  out << " block " << block << ", a column is " << (events.size() + columns - 1) / columns
      << " events\n";
  const std::vector<Stage> stages = stages_of(events);
  for (size_t i = 0; i < stages.size(); ++i)
    line("  stage " + std::to_string(i), draw_stage(stages[i], events, columns));
  std::set<uint32_t> warps;
  for (const TraceEvent& event : events)
    if (event.note == Note::kTurn) warps.insert(event.warp);
  for (const uint32_t warp : warps)
    line("  warp " + std::to_string(warp) + role_of(warp, events),
         draw_warp(warp, events, columns));
}

}  // namespace

void Trace::name_launch(uint32_t launch, const std::string& kernel) {
  names_.emplace_back(launch, kernel);
}

void Trace::note(uint32_t launch, uint32_t block, uint32_t warp, Note note, uint32_t detail) {
  ++time_;
  for (const uint64_t word : {uint64_t{launch} << 32 | block,
                              uint64_t{warp} << 8 | static_cast<uint64_t>(note), uint64_t{detail}})
    digest_ = (digest_ ^ word) * 0x100000001b3, digest_ ^= digest_ >> 29;
  if (kept_) events_.push_back({time_, launch, block, warp, note, detail});
}

void Trace::clear() {
  events_.clear();
  names_.clear();
  digest_ = 0xcbf29ce484222325, time_ = 0;
}

void Trace::draw(std::ostream& out, int columns) const {
  out << "time goes from left to right, separately in each block\n"
         "  stage: ~ loading   = full       warp: L starts a copy   # multiplies   S starts a "
         "store\n"
         "                                        - runs   . waits for a stage   | block "
         "barrier\n";
  for (const auto& [launch, kernel] : names_) {
    std::map<uint32_t, Events> blocks;
    bool has_pipeline = false;
    for (const TraceEvent& event : events_) {
      if (event.launch != launch) continue;
      blocks[event.block].push_back(event);
      has_pipeline = has_pipeline || event.note == Note::kLanded;
    }
    out << "\n"
        << launch << ": " << kernel << ", " << blocks.size()
        << (blocks.size() == 1 ? " block" : " blocks") << (has_pipeline ? "" : ", no pipeline")
        << "\n";
    if (!has_pipeline) continue;
    for (const auto& [block, events] : blocks)
      draw_block(out, block, events, static_cast<size_t>(columns));
  }
}

}  // namespace tilemoe::simulator
