// Workers and the threads that they run.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <cstring>
#include <new>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {
namespace {

thread_local Thread* running = nullptr;

// The thread-local variables of the program, which are its `__shared__` ones and few others.
struct StaticWindow {
  std::byte* begin = nullptr;
  size_t bytes = 0;
};

StaticWindow static_window() {
  StaticWindow window;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_TLS)
            *static_cast<StaticWindow*>(to) = {static_cast<std::byte*>(info->dlpi_tls_data),
                                               info->dlpi_phdr[i].p_memsz};
        return 1;  // the program is the first
      },
      &window);
  return window;
}

// A stack that somebody else owns.
struct BorrowedStack {
  void deallocate(boost::context::stack_context&) noexcept {}
};

std::byte* reserve(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

constexpr uint32_t kMaxThreads = 1024;

}  // namespace

const Registers& registers() {
  return *running->registers;
}

Thread* Machine::current() {
  return running;
}

Worker::Worker(Machine& machine)
    : machine_(machine),
      shared_(reserve(kReservedShared + kMaxDynamic)),
      stacks_(reserve(kMaxThreads * kStackBytes)),
      thread_([this] { work(); }) {
  done_.acquire();
}

Worker::~Worker() {
  stop_ = true;
  go_.release();
  thread_.join();
  munmap(shared_, kReservedShared + kMaxDynamic);
  munmap(stacks_, kMaxThreads * kStackBytes);
}

void Worker::run_slice(uint32_t turns) {
  turns_ = turns;
  go_.release();
  done_.acquire();
}

void Worker::start(Block& started) {
  const dim3 size = started.launch->shape.block;
  // NaN in every type, so that reads of what nobody has written show.
  std::memset(dynamic(), 0xff, started.dynamic_bytes);
  const size_t cells = started.shared_bytes / 4 + 1;
  if (cells_.size() < cells) cells_.resize(cells);
  const uint32_t count = size.x * size.y * size.z;
  for (uint32_t i = 0; i < count; ++i) {
    Thread& thread = started.threads.emplace_back();
    if (i % kLanes == 0) {
      Warp& warp = started.warps.emplace_back();
      warp.block = &started;
      warp.index = i / kLanes;
    }
    thread.block = &started;
    thread.warp = &started.warps.back();
    thread.index = i;
    thread.lane = i % kLanes;
    thread.warp->lanes.push_back(&thread);
    thread.stack = stack(i);
    std::byte* const top = thread.stack + kStackBytes - sizeof(Registers) / 64 * 64 - 64;
    thread.registers = new (top) Registers{{i % size.x, i / size.x % size.y, i / (size.x * size.y)},
                                           started.index,
                                           size,
                                           started.launch->shape.grid};
    const boost::context::stack_context context = [&] {
      boost::context::stack_context stack_context;
      stack_context.size = static_cast<size_t>(top - thread.stack);
      stack_context.sp = top;
      return stack_context;
    }();
    thread.self = boost::context::fiber(
        std::allocator_arg, boost::context::preallocated(context.sp, context.size, context),
        BorrowedStack(), [this, &thread](boost::context::fiber&& back) {
          thread.back = std::move(back);
          const Launch& launch = *thread.block->launch;
          launch.run(launch.call.get());
          thread.inside_machine = true;
          machine_.thread_ended(thread);
          return std::move(thread.back);
        });
  }
  for (Warp& warp : started.warps) {
    warp.listed = true;
    started.runnable.push_back(&warp);
  }
}

void Worker::work() {
  const StaticWindow window = static_window();
  statics_ = window.begin;
  static_bytes_ = window.bytes;
  done_.release();
  while (true) {
    go_.acquire();
    if (stop_) return;
    Random& random = machine_.random();
    while (turns_ > 0 && block->can_run() && !machine_.aborting()) {
      --turns_;
      const auto events = static_cast<uint32_t>(block->events.size());
      if (events > 0 && (block->runnable.empty() || random.one_in(block->launch->lateness))) {
        const uint32_t which = random.below(events);
        const Event event = std::move(block->events[which]);
        block->events[which] = std::move(block->events.back());
        block->events.pop_back();
        try {
          event.happen();
        } catch (const EventAborted&) {  // the machine ends all
        }
        continue;
      }
      run_warp(take_warp());
    }
    done_.release();
  }
}

Warp& Worker::take_warp() {
  std::vector<Warp*>& runnable = block->runnable;
  auto which = runnable.begin();
  if (machine_.schedule() == Schedule::kAny) {
    which += machine_.random().below(static_cast<uint32_t>(runnable.size()));
  } else {
    const auto warps = static_cast<uint32_t>(block->warps.size());
    const auto turn = [&](const Warp* warp) {  // the lowest one runs first
      return machine_.rank(warp->index / kGroup) * warps +
             (warp->index + warps - block->last_turn - 1) % warps;
    };
    which = std::min_element(runnable.begin(), runnable.end(),
                             [&](const Warp* a, const Warp* b) { return turn(a) < turn(b); });
    block->last_turn = (*which)->index;
  }
  Warp& warp = **which;
  *which = runnable.back();
  runnable.pop_back();
  warp.listed = false;
  return warp;
}

// Runs until all lanes wait for others, or the warp's turn ends; by rank or in step a turn runs
// each lane once.
void Worker::run_warp(Warp& warp) {
  machine_.trace().note(block->launch->number, block->linear, warp.index, Note::kTurn, 0);
  const auto lanes = static_cast<uint32_t>(warp.lanes.size());
  const bool once = machine_.schedule() != Schedule::kAny;
  uint32_t left = once ? lanes : 1 + machine_.random().below(8 * kLanes);
  // In either direction, from any lane on.
  const bool in_step = machine_.schedule() == Schedule::kInStep;
  const uint32_t first = in_step ? 0 : machine_.random().below(lanes);
  const bool down = !in_step && machine_.random().one_in(2);
  bool ran = true;
  while (ran) {
    ran = false;
    for (uint32_t i = 0; i < lanes; ++i) {
      const uint32_t at = down ? (first + lanes - i) % lanes : (first + i) % lanes;
      Thread& thread = *warp.lanes[at];
      if (thread.state != Thread::State::kRunnable) continue;
      if (left == 0) {
        if (!warp.listed) warp.listed = true, block->runnable.push_back(&warp);
        return;
      }
      --left;
      ran = true;
      running = &thread;
      thread.self = std::move(thread.self).resume();
      running = nullptr;
      if (machine_.aborting()) return;
    }
    if (ran && once) {
      if (!warp.listed) warp.listed = true, block->runnable.push_back(&warp);
      return;
    }
  }
}

void Machine::wait(Thread& thread, const char* for_what, uint32_t site) {
  thread.state = Thread::State::kBlocked;
  thread.waits_for = for_what;
  thread.site = site;
  thread.back = std::move(thread.back).resume();
}

void Machine::leave(Thread& thread) {
  while (true) thread.back = std::move(thread.back).resume();
}

void Machine::wake(Thread& thread) {
  if (thread.state != Thread::State::kBlocked) return;
  thread.state = Thread::State::kRunnable;
  Warp& warp = *thread.warp;
  if (warp.listed) return;
  warp.listed = true;
  warp.block->runnable.push_back(&warp);
}

// Lets others run first.
void Machine::yield(Thread& thread) {
  thread.back = std::move(thread.back).resume();
}

}  // namespace tilemoe::simulator
