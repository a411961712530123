#include "train/options.h"

#include <gtest/gtest.h>

#include "strict_numbers.h"

namespace tilemoe::train {
namespace {

// Parses what a user writes after `tilemoe train`.
struct CommandLine {
  explicit CommandLine(const std::string& arguments) : table(app) {
    options.add_to(table);
    app.parse(arguments);
  }
  CLI::App app;
  ModelOptions options;
  OptionTable table;
};

TEST(Options, DefaultsAreValid) {
  const TrainerConfig config = ModelOptions().checked();
  EXPECT_EQ(config.model.mode, ExpertsMode::kRouted);
  EXPECT_FALSE(config.model.routing.rounded);
}

TEST(Options, ReachTheConfiguration) {
  const TrainerConfig config =
      CommandLine(
          "--layers 3 --width 64 --embedded-bytes 1 --experts 8 --top-k 3 --expert-width 24 "
          "--activation gelu-tanh --heads 1 --head-width 32 --taps 2 --routing balanced "
          "--m 16 --balance-loss 0.5 --z-loss 0.25 --steps 70 --batch 5 --length 30 "
          "--lr 0.5 --head-lr 0.75 --warm-up 7 --final-lr 0.125 --beta1 0.5 --beta2 0.75 "
          "--weight-decay 2 --clip 3 --seed 9")
          .options.checked();
  EXPECT_EQ(config.model.layers, 3);
  EXPECT_EQ(config.model.width, 64);
  EXPECT_EQ(config.model.embedded_bytes, 1);
  EXPECT_EQ(config.model.experts, 8);
  EXPECT_EQ(config.model.top_k, 3);
  EXPECT_EQ(config.model.expert_width, 24);
  EXPECT_EQ(config.model.activation, Activation::kGELUTanh);
  EXPECT_EQ(config.model.heads, 1);
  EXPECT_EQ(config.model.head_width, 32);
  EXPECT_EQ(config.model.taps, 2);
  EXPECT_TRUE(config.model.routing.rounded);
  EXPECT_EQ(config.model.routing.rounding, Rounding::kBalanced);
  EXPECT_EQ(config.model.routing.m, 16);
  EXPECT_EQ(config.model.routing.balance_loss, 0.5f);
  EXPECT_EQ(config.model.routing.z_loss, 0.25f);
  EXPECT_EQ(config.schedule.steps, 70);
  EXPECT_EQ(config.schedule.warm_up, 7);
  EXPECT_EQ(config.schedule.final_fraction, 0.125);
  EXPECT_EQ(config.batch.count, 5);
  EXPECT_EQ(config.batch.length, 30);
  EXPECT_EQ(config.optimizer.learning_rate, 0.5);
  EXPECT_EQ(config.optimizer.head_learning_rate, 0.75);
  EXPECT_EQ(config.optimizer.beta1, 0.5);
  EXPECT_EQ(config.optimizer.beta2, 0.75);
  EXPECT_EQ(config.optimizer.weight_decay, 2);
  EXPECT_EQ(config.optimizer.clip, 3);
  EXPECT_EQ(config.seed, 9u);

  const RoutingConfig sigmoid =
      CommandLine("--scoring sigmoid --bias-rate 0.5").options.checked().model.routing;
  EXPECT_EQ(sigmoid.scoring, Scoring::kSigmoid);
  EXPECT_EQ(sigmoid.bias_rate, 0.5f);
  EXPECT_TRUE(sigmoid.has_selection_bias());
  EXPECT_EQ(CommandLine("--dense").options.checked().model.mode, ExpertsMode::kDense);
  EXPECT_EQ(CommandLine("--experts-off").options.checked().model.mode, ExpertsMode::kOff);
}

TEST(Options, TakePythonsSpelling) {
  const std::vector<std::pair<std::string, std::string>> activations = {
      {"geglu_tanh", "geglu-tanh"}, {"relu_squared", "relu-squared"}, {"swiglu", "swiglu"}};
  for (const auto& [python, ours] : activations)
    EXPECT_EQ(CommandLine("--activation " + python).options.activation, ours);
  const std::vector<std::pair<std::string, std::string>> scorings = {
      {"softmax_over_chosen", "softmax-chosen"},
      {"softmax-over-all", "softmax-all"},
      {"softmax_renormalized", "softmax-renormalized"},
      {"sigmoid_renormalized", "sigmoid-renormalized"}};
  for (const auto& [python, ours] : scorings)
    EXPECT_EQ(CommandLine("--scoring " + python).options.scoring, ours);
  EXPECT_THROW(CommandLine("--scoring over_all"), CLI::ValidationError);
}

// Every option with what it must not be: the complaint is one sentence that names it.
TEST(Options, BadValuesAreRefusedByName) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--validation-bytes 0", "--validation-bytes"},
      {"--layers 0", "--layers"},
      {"--layers -1", "--layers"},
      {"--layers 99999999999", "--layers"},
      {"--width 0", "--width"},
      {"--width 40", "--width"},
      {"--width -16", "--width"},
      {"--embedded-bytes 0", "--embedded-bytes"},
      {"--experts 0", "--experts"},
      {"--experts 2 --top-k 3", "--top-k"},
      {"--top-k 0", "--top-k"},
      {"--expert-width 12", "--expert-width"},
      {"--heads 0", "--heads"},
      {"--head-width 8", "--head-width"},
      {"--taps 0", "--taps"},
      {"--dense --experts-off", "--dense"},
      {"--routing nearest --m 0", "--m"},
      {"--routing nearest --scoring sigmoid", "--scoring"},
      {"--bias-rate -1", "--bias-rate"},
      {"--balance-loss nan", "--balance-loss"},
      {"--z-loss -0.5", "--z-loss"},
      {"--steps 0", "--steps"},
      {"--batch 0", "--batch"},
      {"--length 0", "--length"},
      {"--batch 100000 --length 100000", "--batch"},
      {"--lr inf", "--lr"},
      {"--lr -1", "--lr"},
      {"--head-lr nan", "--head-lr"},
      {"--warm-up -1", "--warm-up"},
      {"--steps 5 --warm-up 6", "--warm-up"},
      {"--final-lr 1.5", "--final-lr"},
      {"--beta1 1", "--beta1"},
      {"--beta2 nan", "--beta2"},
      {"--weight-decay -1", "--weight-decay"},
      {"--clip -1", "--clip"},
      {"--seed -1", "--seed"},
  };
  for (const auto& [arguments, name] : cases) {
    SCOPED_TRACE(arguments);
    const CommandLine line(arguments);
    try {
      line.options.checked();
      ADD_FAILURE() << "it was taken";
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find(name), 0u) << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    }
  }
}

