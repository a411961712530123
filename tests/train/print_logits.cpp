// print_logits CHECKPOINT: reads bytes from standard input and writes what the checkpoint's model
// says of each, (bytes, 256) float32, to standard output. For tests that read checkpoints
// elsewhere.
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>
#include <vector>

#include "train/checkpoint.h"
#include "train/model.h"
#include "train/options.h"

namespace tilemoe::train {
namespace {

void print_logits(const char* checkpoint) {
  CLI::App command;
  OptionTable table(command);
  ModelOptions options;
  options.add_to(table);
  table.take_missing(read_checkpoint(checkpoint).state.at("config"));

  std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(std::cin), {}};
  TrainerConfig config = options.checked();
  config.batch = {.count = 1, .length = std::ssize(bytes)};
  Corpus corpus;  // nothing is learnt; a trainer wants two sequences and a byte
  corpus.train.resize(2 * bytes.size() + 1);
  Trainer trainer(config, corpus);
  load_checkpoint(checkpoint, trainer.tensors());
  bytes.insert(bytes.begin(), static_cast<size_t>(trainer.model().past()), 0);
  const ConstFloats logits = trainer.model().logits(config.batch, bytes);
  std::fwrite(logits.data(), sizeof(float), logits.size(), stdout);
}

}  // namespace
}  // namespace tilemoe::train

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    tilemoe::train::print_logits(argv[1]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
