#include "trial.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "child.h"
#include "train/file.h"

namespace tilemoe::app {
namespace {

namespace fs = std::filesystem;
using cuda::Outcome;
using cuda::Verdict;
using nlohmann::json;

constexpr size_t kDisagreementsTold = 3;  // in the verdict; the report has all

// What the child said, line by line, and what that makes of its end.
class Story {
 public:
  explicit Story(const Trial& trial) : trial_(trial) {}

  // Whether it is an event of compare_kits.h.
  bool hear(const std::string& line) {
    const json event = json::parse(line, nullptr, false);
    if (!event.is_object()) return false;
    try {
      if (event.contains("step")) {
        step_ = event.at("step").get<std::string>();
        trial_.on_step(step_, event.at("done").get<double>());
      } else if (event.contains("disagreed")) {
        disagreements_.push_back(event.at("disagreed").get<std::string>());
      } else if (event.contains("finished")) {
        finished_ = Finished{.cases = event.at("finished").at("cases").get<int>(),
                             .tensors = event.at("finished").at("tensors").get<int>(),
                             .repeats = event.at("finished").at("repeats").get<int64_t>()};
      } else if (event.contains("refused")) {
        refused_ = event.at("refused").get<std::string>();
      } else if (event.contains("error")) {
        error_ = event.at("error").get<std::string>();
      } else {
        return false;
      }
      return true;
    } catch (const json::exception&) {
      return false;
    }
  }

  TrialReport report(const ChildEnd& end) const {
    check_ran_to_its_end(end);
    TrialReport all{
        .verdict = {.key = trial_.key, .outcome = outcome(end), .date = today(), .what = {}},
        .file = cuda::verdict_file(trial_.folder, trial_.key),
        .disagreements = disagreements_};
    all.verdict.what = words(all.verdict.outcome, end);
    return all;
  }

 private:
  struct Finished {
    int cases = 0, tensors = 0;
    int64_t repeats = 0;
  };

  // Throws where its end says nothing about the kit.
  void check_ran_to_its_end(const ChildEnd& end) const {
    if (!refused_.empty()) throw std::runtime_error(refused_);
    if (end.silent || end.how != ChildEnd::How::kSignalled) return;
    for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM})
      if (end.number == signal)
        throw std::runtime_error("the comparison was ended by " + end.signal_name() +
                                 ": there is no verdict");
  }

  Outcome outcome(const ChildEnd& end) const {
    if (end.silent) return Outcome::kHung;
    if (end.how == ChildEnd::How::kSignalled) return Outcome::kCrashed;
    if (end.number != 0 || !error_.empty() || !finished_) return Outcome::kError;
    if (!disagreements_.empty()) return Outcome::kDisagreed;
    const bool compared = finished_->cases > 0 && finished_->tensors > 0 && finished_->repeats > 0;
    return compared ? Outcome::kAgreed : Outcome::kError;
  }

  std::string words(Outcome outcome, const ChildEnd& end) const {
    std::ostringstream text;
    const std::string place = step_.empty() ? "" : " in " + step_;
    switch (outcome) {
      case Outcome::kAgreed:
        text << "agreed with sm80 in " << finished_->cases << " cases, " << finished_->tensors
             << " tensors, each " << finished_->repeats << " times";
        break;
      case Outcome::kDisagreed: text << "disagreed"; break;
      case Outcome::kHung:
        text << "hung after " << std::chrono::duration<double>(trial_.most_silent).count() << " s"
             << place;
        break;
      case Outcome::kCrashed: text << "crashed by " << end.signal_name() << place; break;
      case Outcome::kError:
        text << "was stopped by an error" << place << ": ";
        if (!error_.empty())
          text << error_;
        else if (end.number != 0)
          text << "the comparison ended with status " << end.number;
        else
          text << "the comparison ended without a result";
        break;
    }
    for (size_t i = 0; i < std::min(disagreements_.size(), kDisagreementsTold); ++i)
      text << (i > 0                            ? "; "
               : outcome == Outcome::kDisagreed ? ": "
                                                : ", after: ")
           << disagreements_[i];
    if (disagreements_.size() > kDisagreementsTold)
      text << "; and " << disagreements_.size() - kDisagreementsTold << " more";
    return text.str();
  }

  static std::string today() {
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    ::gmtime_r(&now, &utc);
    char date[16];
    return {date, std::strftime(date, sizeof date, "%F", &utc)};
  }

  const Trial& trial_;
  std::string step_, refused_, error_;
  std::vector<std::string> disagreements_;
  std::optional<Finished> finished_;
};

// Held while a trial of the key goes on; the system lets go of it where the process ends.
class Lock {
 public:
  explicit Lock(const fs::path& file) : file_(file, O_RDWR | O_CREAT | O_NOFOLLOW, "write") {
    // A file system without locks has the second of two trials fail where it writes.
    if (::flock(file_.descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw std::runtime_error(
          "another `tilemoe doctor --blackwell` is at work on this kind of GPU (it holds " +
          file.string() + ")");
  }

 private:
  train::File file_;
};

void remove_earlier(const fs::path& file) {
  fs::remove(file);
  fs::path unfinished = file;
  fs::remove(unfinished += train::kUnfinishedSuffix);  // of a trial that was killed
}

void write_verdict(const fs::path& file, const std::string& text) {
  train::write_whole(file, [&](train::File& out) { out.write(text.data(), text.size()); });
}

// Before minutes of work, not after them.
void check_writable(const fs::path& file) {
  fs::path trial = file;
  write_verdict(trial += ".trial", "");
  fs::remove(trial);
}

}  // namespace

TrialReport try_kit(const Trial& trial) {
  if (trial.folder.empty())
    throw std::runtime_error(
        "neither HOME nor TILEMOE_STATE_DIR is set: there is no folder to keep a verdict in");
  try {
    fs::create_directories(trial.folder);
  } catch (const fs::filesystem_error& error) {
    throw std::runtime_error("cannot make the folder " + trial.folder + ": " +
                             error.code().message() + "; TILEMOE_STATE_DIR names another");
  }
  const fs::path file = cuda::verdict_file(trial.folder, trial.key);
  const Lock lock(file.string() + ".lock");
  check_writable(file);
  remove_earlier(file);
  Story story(trial);
  const ChildEnd end = run_child(trial.command, trial.most_silent,
                                 [&](const std::string& line) { return story.hear(line); });
  TrialReport report = story.report(end);
  write_verdict(file, text_of(report.verdict));
  return report;
}

std::string TrialReport::text() const {
  const cuda::VerdictKey& key = verdict.key;
  std::ostringstream out;
  out << "TileMoE   " << key.library << "\n"
      << "GPU       " << key.gpu << "\n"
      << "driver    " << key.driver << "\n";
  for (const std::string& line : disagreements) out << "  " << line << "\n";
  out << "verdict   " << key.kit << " " << in_words(verdict) << "\n"
      << "kept in   " << file << "\n";
  if (agreed())
    out << "Programs that start from now on take " << key.kit
        << " on such GPUs; TILEMOE_KIT=sm80 has them take sm80.\n";
  else
    out << "Programs go on with sm80. Please paste this report into an issue.\n";
  return out.str();
}

json TrialReport::json() const {
  const cuda::VerdictKey& key = verdict.key;
  return {{"library", key.library},
          {"driver", key.driver},
          {"gpu", key.gpu},
          {"kit", key.kit},
          {"outcome", name_of(verdict.outcome)},
          {"date", verdict.date},
          {"what", verdict.what},
          {"disagreements", disagreements},
          {"file", file}};
}

}  // namespace tilemoe::app
