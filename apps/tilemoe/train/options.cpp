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
  throw app::WrongUsage("--" + std::string(option) + " is " + name + ", expected one of " + known);
}

// Small enough that the product of three sizes does not overflow.
constexpr int64_t kLargestSize = int64_t{1} << 20;
constexpr int64_t kLargestCount = int64_t{1} << 40;

void require_size(const char* option, int64_t value) {
  require(value >= 1 && value <= kLargestSize, "--", option, " is ", value, ", expected 1 to ",
          kLargestSize);
}
void require_count(const char* option, int64_t value) {
  require(value >= 1 && value <= kLargestCount, "--", option, " is ", value, ", expected 1 to ",
          kLargestCount);
}
void require_multiple(const char* option, int64_t value, int64_t of) {
  require(value >= of && value <= kLargestSize && value % of == 0, "--", option, " is ", value,
          ", expected a positive multiple of ", of);
}
void require_number(const char* option, double value, double min, double max) {
  require(value >= min && value <= max, "--", option, " is ", value, ", expected ", min, " to ",
          max);
}

}  // namespace

void ModelOptions::add_to(OptionTable& table) {
  const char* group = "Text";
  const auto add = [&](const char* name, auto& value, const std::string& help) {
    return table.add(name, value, help)->group(group);
  };
  add("text", text, "Files to learn; without it the dictionary of the package dict-gcide");
  add("validation-bytes", validation_bytes,
      "Bytes at the end of the text that are kept for validation");
  table.add_older_name("validation-bytes", "held-bytes", validation_bytes);

  group = "Model";
  add("layers", layers, "Residual blocks");
  add("width", width, "Width of a token, d");
  add("embedded-bytes", embedded_bytes, "Bytes that make a token: its own and those before it");
  add("experts", experts, "Experts in a layer, E");
  add("top-k", top_k, "Experts a token goes to, K");
  add("expert-width", expert_width, "Width inside an expert, n");
  add("activation", activation, "Activation of the experts")
      ->transform(as_on_the_command_line())
      ->check(CLI::IsMember(names_of(activation_names())));
  add("heads", heads, "Heads of the attention");
  add("head-width", head_width, "Width of a head");
  add("taps", taps, "Tokens that the convolution sees");
  add("dense", dense, "For comparison: a feed-forward of width K * n in the experts' place");
  add("experts-off", experts_off, "For comparison: nothing in the experts' place");

  group = "Routing";
  std::vector<std::string> routings = names_of(kRoundings);
  routings.insert(routings.begin(), kTopK);
  add("routing", routing, "top-k, or how token rounding rounds an expert's rows, in training")
      ->check(CLI::IsMember(routings));
  add("scoring", scoring, "Scores of top-K; the sigmoids have a selection bias moved by the load")
      ->transform(as_on_the_command_line())
      ->check(CLI::IsMember(names_of(kScorings)));
  add("m", m, "Token rounding: rows of an expert are a multiple of it");
  add("bias-rate", bias_rate, "What a step moves a selection bias by");
  add("balance-loss", balance_loss, "Coefficient of the router's balance loss");
  add("z-loss", z_loss, "Coefficient of the router's z-loss");

  group = "Training";
  add("steps", steps, "Steps of the whole training");
  add("batch", batch, "Sequences in a step");
  add("length", length, "Bytes in a sequence");
  add("lr", learning_rate, "Highest learning rate");
  add("head-lr", head_learning_rate, "Highest learning rate of the output head");
  add("warm-up", warm_up,
      "Steps in which the learning rate rises; without it at most a tenth of --steps");
  add("final-lr", final_rate, "Fraction of the highest learning rate that the cosine ends at");
  add("beta1", beta1, "AdamW's decay of the mean gradient");
  add("beta2", beta2, "AdamW's decay of the mean squared gradient");
  add("weight-decay", weight_decay, "Decay of the matrices");
  add("clip", clip, "Largest norm of the gradient; 0 for any");
  add("seed", seed, "Decides the first weights and the order of the text");
}

void ModelOptions::settle(const OptionTable& table) {
  if (!table.is_given("warm-up")) warm_up = std::min(warm_up, steps / 10);
}

bool may_change(const std::string& option) {
  static const std::set<std::string> changeable = {"steps", "batch", "lr", "head-lr", "final-lr"};
  return changeable.contains(option);
}

TrainerConfig ModelOptions::checked() const {
  for (const std::string& name : text)
    require(is_utf8(name), "--text has a name that is not UTF-8, as the checkpoints are");
  require_count("validation-bytes", validation_bytes);
  require_size("layers", layers);
  require_multiple("width", width, kRowMultiple);
  require_size("embedded-bytes", embedded_bytes);
  require_size("experts", experts);
  require(top_k >= 1 && top_k <= experts, "--top-k is ", top_k, ", expected 1 to the ", experts,
          " of --experts");
  require_multiple("expert-width", expert_width, 8);
  require_size("heads", heads);
  require_multiple("head-width", head_width, kRowMultiple);
  require_size("taps", taps);
  require(!dense || !experts_off, "--dense and --experts-off exclude each other");

  const bool rounded = routing != kTopK;
  require(!rounded || scoring == ModelOptions().scoring, "--scoring is ", scoring,
          ", but token rounding has scores of its own: leave one of the two out");
  require_size("m", m);
  require_number("bias-rate", bias_rate, 0, 1);
  require_number("balance-loss", balance_loss, 0, 1e3);
  require_number("z-loss", z_loss, 0, 1e3);

  require_count("steps", steps);
  require_size("batch", batch);
  require_size("length", length);
  require(batch * length <= kLargestSize, "--batch times --length is ", batch * length,
          ", expected at most ", kLargestSize);
  require_number("lr", learning_rate, 0, 1e3);
  require_number("head-lr", head_learning_rate, 0, 1e3);
  require(warm_up >= 0 && warm_up <= steps, "--warm-up is ", warm_up, ", expected 0 to the ", steps,
          " of --steps");
  require_number("final-lr", final_rate, 0, 1);
  require(beta1 >= 0 && beta1 < 1, "--beta1 is ", beta1, ", expected at least 0 and less than 1");
  require(beta2 >= 0 && beta2 < 1, "--beta2 is ", beta2, ", expected at least 0 and less than 1");
  require_number("weight-decay", weight_decay, 0, 1e3);
  require_number("clip", clip, 0, 1e9);
  require(seed >= 0, "--seed is ", seed, ", expected at least 0");

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
  add("--out", out, "Folder of the run; runs/1, runs/2, ... without it");
  add("--resume", resume,
      "Continues from a checkpoint, or from the newest one of a folder: there, or in --out");
  add_kept("save-every", save_every, "Steps between two checkpoints");
  add_kept("keep", keep, "Checkpoints of the run that are kept");
  add_kept("eval-every", evaluate_every, "Steps between two evaluations; 0 for one at the end");
  add_kept("log", log, "File of the log; log.jsonl in the run's folder without it");
}

void RunOptions::check() const {
  require_count("save-every", save_every);
  require_count("keep", keep);
  require(evaluate_every >= 0 && evaluate_every <= kLargestCount, "--eval-every is ",
          evaluate_every, ", expected 0 to ", kLargestCount);
  require(is_utf8(log), "--log is not UTF-8, as the run's notes are");
}

}  // namespace tilemoe::train
