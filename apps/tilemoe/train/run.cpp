#include "train/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

#include "train/safetensors.h"
#include "train/sampling.h"
#include "train/text_format.h"

namespace tilemoe::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool all_finite(const TensorRef& tensor) {
  const auto count = static_cast<size_t>(tensor_bytes("F32", tensor.shape) / sizeof(float));
  return std::all_of(tensor.data, tensor.data + count, [](float x) { return std::isfinite(x); });
}

fs::path first_free_folder() {
  for (int number = 1;; ++number) {
    fs::path folder = fs::path("runs") / std::to_string(number);
    if (!fs::exists(folder)) return folder;
  }
}

fs::path folder_of(const RunOptions& options) {
  if (options.out.empty() && !options.resume.empty()) {
    const fs::path folder = find_checkpoint(options.resume).parent_path();
    return folder.empty() ? fs::path(".") : folder;
  }
  if (options.out.empty()) return first_free_folder();
  if (!list_checkpoints(options.out).empty())
    throw std::runtime_error(options.out.string() +
                             " already contains a run; resume it with --resume " +
                             options.out.string() + " or choose another --out");
  return options.out;
}

// {"steps": {"from": 1000, "to": 2000}}
nlohmann::json to_json(const std::vector<OptionChange>& changes) {
  nlohmann::json json = nlohmann::json::object();
  for (const OptionChange& change : changes)
    json[change.name] = {{"from", change.saved}, {"to", change.now}};
  return json;
}

void announce(const std::vector<OptionChange>& changes) {
  if (changes.empty()) return;
  std::string text;
  for (const OptionChange& change : changes)
    text += (text.empty() ? "--" : ", --") + change.name + " from " + change.saved.dump() + " to " +
            change.now.dump();
  std::fprintf(stderr, "changed: %s\n", text.c_str());
}

// A text as a terminal shows it, whatever its bytes are: no control characters, and what is not
// UTF-8 marked as such.
std::string printable(const std::string& text) {
  using nlohmann::json;
  std::string shown = json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::replace));
  for (char& c : shown) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < ' ' && c != '\n' && c != '\t') || byte == 0x7f) c = '?';
  }
  return shown;
}

}  // namespace

TrainingRun::TrainingRun(const TrainerConfig& config, const RunOptions& options,
                         const Corpus& corpus, RunRecord record)
    : config_(config),
      options_(options),
      record_(std::move(record)),
      trainer_(config, corpus),
      folder_(folder_of(options)),
      log_(open_log()) {}

// A save would find the place of its file taken, after hours.
void TrainingRun::require_free_folder() const {
  for (const CheckpointFile& other : list_checkpoints(folder_.path()))
    if (other.step > trainer_.steps_done() && !folder_.owns(other.path.filename().string()))
      throw std::runtime_error("cannot resume in " + folder_.path().string() + ": " +
                               other.path.string() +
                               " is a later checkpoint that does not belong to this run; choose "
                               "another folder with --out");
}

JsonLog TrainingRun::open_log() {
  const fs::path path =
      options_.log.empty() ? folder_.path() / "log.jsonl" : fs::path(options_.log);
  for (const std::string& text : trainer_.corpus().names)
    if (fs::exists(path) && fs::equivalent(path, text))
      throw std::runtime_error("--log " + path.string() +
                               " is a file of --text; choose another file");
  return options_.resume.empty() ? begin_log(path) : resume_log(path);
}

JsonLog TrainingRun::begin_log(const fs::path& path) {
  JsonLog log = JsonLog::create(path);
  folder_.set_options(record_.kept);
  const nlohmann::json state = trainer_.state(record_.options);
  log.write({{"event", "start"},
             {"version", tilemoe_version()},
             {"parameters", trainer_.model().parameters().count()},
             {"config", state.at("config")},
             {"text", state.at("text")}});
  return log;
}

// Loads the checkpoint first: what the log keeps of an earlier run depends on its step. Nothing is
// written to the folder before all is known to be well. A run that continues in another folder
// (--out) begins a log there.
JsonLog TrainingRun::resume_log(const fs::path& path) {
  const fs::path checkpoint = find_checkpoint(options_.resume);
  trainer_.load(checkpoint);
  require_free_folder();
  const bool forked = !options_.out.empty();
  JsonLog log = forked ? JsonLog::create(path) : JsonLog::resume(path, trainer_.steps_done());
  folder_.set_options(record_.kept);
  Json line = {
      {"event", "resume"}, {"step", trainer_.steps_done()}, {"checkpoint", checkpoint.string()}};
  if (!record_.changed.empty()) line["changed"] = to_json(record_.changed);
  log.write(line);
  announce(record_.changed);
  return log;
}

