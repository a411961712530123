// `tilemoe generate`: text from a trained model, byte by byte as it comes.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <sstream>
#include <system_error>

#include "commands.h"
#include "device.h"
#include "exit_status.h"
#include "train/checkpoint.h"
#include "train/sampling.h"
#include "train/trained_model.h"

namespace tilemoe::app {
namespace {

struct GenerateOptions {
  std::string run;
  train::SamplingConfig sampling{.bytes = 500, .prompt = {}, .temperature = 0.7, .seed = 0};
  int64_t seed = 0;
  DeviceOptions device;
};

template <class Value>
void require(bool condition, const char* rule, const Value& given) {
  std::ostringstream text;
  text << rule << ", got " << given;
  if (!condition) throw WrongUsage(text.str());
}

void check(const GenerateOptions& options) {
  require(options.sampling.bytes >= 1, "--bytes must be >= 1", options.sampling.bytes);
  require(options.sampling.temperature >= 0, "--temperature must be >= 0 (0 = greedy)",
          options.sampling.temperature);
  require(options.seed >= 0, "--seed must be >= 0", options.seed);
}

void print(const char* text, size_t bytes) {
  if (std::fwrite(text, 1, bytes, stdout) == bytes && std::fflush(stdout) == 0) return;
  throw std::runtime_error("cannot write the output: " + std::generic_category().message(errno));
}

int generate(const GenerateOptions& options) {
  check(options);
  const Device device = options.device.select();
  const auto checkpoint = train::find_checkpoint(options.run);
  const auto model = train::load_model(checkpoint, device);
  std::fprintf(stderr, "text from %s\n", checkpoint.c_str());
  train::SamplingConfig sampling = options.sampling;
  sampling.seed = static_cast<uint64_t>(options.seed);
  print(sampling.prompt.data(), sampling.prompt.size());
  train::sample(*model, sampling, [](char byte) {
    print(&byte, 1);
    return true;
  });
  if (::isatty(STDOUT_FILENO)) print("\n", 1);
  return kDone;
}

}  // namespace

void add_generate(CLI::App& app, Run& run) {
  const auto options = std::make_shared<GenerateOptions>();
  options->device.device = "cpu";  // one byte at a time keeps no GPU busy
  CLI::App* const command = app.add_subcommand("generate", "Write text with a trained model");
  command->add_option("run", options->run, "Folder of a run, or one of its checkpoints")
      ->required();
  command->add_option("--prompt", options->sampling.prompt, "Text to continue; printed first");
  command->add_option("--bytes", options->sampling.bytes, "Bytes to write after the prompt")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Random seed")->capture_default_str();
  command
      ->add_option("--temperature", options->sampling.temperature,
                   "Sampling temperature (0 = greedy)")
      ->capture_default_str();
  options->device.add_to(*command);
  command->callback([options, &run] { run = [options] { return generate(*options); }; });
}

}  // namespace tilemoe::app
