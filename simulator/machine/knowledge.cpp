#include "simulator/machine/knowledge.h"

#include <algorithm>

namespace tilemoe::simulator {

void Clock::raise(size_t agent, Epoch epoch) {
  if (of(agent) >= epoch) return;
  own(agent + 1)[agent] = epoch;
}

std::vector<Epoch>& Clock::own(size_t agents) {
  if (!epochs_) {
    epochs_ = new Epochs;
  } else if (epochs_->use_count() > 1) {
    boost::intrusive_ptr<Epochs> copy = new Epochs;
    copy->of = epochs_->of;
    epochs_ = copy;
  }
  if (epochs_->of.size() < agents) epochs_->of.resize(agents);
  return epochs_->of;
}

void Clock::join(const Clock& other) {
  if (!other.epochs_ || epochs_ == other.epochs_) return;
  if (!epochs_) {
    epochs_ = other.epochs_;
    return;
  }
  // The lanes of a warp join the same two, one after the other.
  static Clock last_a, last_b, last_joined;
  if (same_as(last_a) && other.same_as(last_b)) {
    *this = last_joined;
    return;
  }
  const Clock before = *this;
  const std::vector<Epoch>& a = epochs_->of;
  const std::vector<Epoch>& b = other.epochs_->of;
  boost::intrusive_ptr<Epochs> joined = new Epochs;
  joined->of.resize(std::max(a.size(), b.size()));
  const size_t both = std::min(a.size(), b.size());
  for (size_t i = 0; i < both; ++i) joined->of[i] = a[i] < b[i] ? b[i] : a[i];
  const std::vector<Epoch>& longer = a.size() > b.size() ? a : b;
  std::copy(longer.begin() + static_cast<std::ptrdiff_t>(both), longer.end(),
            joined->of.begin() + static_cast<std::ptrdiff_t>(both));
  epochs_ = joined;
  last_a = before;
  last_b = other;
  last_joined = *this;
}

void Clock::join(const Clock& other, size_t first, size_t end) {
  if (!other.epochs_) return;
  const std::vector<Epoch>& from = other.epochs_->of;
  end = std::min(end, from.size());
  while (first < end && of(first) >= from[first]) ++first;
  if (first >= end) return;
  std::vector<Epoch>& to = own(end);
  for (size_t agent = first; agent < end; ++agent)
    to[agent] = to[agent] < from[agent] ? from[agent] : to[agent];
}

void Knowledge::join(const Knowledge& other) {
  clock.join(other.clock);
  fenced.join(other.fenced);
  tensor.join(other.tensor);
  first_concurrent_block = std::max(first_concurrent_block, other.first_concurrent_block);
  if (!other.foreign || foreign == other.foreign) return;
  if (!foreign) {
    foreign = other.foreign;
    return;
  }
  auto joined = std::make_shared<Foreign>(*foreign);
  for (const auto& [cluster, known] : *other.foreign) (*joined)[cluster].join(known);
  foreign = std::move(joined);
}

}  // namespace tilemoe::simulator
