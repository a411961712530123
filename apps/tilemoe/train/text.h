// The text a model learns: files, or the English dictionary when none is named, cut into documents
// and split into a training and a held-out part.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tilemoe::train {

constexpr int64_t kDefaultHeldBytes = 1'000'000;

// Each part is whole documents, one after the other; `*_documents` are the offsets at which they
// begin (the first is 0).
struct Corpus {
  std::vector<uint8_t> train;
  std::vector<uint8_t> held;
  std::vector<int64_t> train_documents;
  std::vector<int64_t> held_documents;
  std::string sha256;              // of all bytes, in the order of the files
  std::string split_sha256;        // of the training part, its size, and the held-out part
  std::vector<std::string> names;  // the files read
};

// Where the dictionary package puts its text and its index.
struct DictionaryFiles {
  std::filesystem::path text = "/usr/share/dictd/gcide.dict.dz";
  std::filesystem::path index = "/usr/share/dictd/gcide.index";
};

// Reads `files`. A document ends at a run of blank lines (lines of spaces, tabs and carriage
// returns only), which belongs to it; a stretch of more than 16 KiB without one is cut at the last
// line end inside the 16 KiB, or after them. Held out are the last documents of each file, in
// proportion to its size: together at least min(held_bytes, a tenth of the text), and less than one
// document more. What is gzip-compressed is decompressed. Throws std::runtime_error naming the file
// that is missing, empty, unreadable or damaged, or saying that the text is too small to be split.
Corpus read_text(const std::vector<std::filesystem::path>& files, int64_t held_bytes);

// The same for the dictionary: a document is an entry of its index.
Corpus read_dictionary(const DictionaryFiles& files, int64_t held_bytes);

// Throws, with the one command that installs it, where the dictionary is not there.
void require_dictionary(const DictionaryFiles& files);

// What `train` calls: the files, or the dictionary when there are none.
Corpus load_corpus(const std::vector<std::filesystem::path>& files, int64_t held_bytes);

}  // namespace tilemoe::train
