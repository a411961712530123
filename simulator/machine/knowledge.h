// The events that a thread knows to have happened, as vector clocks. An agent is anything
// that accesses memory independently: a thread, its cp.async copies, an operation of the async
// proxy. Each agent counts its epochs; an access of epoch e happened before everything that knows e
// of its agent.
#pragma once

#include <boost/smart_ptr/intrusive_ptr.hpp>
#include <boost/smart_ptr/intrusive_ref_counter.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace tilemoe::simulator {

using Epoch = uint32_t;

// The epochs of a cluster's agents, by their numbers in it. Copies share their epochs until one
// changes: after a barrier of a block all of its threads know the same.
class Clock {
 public:
  Epoch of(size_t agent) const {
    return epochs_ && agent < epochs_->of.size() ? epochs_->of[agent] : 0;
  }
  void raise(size_t agent, Epoch epoch);
  void join(const Clock& other);
  // Joins only the agents in [first, end).
  void join(const Clock& other, size_t first, size_t end);
  bool same_as(const Clock& other) const { return epochs_ == other.epochs_; }

 private:
  struct Epochs : boost::intrusive_ref_counter<Epochs, boost::thread_unsafe_counter> {
    std::vector<Epoch> of;
  };
  // Epochs that no other clock shares, of at least `agents` agents.
  std::vector<Epoch>& own(size_t agents);

  boost::intrusive_ptr<Epochs> epochs_;
};

// Clocks of other clusters of the same launch, by the cluster's first block.
using Foreign = std::map<uint32_t, Clock>;

struct Knowledge {
  Clock clock;
  // The ordinary writes that are visible to the async proxy as well.
  Clock fenced;
  // What other threads' tcgen05 instructions may follow, once those have passed their fence.
  Clock tensor;
  // Blocks below this number belong to launches that have ended before.
  uint32_t first_concurrent_block = 0;
  std::shared_ptr<const Foreign> foreign;

  void join(const Knowledge& other);
};

}  // namespace tilemoe::simulator
