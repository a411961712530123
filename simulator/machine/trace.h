// What happened, in the order of simulated time: a digest of all of it, and where it is asked for
// the events themselves, drawn as a table of warps over time.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tilemoe::simulator {

enum class Note : uint8_t {
  kBlockStarts,
  kBlockEnds,
  kTurn,       // a warp goes on
  kLanded,     // what it copied
  kArrive,     // at a barrier of shared memory
  kPhaseEnds,  // of one
  kWait,       // for a phase
  kPassed,     // it
  kBlockBarrier,
  kCopy,  // starts an asynchronous copy
  kProduct,
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
  // Every launch, block by block: a line a stage of its ring and a line a warp, time from left to
  // right in `columns` columns. Of kernels without a pipeline a line says that they ran.
  void draw(std::ostream& out, int columns) const;

 private:
  bool kept_ = false;
  uint64_t digest_ = 0xcbf29ce484222325, time_ = 0;
  std::vector<TraceEvent> events_;
  std::vector<std::pair<uint32_t, std::string>> names_;
};

}  // namespace tilemoe::simulator
