// A model small enough to be tried in many ways, and what it reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/random.h"
#include "train/trainer.h"

namespace tilemoe::train {

inline TrainerConfig small_config() {
  TrainerConfig config;
  config.model.width = 32;
  config.model.embedded_bytes = 2;
  config.model.heads = 2;
  config.model.taps = 3;
  config.model.experts = 4;
  config.model.top_k = 2;
  config.model.expert_width = 16;
  config.model.routing.m = 8;
  config.batch = {3, 20};
  config.schedule = {.steps = 40, .warm_up = 5};
  config.evaluation_context = 10;
  return config;
}

// Words in a random order: one part can be learnt, the other cannot.
inline Corpus small_corpus(uint64_t seed = 1) {
  const std::string words[] = {"the ", "quick ", "brown ", "fox ", "jumps ", "over ", "it\n"};
  const RandomStream random(seed, "words");
  std::string text;
  for (uint64_t i = 0; text.size() < 5000; ++i) text += words[random.bits(i) % 7];
  Corpus corpus;
  corpus.train.assign(text.begin(), text.begin() + 4000);
  corpus.validation.assign(text.begin() + 4000, text.end());
  corpus.sha256 = std::to_string(seed);
  corpus.names = {"words"};
  return corpus;
}

// Random bytes, as a pass over `sequences` takes them.
struct Batch {
  Batch(const Model& model, Sequences sequences) {
    const RandomStream random(5, "batch");
    inputs.resize(static_cast<size_t>(sequences.count * (model.past() + sequences.length)));
    targets.resize(static_cast<size_t>(sequences.tokens()));
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = static_cast<uint8_t>(random.bits(i));
    for (size_t i = 0; i < targets.size(); ++i)
      targets[i] = static_cast<uint8_t>(random.bits(1000 + i));
  }
  std::vector<uint8_t> inputs, targets;
};

}  // namespace tilemoe::train