TEST(Options, WordsThatMeanNothingAreRefusedWhenParsed) {
  for (const char* arguments :
       {"--routing best", "--scoring cosine", "--activation tanh", "--steps many", "--lr fast",
        "--dense=perhaps", "--unknown 1", "--text"}) {
    SCOPED_TRACE(arguments);
    EXPECT_THROW(CommandLine line(arguments), CLI::ParseError);
  }
}

TEST(Options, WarmUpIsLimitedToATenthOfANewRun) {
  const auto warm_up = [](const std::string& arguments) {
    CommandLine line(arguments);
    line.options.settle(line.table);
    return line.options.checked().schedule.warm_up;
  };
  EXPECT_EQ(warm_up(""), 60);
  EXPECT_EQ(warm_up("--steps 599"), 59);
  EXPECT_EQ(warm_up("--steps 9"), 0);
  EXPECT_EQ(warm_up("--steps 50 --warm-up 40"), 40);
}

TEST(Options, WhatDecidesDataOrModelMayNotChange) {
  const nlohmann::json options = CommandLine("").table.to_json();
  std::vector<std::string> changeable;
  for (const auto& [name, value] : options.items())
    if (may_change(name)) changeable.push_back(name);
  EXPECT_EQ(changeable, (std::vector<std::string>{"batch", "final-lr", "head-lr", "lr", "steps"}));
}

