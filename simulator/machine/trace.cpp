#include "simulator/machine/trace.h"

#include <algorithm>
#include <map>
#include <ostream>
#include <utility>

namespace tilemoe::simulator {
namespace {

// What a column shows where several things happened in it: the rarer one.
constexpr std::pair<Note, char> kLetters[] = {
    {Note::kTurn, '-'},      {Note::kBlockStarts, '['},  {Note::kBlockEnds, ']'},
    {Note::kArrive, 'a'},    {Note::kPassed, 'p'},       {Note::kCopy, 'c'},
    {Note::kProduct, '#'},   {Note::kLanded, 'l'},       {Note::kWait, 'w'},
    {Note::kPhaseEnds, '!'}, {Note::kBlockBarrier, '|'}, {Note::kStore, 's'},
};

size_t rank_of(Note note) {
  for (size_t i = 0; i < std::size(kLetters); ++i)
    if (kLetters[i].first == note) return i;
  return 0;
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
  out << "time goes from left to right; a line is a warp\n"
         "  - runs   c starts a copy   l its copy landed   # product   s starts a store\n"
         "  w waits for a barrier   p passed it   a arrives   ! ends its phase   | block barrier\n";
  for (const auto& [launch, kernel] : names_) {
    std::map<std::pair<uint32_t, uint32_t>, std::string> lines;
    uint64_t first = UINT64_MAX, last = 0;
    for (const TraceEvent& event : events_) {
      if (event.launch != launch) continue;
      first = std::min(first, event.time);
      last = std::max(last, event.time);
    }
    if (last == 0) continue;
    const auto width = static_cast<uint64_t>(columns);
    for (const TraceEvent& event : events_) {
      if (event.launch != launch) continue;
      std::string& line = lines[{event.block, event.warp}];
      line.resize(width, ' ');
      char& at = line[(event.time - first) * width / (last - first + 1)];
      const auto* const shown = std::find_if(std::begin(kLetters), std::end(kLetters),
                                             [&](const auto& one) { return one.second == at; });
      const size_t rank = rank_of(event.note);
      if (shown == std::end(kLetters) || rank > static_cast<size_t>(shown - std::begin(kLetters)))
        at = kLetters[rank].second;
    }
    out << "\n" << launch << ": " << kernel << ", times " << first << " to " << last << "\n";
    for (const auto& [place, line] : lines)
      out << "  block " << place.first << " warp " << place.second
          << std::string(place.second < 10 ? 2 : 1, ' ') << line << "\n";
  }
}

}  // namespace tilemoe::simulator
