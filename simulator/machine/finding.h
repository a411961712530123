// The simulator's findings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tilemoe::simulator {

enum class FindingKind {
  kReadBeforeWrite,    // read before it landed, or without waiting for it
  kWriteOverWrite,     // two writes that nothing orders
  kOverwrittenInUse,   // overwritten while a reader may be under way
  kMissingProxyFence,  // an ordinary write that the async proxy uses without fence.proxy.async
  kNeverWritten,       // memory read that nobody has written
  kOutOfBounds,
  kBarrierMisuse,
  kTensorMemory,  // allocated, freed or left in a way that is not allowed
  kDeadlock,
  kDivergence,  // lanes of a warp that do not meet
  kLaunch,      // a launch that every GPU refuses
};
const char* name_of(FindingKind kind);

struct Finding {
  FindingKind kind;
  std::string kernel;
  std::string block, thread;  // "(3, 0)", "17"
  std::string address;        // "shared 0x1a40", "array 3 (4096 bytes) + 132"; empty: none
  std::string what;           // in words
  std::string site, other;    // "sm80.h:112 < sm80.h:251 < ..."; `other` may be empty
  std::string other_thread;   // who made the other access
};
std::string describe(const Finding& finding);

// A place of the program's code, bytes from its beginning, as the source lines of it: the innermost
// first, then the callers that it was inlined into. Runs addr2line.
std::string describe_site(uint32_t site);
// A kernel's name without its arguments.
std::string describe_kernel(const void* kernel);

// A return address as bytes from the program's beginning.
uint32_t site_of(const void* return_address);

}  // namespace tilemoe::simulator
