// The text that a model learns: files, or the English dictionary if no file is named. It is cut
// into documents, and split into a training and a validation part.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tilemoe::train {

constexpr int64_t kDefaultValidationBytes = 1'000'000;

// Each part is whole documents, one after the other; `*_documents` are the offsets at which they
// begin (the first is 0).
struct Corpus {
  std::vector<uint8_t> train;
  std::vector<uint8_t> validation;
  std::vector<int64_t> train_documents;
  std::vector<int64_t> validation_documents;
  std::string sha256;              // hash of all bytes, in the order of the files
  std::string split_sha256;        // hash of the training part, its size, and the validation part
  std::vector<std::string> names;  // the files read
};

// The text and the index of the dictionary package.
struct DictionaryFiles {
  std::filesystem::path text = "/usr/share/dictd/gcide.dict.dz";
  std::filesystem::path index = "/usr/share/dictd/gcide.index";
};

// Reads `files`. A document ends at a run of blank lines (lines of spaces, tabs and carriage
// returns only), which belongs to it; a stretch of more than 16 KiB without one is cut at the last
// line end inside the 16 KiB, or after them. The last documents of each file, in proportion to
// its size, are the validation part: together at least min(validation_bytes, a tenth of the text),
// and less than one document more. Files compressed with gzip are decompressed. Throws
// std::runtime_error with the name of the file that is missing, empty, unreadable or damaged, or if
// the text is too small to be split.
Corpus read_text(const std::vector<std::filesystem::path>& files, int64_t validation_bytes);

// The same for the dictionary: a document is an entry of its index.
Corpus read_dictionary(const DictionaryFiles& files, int64_t validation_bytes);

// Throws, with the one command that installs it, if the dictionary is not installed.
void require_dictionary(const DictionaryFiles& files);

// `train` calls this: reads the files, or the dictionary if no file is named.
Corpus load_corpus(const std::vector<std::filesystem::path>& files, int64_t validation_bytes);

}  // namespace tilemoe::train
