#include "train/options.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "exit_status.h"
#include "train/json.h"

namespace tilemoe::train {
namespace {

template <class Value>
using Names = std::vector<std::pair<std::string, Value>>;

const Names<Scoring> kScorings = {
    {"softmax-chosen", Scoring::kSoftmaxOverChosen},
    {"softmax-all", Scoring::kSoftmaxOverAll},
    {"softmax-renormalized", Scoring::kSoftmaxRenormalized},
    {"sigmoid", Scoring::kSigmoid},
    {"sigmoid-renormalized", Scoring::kSigmoidRenormalized},
};

const Names<Rounding> kRoundings = {
    {"nearest", Rounding::kNearest},   {"up", Rounding::kUp},
    {"down", Rounding::kDown},         {"stochastic", Rounding::kStochastic},
    {"balanced", Rounding::kBalanced},
};
constexpr char kTopK[] = "top-k";

// As the library names them, with hyphens.
Names<Activation> activation_names() {
  Names<Activation> names = {
#define TILEMOE_ACTIVATION(name, NAME, Name, gated, formula) {#name, Activation::k##Name},
#include "tilemoe/activations.inc"
#undef TILEMOE_ACTIVATION
  };
  for (auto& [name, activation] : names) std::replace(name.begin(), name.end(), '_', '-');
  return names;
}

template <class Value>
std::vector<std::string> names_of(const Names<Value>& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.push_back(name);
  return names;
}

// The Python package writes "geglu_tanh" and "softmax_over_chosen": these become "geglu-tanh" and
// "softmax-chosen".
CLI::Validator as_on_the_command_line() {
  return CLI::Validator(
      [](std::string& name) {
        std::replace(name.begin(), name.end(), '_', '-');
        if (const std::string over = "-over-"; name.starts_with("softmax" + over))
          name.replace(name.find(over), over.size(), "-");
        return std::string();
      },
      "");
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw app::WrongUsage(text.str());
}

template <class Value>
Value named(const char* option, const std::string& name, const Names<Value>& table) {
  std::string known;
  for (const auto& [entry, value] : table) {
    if (name == entry) return value;
    known += (known.empty() ? "" : ", ") + entry;
  }
  throw app::WrongUsage("--" + std::string(option) + " must be one of " + known + ", got " + name);
}

// Small enough that the product of three sizes does not overflow.
constexpr int64_t kLargestSize = int64_t{1} << 20;
constexpr int64_t kLargestCount = int64_t{1} << 40;

void require_size(const char* option, int64_t value) {
  require(value >= 1 && value <= kLargestSize, "--", option, " must be in [1, ", kLargestSize,
          "], got ", value);
}
void require_count(const char* option, int64_t value) {
  require(value >= 1 && value <= kLargestCount, "--", option, " must be in [1, ", kLargestCount,
          "], got ", value);
}
void require_multiple(const char* option, int64_t value, int64_t of) {
  require(value >= of && value <= kLargestSize && value % of == 0, "--", option,
          " must be a positive multiple of ", of, ", got ", value);
}
void require_number(const char* option, double value, double min, double max) {
  require(value >= min && value <= max, "--", option, " must be in [", min, ", ", max, "], got ",
          value);
}

}  // namespace

void ModelOptions::add_to(OptionTable& table) {
  const char* group = "Text";
  const auto add = [&](const char* name, auto& value, const std::string& help) {
    return table.add(name, value, help)->group(group);
  };
  add("text", text, "Text files to train on (default: the dictionary of the package dict-gcide)");
  add("validation-bytes", validation_bytes, "Bytes of the text that are kept for validation");
  table.add_older_name("validation-bytes", "held-bytes", validation_bytes);

  group = "Model";
  add("layers", layers, "Number of residual blocks");
  add("width", width, "Width of a token, d");
  add("embedded-bytes", embedded_bytes,
      "Bytes in the embedding of a token: its own and the previous ones");
  add("experts", experts, "Experts per layer, E");
  add("top-k", top_k, "Experts per token, K");
  add("expert-width", expert_width, "Width inside an expert, n");
  add("activation", activation, "Activation of the experts")
      ->transform(as_on_the_command_line())
      ->check(CLI::IsMember(names_of(activation_names())));
  add("heads", heads, "Attention heads");
  add("head-width", head_width, "Width of an attention head");
  add("taps", taps, "Taps of the convolution");
  add("dense", dense, "For comparison: replace the experts by a dense feed-forward of width K * n");
  add("experts-off", experts_off, "For comparison: leave the experts out");

  group = "Routing";
  std::vector<std::string> routings = names_of(kRoundings);
  routings.insert(routings.begin(), kTopK);
  add("routing", routing, "Routing in training: top-k, or token rounding with this rule")
      ->check(CLI::IsMember(routings));
  add("scoring", scoring, "Scoring of top-K; sigmoid scorings adapt a selection bias to the load")
      ->transform(as_on_the_command_line())
      ->check(CLI::IsMember(names_of(kScorings)));
  add("m", m, "Token rounding: rows per expert are a multiple of m");
  add("bias-rate", bias_rate, "Selection-bias update per step");
  add("balance-loss", balance_loss, "Coefficient of the load-balancing loss");
  add("z-loss", z_loss, "Coefficient of the router z-loss");

  group = "Training";
  add("steps", steps, "Number of training steps");
  add("batch", batch, "Sequences per step");
  add("length", length, "Bytes per sequence");
  add("lr", learning_rate, "Peak learning rate");
  add("head-lr", head_learning_rate, "Peak learning rate of the output head");
  add("warm-up", warm_up,
      "Warm-up steps of the learning rate; unless given, at most a tenth of --steps");
  add("final-lr", final_rate, "Final learning rate as a fraction of the peak");
  add("beta1", beta1, "AdamW beta1: decay of the mean gradient");
  add("beta2", beta2, "AdamW beta2: decay of the mean squared gradient");
  add("weight-decay", weight_decay, "Weight decay of the matrices");
  add("clip", clip, "Maximum gradient norm (0 = no clipping)");
  add("seed", seed, "Random seed of the weights and of the order of the text");
}

void ModelOptions::settle(const OptionTable& table) {
  if (!table.is_given("warm-up")) warm_up = std::min(warm_up, steps / 10);
}

bool may_change(const std::string& option) {
  static const std::set<std::string> changeable = {"steps", "batch", "lr", "head-lr", "final-lr"};
  return changeable.contains(option);
}

TrainerConfig ModelOptions::checked() const {
  for (const std::string& name : text) require(is_utf8(name), "--text must be file names in UTF-8");
  require_count("validation-bytes", validation_bytes);
  require_size("layers", layers);
  require_multiple("width", width, kRowMultiple);
  require_size("embedded-bytes", embedded_bytes);
  require_size("experts", experts);
  require(top_k >= 1 && top_k <= experts, "--top-k must be in [1, ", experts,
          "], the number of --experts, got ", top_k);
  require_multiple("expert-width", expert_width, 8);
  require_size("heads", heads);
  require_multiple("head-width", head_width, kRowMultiple);
  require_size("taps", taps);
  require(!dense || !experts_off, "--dense and --experts-off exclude each other");

  const bool rounded = routing != kTopK;
  require(!rounded || scoring == ModelOptions().scoring, "--scoring requires --routing top-k, got ",
          "--routing ", routing);
  require_size("m", m);
  require_number("bias-rate", bias_rate, 0, 1);
  require_number("balance-loss", balance_loss, 0, 1e3);
  require_number("z-loss", z_loss, 0, 1e3);

  require_count("steps", steps);
  require_size("batch", batch);
  require_size("length", length);
  require(batch * length <= kLargestSize, "--batch times --length must be <= ", kLargestSize,
          ", got ", batch * length);
  require_number("lr", learning_rate, 0, 1e3);
  require_number("head-lr", head_learning_rate, 0, 1e3);
  require(warm_up >= 0 && warm_up <= steps, "--warm-up must be in [0, ", steps,
          "], the number of --steps, got ", warm_up);
  require_number("final-lr", final_rate, 0, 1);
  require(beta1 >= 0 && beta1 < 1, "--beta1 must be in [0, 1), got ", beta1);
  require(beta2 >= 0 && beta2 < 1, "--beta2 must be in [0, 1), got ", beta2);
  require_number("weight-decay", weight_decay, 0, 1e3);
  require_number("clip", clip, 0, 1e9);
  require(seed >= 0, "--seed must be >= 0, got ", seed);

  TrainerConfig config;
  ModelConfig& model = config.model;
  model.layers = layers, model.width = width, model.embedded_bytes = embedded_bytes;
  model.heads = heads, model.head_width = head_width, model.taps = taps;
  model.experts = experts, model.top_k = top_k, model.expert_width = expert_width;
  model.activation = named("activation", activation, activation_names());
  if (dense) model.mode = ExpertsMode::kDense;
  if (experts_off) model.mode = ExpertsMode::kOff;
  model.routing.rounded = rounded;
  if (rounded) model.routing.rounding = named("routing", routing, kRoundings);
  model.routing.scoring = named("scoring", scoring, kScorings);
  model.routing.m = m;
  model.routing.bias_rate = static_cast<float>(bias_rate);
  model.routing.balance_loss = static_cast<float>(balance_loss);
  model.routing.z_loss = static_cast<float>(z_loss);
  config.optimizer = {.learning_rate = learning_rate,
                      .head_learning_rate = head_learning_rate,
                      .beta1 = beta1,
                      .beta2 = beta2,
                      .weight_decay = weight_decay,
                      .clip = clip};
  config.schedule = {.steps = steps, .warm_up = warm_up, .final_fraction = final_rate};
  config.batch = {.count = batch, .length = length};
  config.seed = static_cast<uint64_t>(seed);
  config.evaluation_context = length / 2;
  return config;
}

void RunOptions::add_to(CLI::App& command, OptionTable& kept) {
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command.add_option(name, value, help)->group("Run");
  };
  const auto add_kept = [&](const char* name, auto& value, const char* help) {
    return kept.add(name, value, help)->group("Run");
  };
  add("--out", out, "Folder of the run (default: runs/1, runs/2, ...)");
  add("--resume", resume,
      "Resume from a checkpoint, or from the newest one of a folder; in place, or in --out");
  add_kept("save-every", save_every, "Steps between checkpoints");
  add_kept("keep", keep, "Number of checkpoints to keep");
  add_kept("eval-every", evaluate_every, "Steps between evaluations (0 = only at the end)");
  add_kept("log", log, "Log file (default: log.jsonl in the folder of the run)");
}

void RunOptions::check() const {
  require_count("save-every", save_every);
  require_count("keep", keep);
  require(evaluate_every >= 0 && evaluate_every <= kLargestCount, "--eval-every must be in [0, ",
          kLargestCount, "], got ", evaluate_every);
  require(is_utf8(log), "--log must be a file name in UTF-8");
}

}  // namespace tilemoe::train