TEST(StrictNumbers, AreTakenAsTheyAreWritten) {
  const auto parse = [](const std::string& arguments) {
    CLI::App root;
    CLI::App* const command = root.add_subcommand("train");
    ModelOptions options;
    OptionTable table(*command);
    options.add_to(table);
    app::require_strict_numbers(root);
    root.parse("train " + arguments);
    return options;
  };
  EXPECT_EQ(parse("--seed 9223372036854775807 --steps 0").seed, INT64_MAX);
  EXPECT_EQ(parse("--seed -3").seed, -3);
  EXPECT_EQ(parse("--lr 1e-3").learning_rate, 1e-3);
  EXPECT_EQ(parse("--lr 0.5 --clip 0").learning_rate, 0.5);
  for (const char* arguments :
       {"--steps 010", "--steps 0x10", "--steps +1", "--steps 1.0", "--steps 1e3", "--steps 1x",
        "--steps=", "--steps ' 1'", "--seed 9223372036854775808", "--seed -00",
        "--seed 99999999999999999999999", "--lr nan", "--lr inf", "--lr -nan", "--lr 01.5",
        "--lr 1e999", "--lr 0x1p3", "--lr 1,5"}) {
    SCOPED_TRACE(arguments);
    EXPECT_THROW(parse(arguments), CLI::ParseError);
  }
}

TEST(OptionTable, TakesNoNumberThatIsNotWhole) {
  for (const nlohmann::json& steps :
       {nlohmann::json(7.5), nlohmann::json("7"), nlohmann::json(UINT64_MAX), nlohmann::json(true),
        nlohmann::json(nullptr)}) {
    CommandLine line("");
    EXPECT_THROW(line.table.take_missing({{"steps", steps}}), std::runtime_error) << steps;
  }
}

TEST(RunOptions, AreCheckedWhereverTheyComeFrom) {
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"keep", 0},
                                    {"save-every", 0},
                                    {"eval-every", -1},
                                    {"keep", -5}}) {
    CLI::App command;
    OptionTable kept(command);
    RunOptions options;
    options.add_to(command, kept);
    kept.take_missing({{name, value}});
    try {
      options.check();
      ADD_FAILURE() << name << " " << value << " was taken";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

TEST(OptionTable, TakesFromASavedRunWhatIsNotGiven) {
  const nlohmann::json saved =
      CommandLine("--steps 77 --dense --lr 0.5 --text a b").table.to_json();
  CommandLine line("--steps 78 --text c");
  line.table.take_missing(saved);
  EXPECT_EQ(line.options.steps, 78);
  EXPECT_EQ(line.options.text, std::vector<std::string>{"c"});
  EXPECT_TRUE(line.options.dense);
  EXPECT_EQ(line.options.learning_rate, 0.5);
  const std::vector<OptionChange> changes = changed_options(saved, line.table.to_json());
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0].name, "steps");
  EXPECT_EQ(changes[1].name, "text");

  CommandLine same("--lr 0.5");
  same.table.take_missing(saved);
  EXPECT_TRUE(changed_options(saved, same.table.to_json()).empty());
}

TEST(OptionTable, ReadsOlderNamesAndWarnsOnce) {
  testing::internal::CaptureStderr();
  CommandLine older("--held-bytes 500");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "tilemoe: warning: --held-bytes is the older name of --validation-bytes\n");
  EXPECT_EQ(older.options.validation_bytes, 500);
  EXPECT_TRUE(older.table.is_given("validation-bytes"));
  older.table.take_missing({{"validation-bytes", 600}});
  EXPECT_EQ(older.options.validation_bytes, 500) << "the command line has precedence";
  const nlohmann::json written = older.table.to_json();
  EXPECT_EQ(written.at("validation-bytes"), 500);
  EXPECT_FALSE(written.contains("held-bytes"));
  EXPECT_THROW(CommandLine("--held-bytes 500 --validation-bytes 600"), CLI::ParseError);

  testing::internal::CaptureStderr();
  CommandLine present("--validation-bytes 500");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(OptionTable, ReadsSavedValuesOfOlderNames) {
  CommandLine line("");
  line.table.take_missing({{"held-bytes", 700}});
  EXPECT_EQ(line.options.validation_bytes, 700);
  EXPECT_EQ(line.table.with_present_names({{"held-bytes", 700}, {"steps", 9}}),
            (nlohmann::json{{"validation-bytes", 700}, {"steps", 9}}));
  EXPECT_THROW(line.table.take_missing({{"held-bytes", "700"}}), std::runtime_error);
}

}  // namespace
}  // namespace tilemoe::train
