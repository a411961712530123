#include "train/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "train/safetensors.h"
#include "train/sampling.h"

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
  if (!options.resume.empty()) {
    const fs::path folder = find_checkpoint(options.resume).parent_path();
    return folder.empty() ? fs::path(".") : folder;
  }
  if (options.out.empty()) return first_free_folder();
  if (!list_checkpoints(options.out).empty())
    throw std::runtime_error(options.out.string() +
                             " holds the checkpoints of a run: go on with --resume " +
                             options.out.string() + ", or choose another --out");
  return options.out;
}

}  // namespace

TrainingRun::TrainingRun(const TrainerConfig& config, const RunOptions& options,
                         const Corpus& corpus, const nlohmann::json& saved_options,
                         const nlohmann::json& kept_options)
    : config_(config),
      options_(options),
      saved_options_(saved_options),
      trainer_(config, corpus),
      folder_(folder_of(options)),
      log_(open_log(kept_options)) {}

// A save would find the place of its file taken, after hours.
void TrainingRun::require_free_folder() const {
  for (const CheckpointFile& other : list_checkpoints(folder_.path()))
    if (other.step > trainer_.steps_done() && !folder_.owns(other.path.filename().string()))
      throw std::runtime_error("cannot go on in " + folder_.path().string() + ": " +
                               other.path.string() +
                               " is a later checkpoint and not known as this run's. Copy the "
                               "checkpoint to go on from into a folder of its own");
}

// Loads the checkpoint first: what the log keeps of an earlier run depends on its step. Nothing is
// written to the folder before all is known to be well.
JsonLog TrainingRun::open_log(const nlohmann::json& kept_options) {
  const fs::path path =
      options_.log.empty() ? folder_.path() / "log.jsonl" : fs::path(options_.log);
  for (const std::string& text : trainer_.corpus().names)
    if (fs::exists(path) && fs::equivalent(path, text))
      throw std::runtime_error("--log " + path.string() + " is the text: name another file");
  if (options_.resume.empty()) {
    JsonLog log = JsonLog::create(path);
    folder_.set_options(kept_options);
    const nlohmann::json state = trainer_.state(saved_options_);
    log.write({{"event", "start"},
               {"version", tilemoe_version()},
               {"parameters", trainer_.model().parameters().count()},
               {"config", state.at("config")},
               {"text", state.at("text")}});
    return log;
  }
  const fs::path checkpoint = find_checkpoint(options_.resume);
  trainer_.load(checkpoint);
  require_free_folder();
  JsonLog log = JsonLog::resume(path, trainer_.steps_done());
  folder_.set_options(kept_options);
  log.write(
      {{"event", "resume"}, {"step", trainer_.steps_done()}, {"checkpoint", checkpoint.string()}});
  return log;
}

void TrainingRun::step(Progress& progress) {
  constexpr double kSmoothing = 0.95;
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
  smooth_loss_ =
      smooth_loss_ == 0 ? result.loss : kSmoothing * smooth_loss_ + (1 - kSmoothing) * result.loss;
  progress.update({result.step, smooth_loss_, tokens_per_second});
  if (!result.taken)
    throw std::runtime_error("the loss or the gradient of step " + std::to_string(result.step) +
                             " is not a finite number, so it was not taken: try a smaller --lr");
  evaluated_ = saved_ = false;
}

void TrainingRun::evaluate(Progress& progress) {
  const Evaluation result = trainer_.evaluate([this] { return stop_.requested(); });
  if (stop_.requested()) return;  // it is not of the whole text
  log_.write({{"event", "eval"},
              {"step", trainer_.steps_done()},
              {"loss", result.loss},
              {"bits_per_byte", result.bits_per_byte()}});
  char text[96];
  std::snprintf(text, sizeof text, "step %lld: held-out text %.4f bits a byte",
                static_cast<long long>(trainer_.steps_done()), result.bits_per_byte());
  progress.note(text);
  evaluated_ = true;
}

// A checkpoint that nobody can go on from must not take the place of one that somebody can; and the
// log is never behind the checkpoint that counts on it.
void TrainingRun::save(Progress& progress) {
  const std::vector<TensorRef> tensors = trainer_.tensors();
  for (const TensorRef& tensor : tensors)
    if (!all_finite(tensor))
      throw std::runtime_error("step " + std::to_string(trainer_.steps_done()) +
                               " is not saved: '" + tensor.name +
                               "' has become infinite or not a number. Try a smaller --lr");
  log_.sync();
  const fs::path path = save_checkpoint(folder_, trainer_.steps_done(), tensors,
                                        trainer_.state(saved_options_), options_.keep);
  progress.note("saved " + path.string());
  saved_ = true;
}

void TrainingRun::train() {
  const auto due = [this](int64_t every) {
    return every > 0 && trainer_.steps_done() % every == 0;
  };
  std::printf("%lld parameters; the run is in %s\n",
              static_cast<long long>(trainer_.model().parameters().count()),
              folder_.path().c_str());
  const Clock::time_point start = Clock::now();
  {
    Progress progress(trainer_.steps_done(), config_.schedule.steps);
    saved_ = trainer_.done();
    while (!trainer_.done() && !stop_.requested()) {
      step(progress);
      if (due(options_.evaluate_every)) evaluate(progress);
      if (due(options_.save_every) && !trainer_.done()) save(progress);
    }
    if (trainer_.done() && !evaluated_ && !stop_.requested()) evaluate(progress);
    if (!saved_) save(progress);
  }
  const bool stopped = stop_.requested();
  log_.write({{"event", "end"},
              {"step", trainer_.steps_done()},
              {"reason", stopped ? "stopped" : "done"}});
  if (stopped) {
    std::printf("stopped; go on with: tilemoe train --resume %s\n", folder_.path().c_str());
    return;
  }
  std::printf("done in %s\n", short_duration(seconds_since(start)).c_str());
  print_sample();
}

void TrainingRun::print_sample() {
  const SamplingConfig config{.bytes = 200, .prompt = {}, .temperature = 0.7, .seed = 0};
  std::printf("%s\n", sample(trainer_.model(), config).c_str());
}

}  // namespace tilemoe::train
