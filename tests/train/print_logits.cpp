// print_logits CHECKPOINT: reads bytes from standard input and writes what the checkpoint's model
// says of each, (bytes, 256) float32, to standard output. For tests that read checkpoints
// elsewhere.
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>
#include <vector>

#include "train/trained_model.h"

namespace tilemoe::train {
namespace {

void print_logits(const char* checkpoint) {
  std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(std::cin), {}};
  const int64_t length = std::ssize(bytes);
  const auto model = load_model(checkpoint, Device::kCpu, length);
  bytes.insert(bytes.begin(), static_cast<size_t>(model->past()), 0);
  const ConstFloats logits = model->logits({1, length}, bytes);
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
