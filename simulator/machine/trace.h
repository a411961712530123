// What happened, in the order of simulated time: a digest of it and, on request, the events, drawn
// as a table of warps over time.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tilemoe::simulator {

enum class Note : uint8_t {
  kBlockStarts,
  kBlockEnds,
  kTurn,       // a warp runs
  kLanded,     // what it copied
  kArrive,     // at a barrier of shared memory
  kPhaseEnds,  // of one
  kWait,       // for a phase
  kPassed,     // it
  kBlockBarrier,
  kCopy,  // starts an asynchronous copy
  kMma,
  kStore,  // starts an asynchronous store
};

struct TraceEvent {
  uint64_t time;
  uint32_t launch;
  uint32_t block;  // in the grid
  uint32_t warp;
  Note note;
  uint32_t detail;  // a barrier's address
};

class Trace {
 public:
  void keep(bool wanted) { kept_ = wanted; }
  bool kept() const { return kept_; }
  void name_launch(uint32_t launch, const std::string& kernel);
  void note(uint32_t launch, uint32_t block, uint32_t warp, Note note, uint32_t detail);
  uint64_t digest() const { return digest_; }
  uint64_t time() const { return time_; }
  void clear();
  // Draws every launch, block by block: one line per stage of its ring and one per warp, time from
  // left to right in `columns` columns. A kernel without a pipeline has one line.
  void draw(std::ostream& out, int columns) const;

 private:
  bool kept_ = false;
  uint64_t digest_ = 0xcbf29ce484222325, time_ = 0;
  std::vector<TraceEvent> events_;
  std::vector<std::pair<uint32_t, std::string>> names_;
};

}  // namespace tilemoe::simulator
