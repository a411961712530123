#include "text.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string_view>

#include "file.h"
#include "sha256.h"

namespace tilemoe::train {
namespace {

namespace fs = std::filesystem;

// Longest stretch of a file without a blank line that stays one document.
constexpr size_t kLongestStretch = 16 * 1024;
// Less text than this is too little for two parts.
constexpr size_t kSmallestText = 1024;
// The validation part is at most 1 / kLargestValidationShare of the text.
constexpr int64_t kLargestValidationShare = 10;

// The bytes of all files and the offsets at which documents and files begin.
struct Text {
  std::vector<uint8_t> bytes;
  std::vector<size_t> documents;
  std::vector<size_t> files;
};

// Appends the file to `bytes`, decompressed if it is compressed.
void append_file(const fs::path& path, std::vector<uint8_t>& bytes) {
  if (fs::is_directory(path))
    throw std::runtime_error("cannot read " + path.string() + ": it is a folder; list its files");
  File file(path, O_RDONLY, "read");
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> stream(gzdopen(::dup(file.descriptor()), "rb"),
                                                          gzclose);
  if (!stream) throw std::runtime_error("cannot read " + path.string() + ": out of memory");
  const size_t before = bytes.size();
  constexpr unsigned kChunk = 1 << 20;
  gzbuffer(stream.get(), kChunk);
  for (;;) {
    const size_t used = bytes.size();
    bytes.resize(used + kChunk);
    const int got = gzread(stream.get(), bytes.data() + used, kChunk);
    bytes.resize(used + static_cast<size_t>(std::max(got, 0)));
    if (got <= 0) break;
  }
  int error = Z_OK;
  std::string_view reason = gzerror(stream.get(), &error);
  reason.remove_prefix(std::min(reason.find(": ") + 2, reason.size()));  // zlib's name of the file
  if (error != Z_OK)
    throw std::runtime_error("cannot read " + path.string() + ": " + std::string(reason));
  if (bytes.size() == before) throw std::runtime_error(path.string() + " is empty");
}

bool is_blank(uint8_t byte) {
  return byte == ' ' || byte == '\t' || byte == '\r';
}

// Appends where the documents of bytes [begin, end) begin.
void cut_at_blank_lines(const std::vector<uint8_t>& bytes, size_t begin,
                        std::vector<size_t>& cuts) {
  cuts.push_back(begin);
  bool after_blank_line = false;
  size_t line_begin = begin;
  while (line_begin < bytes.size()) {
    size_t line_end = line_begin;
    bool blank = true;
    while (line_end < bytes.size() && bytes[line_end] != '\n') blank &= is_blank(bytes[line_end++]);
    if (line_end < bytes.size()) ++line_end;  // the line end belongs to its line
    const bool too_long = line_end - cuts.back() > kLongestStretch;
    if (!blank && (after_blank_line || too_long) && line_begin > cuts.back())
      cuts.push_back(line_begin);
    while (line_end - cuts.back() > kLongestStretch) cuts.push_back(cuts.back() + kLongestStretch);
    after_blank_line = blank;
    line_begin = line_end;
  }
}

// Moves the validation documents out of the text; the rest is moved together in place, since a text
// may be most of the memory.
Corpus split(Text text, int64_t validation_bytes) {
  const auto total = static_cast<int64_t>(text.bytes.size());
  if (validation_bytes <= 0) throw std::runtime_error("validation bytes must be positive");
  if (text.bytes.size() < kSmallestText || text.documents.size() < 2)
    throw std::runtime_error(
        "the text is too small for a validation part: " + std::to_string(total) + " bytes in " +
        std::to_string(text.documents.size()) + " documents");
  Corpus corpus;
  Sha256 hash;
  hash.update(text.bytes.data(), text.bytes.size());
  corpus.sha256 = hash.hex();

  const int64_t goal = std::min(validation_bytes, total / kLargestValidationShare);
  std::vector<size_t> ends(text.documents.begin() + 1, text.documents.end());
  ends.push_back(text.bytes.size());
  // From the first file to the last: documents are taken from a file's end until the sum of the
  // bytes taken is the goal's fraction of the files so far.
  std::vector<bool> is_validation(ends.size(), false);
  int64_t validation = 0;
  size_t document = 0;
  for (size_t file = 0; file < text.files.size(); ++file) {
    const size_t first = document;
    const size_t file_end = file + 1 < text.files.size() ? text.files[file + 1] : text.bytes.size();
    while (document < ends.size() && ends[document] <= file_end) ++document;
    const double share = static_cast<double>(file_end) / static_cast<double>(total);
    const auto file_goal = static_cast<int64_t>(static_cast<double>(goal) * share);
    for (size_t i = document; i-- > first && validation < file_goal;) {
      is_validation[i] = true;
      validation += static_cast<int64_t>(ends[i] - text.documents[i]);
    }
  }
  if (validation >= total)
    throw std::runtime_error("the text is too small: no document remains for training");

  corpus.validation.reserve(static_cast<size_t>(validation));
  size_t kept = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const auto begin = text.bytes.begin() + static_cast<ptrdiff_t>(text.documents[i]);
    const auto end = text.bytes.begin() + static_cast<ptrdiff_t>(ends[i]);
    if (is_validation[i]) {
      corpus.validation_documents.push_back(static_cast<int64_t>(corpus.validation.size()));
      corpus.validation.insert(corpus.validation.end(), begin, end);
    } else {
      corpus.train_documents.push_back(static_cast<int64_t>(kept));
      std::copy(begin, end, text.bytes.begin() + static_cast<ptrdiff_t>(kept));
      kept += ends[i] - text.documents[i];
    }
  }
  text.bytes.resize(kept);
  corpus.train = std::move(text.bytes);
  Sha256 split_hash;
  split_hash.update(corpus.train.data(), corpus.train.size());
  const std::string size = " " + std::to_string(corpus.train.size()) + " ";
  split_hash.update(size.data(), size.size());
  split_hash.update(corpus.validation.data(), corpus.validation.size());
  corpus.split_sha256 = split_hash.hex();
  return corpus;
}

// dictd writes offsets and lengths in base 64, most significant digit first.
int64_t base64_number(std::string_view digits) {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  constexpr size_t kMaxDigits = 10;  // 60 bits
  if (digits.empty() || digits.size() > kMaxDigits) return -1;
  int64_t value = 0;
  for (const char digit : digits) {
    const size_t at = kAlphabet.find(digit);
    if (at == std::string_view::npos) return -1;
    value = value * 64 + static_cast<int64_t>(at);
  }
  return value;
}

// Lines of "headword <tab> offset <tab> length"; several headwords may name one entry.
std::vector<size_t> entry_offsets(const fs::path& path, size_t text_bytes) {
  std::vector<uint8_t> bytes;
  append_file(path, bytes);
  const std::string_view index(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::vector<size_t> offsets;
  size_t line_number = 0;
  for (size_t begin = 0; begin < index.size();) {
    const size_t end = std::min(index.find('\n', begin), index.size());
    const std::string_view line = index.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    const size_t tab1 = line.find('\t');
    const size_t tab2 = tab1 == line.npos ? line.npos : line.find('\t', tab1 + 1);
    int64_t offset = -1, length = -1;
    if (tab2 != line.npos) {
      offset = base64_number(line.substr(tab1 + 1, tab2 - tab1 - 1));
      length = base64_number(line.substr(tab2 + 1));
    }
    if (offset < 0 || length < 0 || static_cast<size_t>(offset + length) > text_bytes)
      throw std::runtime_error(path.string() + " line " + std::to_string(line_number) +
                               ": expected an entry of the dictionary next to it");
    offsets.push_back(static_cast<size_t>(offset));
  }
  std::sort(offsets.begin(), offsets.end());
  offsets.erase(std::unique(offsets.begin(), offsets.end()), offsets.end());
  return offsets;
}

}  // namespace

Corpus read_text(const std::vector<fs::path>& files, int64_t validation_bytes) {
  Text text;
  std::vector<std::string> names;
  for (const fs::path& path : files) {
    const size_t begin = text.bytes.size();
    append_file(path, text.bytes);
    text.files.push_back(begin);
    cut_at_blank_lines(text.bytes, begin, text.documents);
    names.push_back(path.string());
  }
  Corpus corpus = split(std::move(text), validation_bytes);
  corpus.names = std::move(names);
  return corpus;
}

Corpus read_dictionary(const DictionaryFiles& files, int64_t validation_bytes) {
  Text text;
  append_file(files.text, text.bytes);
  text.files.push_back(0);
  text.documents = entry_offsets(files.index, text.bytes.size());
  text.documents.front() = 0;  // the line ends before the first entry are its own
  Corpus corpus = split(std::move(text), validation_bytes);
  corpus.names.push_back(files.text.string());
  return corpus;
}

void require_dictionary(const DictionaryFiles& files) {
  if (fs::exists(files.text) && fs::exists(files.index)) return;
  throw std::runtime_error(
      "the default text, the dictionary of the package dict-gcide, is not installed; install it "
      "with `sudo apt-get install -y dict-gcide` or choose files with --text");
}

Corpus load_corpus(const std::vector<fs::path>& files, int64_t validation_bytes) {
  if (!files.empty()) return read_text(files, validation_bytes);
  const DictionaryFiles dictionary;
  require_dictionary(dictionary);
  return read_dictionary(dictionary, validation_bytes);
}

}  // namespace tilemoe::train
