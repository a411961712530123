#include "cuda/verdict.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace tilemoe::cuda {
namespace {

constexpr std::string_view kFirstWords = "tilemoe verdict ";
constexpr std::string_view kVersion = "1";
constexpr size_t kMostBytes = 16 << 10;
constexpr const char* kAgain = ": run `tilemoe doctor --blackwell` again";

constexpr Outcome kOutcomes[] = {Outcome::kAgreed, Outcome::kDisagreed, Outcome::kHung,
                                 Outcome::kCrashed, Outcome::kError};

// FNV-1a in 16 hexadecimal digits. Against accidents, not against whoever may write the file.
std::string checksum(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  std::string digits(16, '0');
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit, hash >>= 4)
    *digit = "0123456789abcdef"[hash & 15];
  return digits;
}

// Errors of other libraries may have lines of their own.
std::string on_one_line(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  return text;
}

// The value of the line that starts with `name`, at the front of `rest`, which loses the line.
std::optional<std::string> take(std::string_view& rest, std::string_view name) {
  const size_t end = rest.find('\n');
  if (end == rest.npos || !rest.starts_with(name) || end <= name.size() || rest[name.size()] != ' ')
    return {};
  std::string value(rest.substr(name.size() + 1, end - name.size() - 1));
  rest.remove_prefix(end + 1);
  return value;
}

FoundVerdict none(std::string why) {
  return {.verdict = {}, .why_none = std::move(why)};
}

class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return descriptor_; }

 private:
  int descriptor_;
};

// Opened so that a pipe of that name does not wait for a writer.
FoundVerdict read(const std::string& path, const VerdictKey& key) {
  const auto unreadable = [&] {
    return none(path + " cannot be read (" + std::generic_category().message(errno) + ")");
  };
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file < 0 && (errno == ENOENT || errno == ENOTDIR))
    return none("`tilemoe doctor --blackwell` has not run on this GPU with this build and driver " +
                key.driver);
  if (file < 0) return unreadable();
  struct stat status {};
  if (::fstat(file, &status) != 0) return unreadable();
  if (!S_ISREG(status.st_mode)) return none(path + " is no plain file");
  std::string text;
  std::array<char, 4096> piece;
  for (ssize_t got = 1; got != 0;) {
    got = ::read(file, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return unreadable();
    text.append(piece.data(), static_cast<size_t>(got));
    if (text.size() > kMostBytes) return none(path + " is damaged" + kAgain);
  }
  FoundVerdict found = parse_verdict(text);
  if (!found.verdict) return none(path + " " + found.why_none);
  if (found.verdict->key != key) return none(path + " is about another GPU, driver or library");
  return found;
}

}  // namespace

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::kAgreed: return "agreed";
    case Outcome::kDisagreed: return "disagreed";
    case Outcome::kHung: return "hung";
    case Outcome::kCrashed: return "crashed";
    case Outcome::kError: return "error";
  }
  return "";
}

std::string in_words(const Verdict& verdict) {
  return verdict.what + ", on " + verdict.date + " with driver " + verdict.key.driver;
}

std::string FoundVerdict::words() const {
  return verdict ? verdict->key.kit + " " + in_words(*verdict) : why_none;
}

std::string text_of(const Verdict& verdict) {
  std::ostringstream out;
  out << kFirstWords << kVersion << "\n"
      << "library " << on_one_line(verdict.key.library) << "\n"
      << "driver " << on_one_line(verdict.key.driver) << "\n"
      << "gpu " << on_one_line(verdict.key.gpu) << "\n"
      << "kit " << on_one_line(verdict.key.kit) << "\n"
      << "outcome " << name_of(verdict.outcome) << "\n"
      << "date " << on_one_line(verdict.date) << "\n"
      << "what " << on_one_line(verdict.what) << "\n";
  return out.str() + "check " + checksum(out.str()) + "\n";
}

FoundVerdict parse_verdict(const std::string& text) {
  const FoundVerdict damaged = none(std::string("is damaged") + kAgain);
  std::string_view rest = text;
  if (!rest.starts_with(kFirstWords)) return damaged;
  const size_t version_at = kFirstWords.size();
  const size_t version_end = std::min(rest.find('\n'), rest.size());
  const std::string_view version = rest.substr(version_at, version_end - version_at);
  if (version_end == rest.size() || version.empty()) return damaged;
  // The next version's lines and checksum may be others.
  if (version != kVersion)
    return none(std::string("was written by another version of TileMoE") + kAgain);
  rest.remove_prefix(version_end + 1);

  Verdict verdict;
  std::string outcome;
  const std::pair<std::string_view, std::string*> lines[] = {{"library", &verdict.key.library},
                                                             {"driver", &verdict.key.driver},
                                                             {"gpu", &verdict.key.gpu},
                                                             {"kit", &verdict.key.kit},
                                                             {"outcome", &outcome},
                                                             {"date", &verdict.date},
                                                             {"what", &verdict.what}};
  for (const auto& [name, value] : lines) {
    const std::optional<std::string> taken = take(rest, name);
    if (!taken) return damaged;
    *value = *taken;
  }
  const size_t checked = text.size() - rest.size();
  if (take(rest, "check") != checksum(std::string_view(text).substr(0, checked)) || !rest.empty())
    return damaged;
  const auto* const known = std::find_if(std::begin(kOutcomes), std::end(kOutcomes),
                                         [&](Outcome one) { return outcome == name_of(one); });
  if (known == std::end(kOutcomes)) return damaged;
  verdict.outcome = *known;
  return {.verdict = std::move(verdict), .why_none = {}};
}

std::string state_folder() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (std::string own = variable("TILEMOE_STATE_DIR"); !own.empty()) return own;
  // The specification of these folders has relative paths ignored.
  if (const std::string state = variable("XDG_STATE_HOME"); state.starts_with("/"))
    return state + "/tilemoe";
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.local/state/tilemoe";
}

std::string verdict_file(const std::string& folder, const VerdictKey& key) {
  const std::string all = key.library + "\n" + key.driver + "\n" + key.gpu + "\n" + key.kit;
  return folder + "/" + key.kit + "-" + checksum(all) + ".verdict";
}

FoundVerdict find_verdict(const std::string& folder, const VerdictKey& key) noexcept {
  try {
    if (folder.empty()) return none("neither HOME nor TILEMOE_STATE_DIR is set");
    return read(verdict_file(folder, key), key);
  } catch (...) {
    return none("no memory");
  }
}

std::string driver_release(const std::string& said) {
  constexpr std::string_view kBefore = "Kernel Module";
  const size_t at = said.find(kBefore);
  if (at == said.npos) return "";
  std::istringstream words(said.substr(at, said.find('\n', at) - at));
  for (std::string word; words >> word;)
    if (word.find_first_not_of("0123456789.") == word.npos && word.find('.') != word.npos)
      return word;
  return "";
}

}  // namespace tilemoe::cuda