void TrainingRun::step(Progress& progress) {
  const Clock::time_point start = Clock::now();
  const StepResult result = trainer_.step();
  const double tokens_per_second =
      static_cast<double>(config_.batch.tokens()) / seconds_since(start);
  Json line = {{"event", "step"},
               {"step", result.step},
               {"loss", result.loss},
               {"lr", result.learning_rate},
               {"grad_norm", result.gradient_norm},
               {"tokens_per_s", std::round(tokens_per_second)}};
  for (const RouterReport& router : result.routers) {
    line["expert_load"].push_back(router.load);
    line["dropped"].push_back(router.dropped);
    line["added"].push_back(router.added);
    line["balance_loss"].push_back(router.balance_loss);
    line["z_loss"].push_back(router.z_loss);
  }
  log_.write(line);
  progress.update({result.step, result.loss, tokens_per_second});
  if (!result.taken)
    throw std::runtime_error("step " + std::to_string(result.step) +
                             ": the loss or the gradient is not finite, and the step was not "
                             "taken; try a smaller --lr");
  evaluated_ = saved_ = false;
}

void TrainingRun::evaluate(Progress& progress) {
  const Evaluation result = trainer_.evaluate([&](double done) {
    progress.evaluating(done);
    return !stop_.requested();
  });
  if (stop_.requested()) return;  // it is not of the whole text
  log_.write({{"event", "eval"},
              {"step", trainer_.steps_done()},
              {"loss", result.loss},
              {"bits_per_byte", result.bits_per_byte()}});
  progress.note(format("step %lld: validation %.4f bits per byte",
                       static_cast<long long>(trainer_.steps_done()), result.bits_per_byte()));
  evaluated_ = true;
}

// A checkpoint that nobody can continue from must not take the place of one that somebody can; and
// the log is never behind the checkpoint that counts on it.
void TrainingRun::save(Progress& progress) {
  const std::vector<TensorRef> tensors = trainer_.tensors();
  for (const TensorRef& tensor : tensors)
    if (!all_finite(tensor))
      throw std::runtime_error("step " + std::to_string(trainer_.steps_done()) +
                               " was not saved: '" + tensor.name +
                               "' is not finite; try a smaller --lr");
  log_.sync();
  const fs::path path = save_checkpoint(folder_, trainer_.steps_done(), tensors,
                                        trainer_.state(record_.options), options_.keep);
  progress.note("saved " + path.string());
  saved_ = true;
}

Course TrainingRun::course() const {
  constexpr double kForwardPart = 1.0 / 3;  // of a step
  const int64_t first = trainer_.steps_done(), total = config_.schedule.steps;
  const int64_t every = options_.evaluate_every;
  const int64_t between = every > 0 ? (total - 1) / every - first / every : 0;
  const auto share = static_cast<double>(config_.batch.length) /
                     static_cast<double>(config_.batch.length - config_.evaluation_context);
  const double steps = kForwardPart * share *
                       static_cast<double>(trainer_.corpus().validation.size()) /
                       static_cast<double>(config_.batch.tokens());
  return {.first = first, .total = total, .evaluations = static_cast<double>(between + 1) * steps};
}

int TrainingRun::train() {
  const auto due = [this](int64_t every) {
    return every > 0 && trainer_.steps_done() % every == 0;
  };
  std::printf("%lld parameters; the run is in %s\n",
              static_cast<long long>(trainer_.model().parameters().count()),
              folder_.path().c_str());
  const bool was_done = trainer_.done();
  const Clock::time_point start = Clock::now();
  {
    Progress progress(course());
    saved_ = was_done;
    while (!trainer_.done() && !stop_.requested()) {
      step(progress);
      if (due(options_.evaluate_every)) evaluate(progress);
      if (due(options_.save_every) && !trainer_.done()) save(progress);
    }
    if (trainer_.done() && !evaluated_ && !stop_.requested()) evaluate(progress);
    if (!saved_) save(progress);
  }
  const int signal = stop_.signal();
  log_.write({{"event", "end"},
              {"step", trainer_.steps_done()},
              {"reason", signal != 0 ? "stopped" : "done"}});
  if (signal != 0) {
    std::printf("stopped; resume with: tilemoe train --resume %s\n", folder_.path().c_str());
    return signal;
  }
  std::printf("done in %s\n", short_duration(seconds_since(start)).c_str());
  if (was_done)
    std::printf("all %lld steps were already done; --steps with a larger number extends the run\n",
                static_cast<long long>(trainer_.steps_done()));
  print_sample();
  return 0;
}

void TrainingRun::print_sample() {
  const SamplingConfig config{.bytes = 200, .prompt = {}, .temperature = 0.7, .seed = 0};
  std::printf("\nSample of the model's text; `tilemoe generate %s` writes more:\n%s\n",
              folder_.path().c_str(), printable(sample(trainer_.model(), config)).c_str());
}

}  // namespace tilemoe::train
