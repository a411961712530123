#include "simulator/machine/finding.h"

#include <link.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <sstream>

namespace tilemoe::simulator {
namespace {

uintptr_t program_begin() {
  static const uintptr_t begin = [] {
    uintptr_t found = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* to) {
          *static_cast<uintptr_t*>(to) = info->dlpi_addr;
          return 1;  // the program is the first
        },
        &found);
    return found;
  }();
  return begin;
}

// The lines that addr2line prints for an address: a function, then its file and line, for each level
// of inlining.
std::vector<std::string> addr2line(uintptr_t address) {
  std::ostringstream command;
  command << "addr2line -Cfi -e /proc/" << getpid() << "/exe 0x" << std::hex << address
          << " 2>/dev/null";
  std::vector<std::string> lines;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.str().c_str(), "r"), pclose);
  if (!pipe) return lines;
  std::array<char, 4096> buffer;
  std::string line;
  while (std::fgets(buffer.data(), buffer.size(), pipe.get())) {
    line += buffer.data();
    if (line.back() != '\n') continue;
    line.pop_back();
    lines.push_back(std::move(line));
    line.clear();
  }
  return lines;
}

std::string without_folders(const std::string& path) {
  const size_t slash = path.rfind('/');
  std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  const size_t space = name.find(' ');  // "(discriminator 3)"
  return space == std::string::npos ? name : name.substr(0, space);
}

// "void tilemoe::cuda::sm80::grouped_gemm<...>(...)" to "sm80::grouped_gemm".
std::string without_arguments(std::string name) {
  std::string short_name;
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name.compare(i, 21, "(anonymous namespace)") == 0) {
      i += 22;  // with the colons
      continue;
    }
    const char c = name[i];
    if (c == '<') ++depth;
    if (depth == 0) {
      if (c == '(') break;
      short_name += c;
    }
    if (c == '>') --depth;
  }
  const size_t space = short_name.rfind(' ');
  if (space != std::string::npos) short_name.erase(0, space + 1);
  for (const char* prefix : {"tilemoe::", "cuda::"})
    if (short_name.rfind(prefix, 0) == 0) short_name.erase(0, std::string(prefix).size());
  return short_name;
}

}  // namespace

const char* name_of(FindingKind kind) {
  switch (kind) {
    case FindingKind::kReadBeforeWrite: return "read before it landed";
    case FindingKind::kWriteOverWrite: return "two writes that nothing orders";
    case FindingKind::kOverwrittenInUse: return "overwritten while in use";
    case FindingKind::kMissingProxyFence: return "missing fence.proxy.async";
    case FindingKind::kNeverWritten: return "never written";
    case FindingKind::kOutOfBounds: return "out of bounds";
    case FindingKind::kBarrierMisuse: return "barrier misused";
    case FindingKind::kTensorMemory: return "tensor memory misused";
    case FindingKind::kDeadlock: return "deadlock";
    case FindingKind::kDivergence: return "lanes do not meet";
    case FindingKind::kLaunch: return "impossible launch";
  }
  return "";
}

std::string describe(const Finding& finding) {
  std::ostringstream text;
  text << name_of(finding.kind) << ": " << finding.what << "\n  kernel " << finding.kernel
       << ", block " << finding.block << ", thread " << finding.thread;
  if (!finding.address.empty()) text << ", " << finding.address;
  text << "\n  at    " << finding.site;
  if (!finding.other.empty())
    text << "\n  after " << finding.other << " by " << finding.other_thread;
  return text.str();
}

std::string describe_site(uint32_t site) {
  static std::map<uint32_t, std::string> known;
  const auto found = known.find(site);
  if (found != known.end()) return found->second;
  std::string text;
  const std::vector<std::string> lines =
      addr2line(site - 1);  // a return address: the call is before
  for (size_t i = 1; i < lines.size() && i < 16; i += 2) {
    if (!text.empty()) text += " < ";
    text += without_folders(lines[i]);
  }
  return known[site] = text.empty() ? "an unknown place" : text;
}

std::string describe_kernel(const void* kernel) {
  static std::map<const void*, std::string> known;
  const auto found = known.find(kernel);
  if (found != known.end()) return found->second;
  const uintptr_t address = reinterpret_cast<uintptr_t>(kernel) - program_begin();
  const std::vector<std::string> lines = addr2line(address);
  return known[kernel] = lines.empty() ? "an unknown kernel" : without_arguments(lines[0]);
}

uint32_t site_of(const void* return_address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(return_address) - program_begin());
}

}  // namespace tilemoe::simulator
