#include "train/text.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cstdlib>

#include "temp_folder.h"

namespace tilemoe::train {
namespace {

std::string as_string(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

void write_gzip(const std::filesystem::path& path, const std::string& bytes) {
  gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
            static_cast<int>(bytes.size()));
  ASSERT_EQ(gzclose(file), Z_OK);
}

// `count` documents of `bytes` bytes each, the blank line that ends them included.
std::string documents(char letter, int count, size_t bytes) {
  std::string text;
  for (int i = 0; i < count; ++i) text += std::string(bytes - 2, letter) + "\n\n";
  return text;
}

TEST(Text, HoldsOutTheLastWholeDocuments) {
  TempFolder folder;
  const std::string text = documents('a', 30, 100);
  write_file(folder / "a.txt", text);
  const Corpus corpus = read_text({folder / "a.txt"}, 150);
  EXPECT_EQ(as_string(corpus.train), text.substr(0, 2800));
  EXPECT_EQ(as_string(corpus.validation), text.substr(2800));
  ASSERT_EQ(corpus.train_documents.size(), 28U);
  EXPECT_EQ(corpus.train_documents[27], 2700);
  EXPECT_EQ(corpus.validation_documents, (std::vector<int64_t>{0, 100}));
  EXPECT_EQ(corpus.names, (std::vector<std::string>{(folder / "a.txt").string()}));
}

TEST(Text, ValidationPartIsLimitedToATenthOfASmallText) {
  TempFolder folder;
  write_file(folder / "a.txt", documents('a', 30, 100));
  EXPECT_EQ(read_text({folder / "a.txt"}, kDefaultValidationBytes).validation.size(), 300U);
}

TEST(Text, HoldsOutFromEveryFileInProportion) {
  TempFolder folder;
  write_file(folder / "a.txt", documents('a', 100, 100));
  write_file(folder / "b.txt", documents('b', 300, 100));
  const Corpus corpus = read_text({folder / "a.txt", folder / "b.txt"}, 2000);
  EXPECT_EQ(as_string(corpus.validation), documents('a', 5, 100) + documents('b', 15, 100));
  EXPECT_EQ(as_string(corpus.train), documents('a', 95, 100) + documents('b', 285, 100));
}

TEST(Text, ManySmallFilesKeepTrainingText) {
  TempFolder folder;
  std::vector<std::filesystem::path> files;
  for (int i = 0; i < 100; ++i) {
    files.push_back(folder / std::to_string(i));
    write_file(files.back(), documents('x', 1, 100));
  }
  const Corpus corpus = read_text(files, 500);
  EXPECT_EQ(corpus.validation_documents.size(), 5U);
  EXPECT_EQ(corpus.train_documents.size(), 95U);
}

TEST(Text, CutsAtBlankLinesOfAnyKind) {
  TempFolder folder;
  const std::string filler = documents('z', 20, 100);
  write_file(folder / "a.txt", "one\nline\n\ntwo\r\n \t\r\n\nthree\n" + filler);
  const Corpus corpus = read_text({folder / "a.txt"}, 100);
  ASSERT_GE(corpus.train_documents.size(), 3U);
  EXPECT_EQ(corpus.train_documents[1], 10);  // "two"
  EXPECT_EQ(corpus.train_documents[2], 20);  // "three"
}

TEST(Text, CutsLongStretchesAtLineEnds) {
  TempFolder folder;
  std::string text;
  while (text.size() < 100'000) text += "a line of no great length\n";
  write_file(folder / "lines.txt", text);
  const Corpus corpus = read_text({folder / "lines.txt"}, 1000);
  ASSERT_GE(corpus.train_documents.size(), 4U);
  for (size_t i = 1; i < corpus.train_documents.size(); ++i) {
    const auto begin = static_cast<size_t>(corpus.train_documents[i]);
    EXPECT_EQ(corpus.train[begin - 1], '\n');
    EXPECT_LE(corpus.train_documents[i] - corpus.train_documents[i - 1], 16384);
  }
  write_file(folder / "one-line.txt", std::string(100'000, 'a'));
  EXPECT_EQ(read_text({folder / "one-line.txt"}, 1000).train_documents[1], 16384);
}

TEST(Text, PartsTogetherAreTheText) {
  TempFolder folder;
  std::string text;
  unsigned state = 1;
  for (int i = 0; i < 200'000; ++i) {
    state = state * 1664525 + 1013904223;
    text += "ab \n\n\r\tc"[state >> 29];
  }
  write_file(folder / "a.txt", text);
  const Corpus corpus = read_text({folder / "a.txt"}, 5000);
  EXPECT_EQ(as_string(corpus.train) + as_string(corpus.validation), text);
  EXPECT_GE(corpus.validation.size(), 5000U);
}

TEST(Text, HashIsThatOfAllBytesInOrder) {
  TempFolder folder;
  write_file(folder / "a", std::string(500'000, 'a'));
  write_file(folder / "b", std::string(500'000, 'a'));
  // FIPS 180-2's third example: a million times "a".
  EXPECT_EQ(read_text({folder / "a", folder / "b"}, 1000).sha256,
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Text, ReadsCompressedFiles) {
  TempFolder folder;
  const std::string text = documents('a', 30, 100);
  write_file(folder / "a.txt", text);
  write_gzip(folder / "a.gz", text);
  EXPECT_EQ(read_text({folder / "a.gz"}, 100).sha256, read_text({folder / "a.txt"}, 100).sha256);

  std::string cut = read_file(folder / "a.gz");
  cut.resize(cut.size() - 6);
  write_file(folder / "cut.gz", cut);
  const std::string error = error_of([&] { read_text({folder / "cut.gz"}, 100); });
  EXPECT_TRUE(contains(error, "cut.gz: unexpected end of file"));
}

TEST(Text, NamesTheFileThatCannotBeRead) {
  TempFolder folder;
  const auto error = [&](const std::filesystem::path& path) {
    return error_of([&] { read_text({path}, 100); });
  };
  EXPECT_TRUE(contains(error(folder / "none.txt"), "none.txt: No such file"));
  EXPECT_TRUE(contains(error(folder.path()), "it is a folder"));
  write_file(folder / "empty.txt", "");
  EXPECT_TRUE(contains(error(folder / "empty.txt"), "empty.txt is empty"));
  write_file(folder / "small.txt", documents('a', 5, 100));
  EXPECT_TRUE(contains(error(folder / "small.txt"), "too small"));
  write_file(folder / "one.txt", std::string(2000, 'a'));
  EXPECT_TRUE(contains(error(folder / "one.txt"), "too small"));
  write_file(folder / "good.txt", documents('a', 30, 100));
  EXPECT_TRUE(contains(error_of([&] { read_text({folder / "good.txt"}, 0); }), "validation"));
}

// Three entries, given out of order and one of them under two headwords, after two line ends.
class Dictionary : public testing::Test {
 protected:
  Dictionary() : files_{folder_ / "d.dz", folder_ / "d.index"} {
    text_ = "\n\n" + std::string(997, 'x') + "\n" + std::string(599, 'y') + "\n" +
            std::string(99, 'z') + "\n";
    write_gzip(files_.text, text_);
    write_file(files_.index, "y\tPo\tJX\nx\tC\tPl\nx2\tC\tPl\nz\tZA\tBj\n");  // 1000, 2, 2, 1600
  }

  TempFolder folder_;
  DictionaryFiles files_;
  std::string text_;
};

TEST_F(Dictionary, DocumentsAreTheEntriesOfTheIndex) {
  const Corpus corpus = read_dictionary(files_, 50);
  EXPECT_EQ(corpus.train_documents, (std::vector<int64_t>{0, 1000}));
  EXPECT_EQ(as_string(corpus.validation), std::string(99, 'z') + "\n");
  EXPECT_EQ(as_string(corpus.train) + as_string(corpus.validation), text_);
}

TEST_F(Dictionary, RefusesAnIndexThatDoesNotFit) {
  const auto error = [&](const std::string& index) {
    write_file(files_.index, index);
    return error_of([&] { read_dictionary(files_, 50); });
  };
  EXPECT_TRUE(contains(error("x\tC\tPl\nz\tZA\tBk9\n"), "d.index line 2"));
  EXPECT_TRUE(contains(error("x\tC\n"), "d.index line 1"));
  EXPECT_TRUE(contains(error("x\t!\tB\n"), "d.index line 1"));
  EXPECT_TRUE(contains(error("x\t\tB\n"), "d.index line 1"));
  EXPECT_TRUE(contains(error("x\t///////////\tB\n"), "d.index line 1"));
}

// Puts a package manager of our own first in PATH: nobody's, root's neither, is run.
TEST_F(Dictionary, NamesTheCommandThatInstallsItAndRunsNothing) {
  require_dictionary(files_);  // it exists
  std::filesystem::remove(files_.index);
  const auto manager = folder_ / "bin/apt-get";
  std::filesystem::create_directory(folder_ / "bin");
  write_file(manager, "#!/bin/sh\ntouch " + (folder_ / "called").string() + "\n");
  std::filesystem::permissions(manager, std::filesystem::perms::owner_all);
  const std::string path = std::getenv("PATH");
  ASSERT_EQ(::setenv("PATH", ((folder_ / "bin").string() + ":" + path).c_str(), 1), 0);
  const std::string error = error_of([&] { require_dictionary(files_); });
  EXPECT_TRUE(contains(error, "sudo apt-get install -y dict-gcide"));
  EXPECT_TRUE(contains(error, "--text"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "called"));
  ASSERT_EQ(::setenv("PATH", path.c_str(), 1), 0);
}

}  // namespace
}  // namespace tilemoe::train
