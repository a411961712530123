#include "train/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <limits>
#include <set>

#include "temp_folder.h"
#include "train/run_folder.h"
#include "train/safetensors.h"
#include "train/sha256.h"

namespace tilemoe::train {
namespace {

using Json = nlohmann::json;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A model of two tensors and one of the optimiser's; `fill` makes each one different.
struct Model {
  explicit Model(float fill = 0) {
    std::fill(w.begin(), w.end(), fill);
    std::fill(b.begin(), b.end(), -fill);
    std::fill(m.begin(), m.end(), 2 * fill);
  }
  std::vector<TensorRef> tensors() & {
    return {{"w", {2, 3}, w.data()}, {"b", {3}, b.data()}, {"optimizer.m.w", {2, 3}, m.data()}};
  }
  std::vector<TensorRef> weights() & { return {{"w", {2, 3}, w.data()}, {"b", {3}, b.data()}}; }
  bool operator==(const Model& other) const {
    return std::memcmp(w.data(), other.w.data(), w.size() * sizeof(float)) == 0 &&
           std::memcmp(b.data(), other.b.data(), b.size() * sizeof(float)) == 0 &&
           std::memcmp(m.data(), other.m.data(), m.size() * sizeof(float)) == 0;
  }

  std::vector<float> w = std::vector<float>(6), b = std::vector<float>(3),
                     m = std::vector<float>(6);
};

// But for the run's own notes.
std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  names.erase("run.json");
  return names;
}

// A checkpoint's bytes with the hash that its bytes have: as somebody writes it who means to.
std::string with_hash(std::string bytes) {
  const std::string key = "\"file_sha256\":\"";
  const size_t digits = bytes.find(key) + key.size();
  bytes.replace(digits, 64, std::string(64, '0'));
  Sha256 hash;
  hash.update(bytes.data(), bytes.size());
  return bytes.replace(digits, 64, hash.hex());
}

// A whole file of that header, which names its hash, and data.
std::string file_of(const std::string& json, size_t data_bytes = 0) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(json.size() >> (8 * i) & 0xff);
  return with_hash(bytes + json + std::string(data_bytes, '\1'));
}

std::string metadata_of(const std::string& state) {
  return R"("__metadata__":{"file_sha256":")" + std::string(64, '0') +
         R"(","format":"tilemoe-checkpoint","format_version":"2","state":)" + Json(state).dump() +
         "}";
}

class Checkpoint : public testing::Test {
 protected:
  std::filesystem::path save(int64_t step, float fill = 1, int keep = 3) {
    Model model(fill);
    return save_checkpoint(run_, step, model.tensors(), {{"step", step}}, keep);
  }
  // The complaint about a file that must not load; the model must be left as it was.
  std::string load_error(const std::filesystem::path& path) {
    Model model(7);
    const std::string error = error_of([&] { load_checkpoint(path, model.tensors()); });
    EXPECT_TRUE(model == Model(7)) << "a refused checkpoint changed the model";
    return error;
  }

  TempFolder folder_;
  RunFolder run_{folder_ / "runs/one"};
};

TEST_F(Checkpoint, GivesBackEveryBit) {
  Model model(0.1F);
  model.w = {kNan, -0.0F, 1e-45F, std::numeric_limits<float>::infinity(), 3.4e38F, 0.3F};
  const Json state = {
      {"step", 12}, {"seed", 0xffffffffffffffffULL}, {"lr", 0.1}, {"text", "\u00e9"}};
  const auto path = save_checkpoint(run_, 12, model.tensors(), state, 3);
  EXPECT_EQ(path.filename(), "step-00000012.safetensors");
  Model loaded;
  EXPECT_EQ(load_checkpoint(path, loaded.tensors()).state, state);
  EXPECT_TRUE(loaded == model);
  const CheckpointSummary summary = read_checkpoint(path);
  EXPECT_EQ(summary.state, state);
  EXPECT_EQ(summary.step, 12);
  EXPECT_EQ(summary.weights, 6 + 3);
}

TEST_F(Checkpoint, WeightsAloneCanBeLoaded) {
  const auto path = save(5, 3);
  Model loaded;
  load_checkpoint(path, loaded.weights(), "optimizer.");
  Model expected(3);
  expected.m = Model().m;
  EXPECT_TRUE(loaded == expected);
}

TEST_F(Checkpoint, EqualContentsGiveEqualFiles) {
  const std::string first = read_file(save(5, 3));
  EXPECT_EQ(read_file(save(5, 3)), first);
}

TEST_F(Checkpoint, KeepsTheNewest) {
  for (int64_t step = 10; step <= 50; step += 10) save(step, 1, 2);
  EXPECT_EQ(names_in(run_.path()),
            (std::set<std::string>{"step-00000040.safetensors", "step-00000050.safetensors"}));
  EXPECT_EQ(find_checkpoint(run_.path()).filename(), "step-00000050.safetensors");
}

TEST_F(Checkpoint, ARunTakenUpEarlierKeepsItsOwn) {
  for (int64_t step = 10; step <= 40; step += 10) save(step, 1, 4);
  save(21, 1, 2);  // continues from step 20
  EXPECT_EQ(names_in(run_.path()),
            (std::set<std::string>{"step-00000020.safetensors", "step-00000021.safetensors",
                                   "step-00000030.safetensors", "step-00000040.safetensors"}));
}

TEST_F(Checkpoint, FilesOfOthersAreLeftAlone) {
  for (const char* name : {"step-00000005.safetensors", "step-00000050.safetensors"})
    write_file(run_.path() / name, "mine");
  for (int64_t step = 10; step <= 40; step += 10) save(step, 1, 1);
  EXPECT_EQ(names_in(run_.path()),
            (std::set<std::string>{"step-00000005.safetensors", "step-00000040.safetensors",
                                   "step-00000050.safetensors"}));
  EXPECT_TRUE(contains(error_of([&] { save(50); }), "not a checkpoint of this run"));
  EXPECT_EQ(read_file(run_.path() / "step-00000050.safetensors"), "mine");
}

TEST_F(Checkpoint, AnUnfinishedFileOfOthersIsNotWrittenThrough) {
  write_file(folder_ / "elsewhere", "mine");
  const auto link = run_.path() / "step-00000010.safetensors.unfinished";
  std::filesystem::create_symlink(folder_ / "elsewhere", link);
  EXPECT_TRUE(contains(error_of([&] { save(10); }), "File exists"));
  EXPECT_EQ(read_file(folder_ / "elsewhere"), "mine");
  EXPECT_TRUE(std::filesystem::is_symlink(link));
}

TEST_F(Checkpoint, StepsAreOrderedAsNumbers) {
  save(99'999'999);
  save(100'000'000);
  EXPECT_EQ(list_checkpoints(run_.path()).front().step, 100'000'000);
}

TEST_F(Checkpoint, OtherFilesAreNoCheckpoints) {
  for (const char* name : {"step-.safetensors", "step-1x.safetensors", "step--1.safetensors",
                           "model.safetensors", "step-00000001.safetensors.bak"})
    write_file(run_.path() / name, "mine");
  EXPECT_TRUE(list_checkpoints(run_.path()).empty());
  EXPECT_TRUE(contains(error_of([&] { find_checkpoint(run_.path()); }), "no checkpoint found in"));
  EXPECT_TRUE(contains(error_of([&] { find_checkpoint(folder_ / "none"); }), "no checkpoint"));
  save(1, 1, 1);
  EXPECT_EQ(names_in(run_.path()).size(), 6U);
}

TEST_F(Checkpoint, AFolderIsForOneProcess) {
  EXPECT_TRUE(contains(error_of([&] { RunFolder second(run_.path()); }), "another process"));
  write_file(folder_ / "file", "");
  EXPECT_TRUE(contains(error_of([&] { RunFolder bad(folder_ / "file"); }), "file"));
}

TEST(RunFolderTest, RemovesUnfinishedSaves) {
  TempFolder folder;
  write_file(folder / "step-00000007.safetensors.unfinished", "half");
  write_file(folder / "notes.unfinished", "mine");
  { RunFolder run(folder.path()); }
  RunFolder again(folder.path());
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"notes.unfinished"}));
}

TEST(RunFolderTest, RemembersOptionsAndCheckpoints) {
  TempFolder folder;
  {
    RunFolder run(folder.path());
    run.set_options({{"keep", 7}});
    run.claim("step-00000001.safetensors");  // the process ends before the file exists
    run.claim("step-00000002.safetensors");
    write_file(folder / "step-00000002.safetensors", "");
  }
  write_file(folder / "run.json.unfinished", "half");
  const RunFolder again(folder.path());
  EXPECT_EQ(RunFolder::options_of(folder.path()), Json({{"keep", 7}}));
  EXPECT_TRUE(again.owns("step-00000002.safetensors"));
  EXPECT_FALSE(again.owns("step-00000001.safetensors"));
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"step-00000002.safetensors"}));
  EXPECT_EQ(RunFolder::options_of(folder / "none"), Json::object());
}

TEST(RunFolderTest, SaysWhatIsDamaged) {
  TempFolder folder;
  for (const char* text :
       {"", "{}", "[]", R"({"format":"tilemoe-run","options":{},"checkpoints":[1]})",
        R"({"format":"other","options":{},"checkpoints":[]})", "[[[[[[[[[["}) {
    write_file(folder / "run.json", text);
    EXPECT_TRUE(contains(error_of([&] { RunFolder run(folder.path()); }), "run.json is damaged"));
  }
}

TEST_F(Checkpoint, EveryTruncationIsRefused) {
  const auto path = save(20);
  for (uintmax_t length = std::filesystem::file_size(path); length-- > 0;) {
    std::filesystem::resize_file(path, length);
    EXPECT_TRUE(contains(load_error(path), path.string()));
  }
}

TEST_F(Checkpoint, EveryFlippedBitIsRefused) {
  const auto path = save(20);
  const std::string whole = read_file(path);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto put = [&](size_t at, char byte) {
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte).flush();
  };
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      put(at, static_cast<char>(whole[at] ^ (1 << bit)));
      EXPECT_TRUE(contains(load_error(path), path.string())) << "byte " << at << ", bit " << bit;
    }
    put(at, whole[at]);
  }
  EXPECT_NO_THROW(read_checkpoint(path));
}

// Longer than any part that is read at once.
TEST_F(Checkpoint, TheLastByteOfMuchDataIsHashed) {
  std::vector<float> values((size_t{65} << 20) / sizeof(float), 0.5F);
  const std::vector<TensorRef> tensors = {{"w", {std::ssize(values)}, values.data()}};
  const auto path = save_checkpoint(run_, 1, tensors, {{"step", 1}}, 1);
  EXPECT_NO_THROW(read_checkpoint(path));
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\1');
  }
  EXPECT_TRUE(contains(error_of([&] { read_checkpoint(path); }), "damaged"));
}

TEST_F(Checkpoint, AStepThatIsNotTheNamesIsRefused) {
  const auto path = save(20);
  const std::string whole = read_file(path);
  const auto with_step = [&](const std::string& step) {
    std::string changed = whole;
    changed.replace(changed.find(R"({\"step\":20})"), 13, R"({\"step\":)" + step + "}");
    write_file(path, with_hash(changed));
    return load_error(path);
  };
  EXPECT_TRUE(contains(with_step("39"), "its state has step 39, expected step 20"));
  EXPECT_TRUE(contains(with_step("-5"), "no integer \"step\""));
  // Under a name of the user's own any step may be.
  const auto mine = run_.path() / "best.safetensors";
  write_file(mine, whole);
  EXPECT_EQ(read_checkpoint(mine).step, 20);
}

TEST_F(Checkpoint, StatesThatMeanNothingAreRefused) {
  const auto path = run_.path() / "mine.safetensors";
  const auto error_with = [&](const std::string& state) {
    write_file(path, file_of("{" + metadata_of(state) + "}"));
    return error_of([&] { read_checkpoint(path); });
  };
  write_file(path, file_of("{" + metadata_of(R"({"step":3})") + "}"));
  EXPECT_EQ(read_checkpoint(path).step, 3);
  EXPECT_TRUE(contains(error_with(""), "its state is not JSON"));
  EXPECT_TRUE(contains(error_with("[1]"), "its state is not a JSON object"));
  EXPECT_TRUE(contains(error_with(R"({"step":1,"step":2})"), "its state has 'step' twice"));
  for (const char* step : {"-1", "1.0", "\"1\"", "null", "18446744073709551615", "1e3"})
    EXPECT_TRUE(
        contains(error_with(R"({"step":)" + std::string(step) + "}"), "no integer \"step\""));
  EXPECT_TRUE(contains(error_with("{}"), "no integer \"step\""));
}

// Values nested so deep that walking over them takes more stack than a thread has.
TEST_F(Checkpoint, DeepHeadersAreRefused) {
  constexpr size_t kDepth = 1'000'000;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  std::string objects;
  for (size_t i = 0; i < kDepth; ++i) objects += "{\"a\":";
  objects += "1" + std::string(kDepth, '}');
  const auto path = run_.path() / "mine.safetensors";
  const auto refused = [&](const std::string& json) {
    write_file(path, file_of(json, 4));
    return contains(error_of([&] { read_checkpoint(path); }), "deep");
  };
  const std::string good = metadata_of(R"({"step":3})");
  EXPECT_TRUE(refused("{" + good + R"(,"w":{"dtype":"F32","shape":)" + deep +
                      R"(,"data_offsets":[0,4]}})"));
  EXPECT_TRUE(
      refused("{" + good + R"(,"w":{"dtype":"F32","shape":[1],"data_offsets":)" + deep + "}}"));
  EXPECT_TRUE(refused("{" + good + R"(,"w":)" + objects + "}"));
  for (const std::string& inside : {deep, objects})
    EXPECT_TRUE(refused("{" + metadata_of(R"({"step":3,"config":)" + inside + "}") +
                        R"(,"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})"));
}

TEST_F(Checkpoint, ADamagedNewestNamesTheOneBeforeIt) {
  const auto older = save(10);
  const auto newest = save(20);
  write_file(newest, read_file(newest).substr(0, 300));
  EXPECT_EQ(find_checkpoint(run_.path()), newest);
  for (const std::string& error :
       {load_error(newest), error_of([&] { read_checkpoint(newest); })}) {
    EXPECT_TRUE(contains(error, newest.string() + ": "));
    EXPECT_TRUE(contains(error, "--resume " + older.string()));
  }
  EXPECT_FALSE(contains(error_of([&] {
                          write_file(older, "");
                          read_checkpoint(older);
                        }),
                        "--resume"));
}

TEST_F(Checkpoint, AnotherModelIsRefused) {
  const auto path = save(10);
  Model model(7);
  const auto error = [&](std::vector<TensorRef> tensors) {
    return error_of([&] { load_checkpoint(path, tensors); });
  };
  auto tensors = model.tensors();
  tensors[0].shape = {3, 2};
  EXPECT_TRUE(contains(error(tensors), "tensor 'w' has shape (2, 3), expected (3, 2)"));
  tensors = model.tensors();
  tensors.pop_back();
  EXPECT_TRUE(contains(error(tensors), "'optimizer.m.w' is not a tensor of this model"));
  tensors = model.tensors();
  float extra[1] = {7};
  tensors.push_back({"c", {1}, extra});
  EXPECT_TRUE(contains(error(tensors), "'c' is missing"));
  EXPECT_TRUE(model == Model(7)) << "a refused checkpoint changed the model";
}

TEST_F(Checkpoint, ForeignFilesAndVersionsAreRefused) {
  const auto path = save(10);
  const std::string whole = read_file(path);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = whole;
    EXPECT_EQ(from.size(), to.size());
    changed.replace(changed.find(from), from.size(), to);
    write_file(path, changed);
    return load_error(path);
  };
  EXPECT_TRUE(contains(with("tilemoe-checkpoint", "pt________________"), "not a checkpoint of"));
  EXPECT_TRUE(contains(with(R"("format_version":"2")", R"("format_version":"1")"),
                       "the version of the checkpoint format is '1', expected '2'"));
  EXPECT_TRUE(contains(with("file_sha256", "FILE_sha256"), "damaged"));
  EXPECT_TRUE(contains(with(R"("dtype":"F32")", R"("dtype":"I32")"), "damaged"));
  write_file(path, with_hash(whole).replace(whole.find("F32"), 3, "I32"));
  write_file(path, with_hash(read_file(path)));
  EXPECT_TRUE(contains(load_error(path), "has type I32, expected F32"));
}

// A limit on the size of files stands for the full disk: the write fails in the same place.
TEST_F(Checkpoint, AFullDiskLeavesTheEarlierOnes) {
  const auto before = save(10, 1);
  const std::string bytes = read_file(before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit unlimited = limit;
  for (const rlim_t room : {size_t{0}, size_t{100}, bytes.size() - 1}) {
    limit.rlim_cur = room;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const std::string error = error_of([&] { save(20, 2, 1); });
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &unlimited), 0);
    EXPECT_TRUE(contains(error, "step 20 was not saved: cannot write"));
    EXPECT_TRUE(contains(error, "File too large"));
    EXPECT_EQ(names_in(run_.path()), (std::set<std::string>{before.filename().string()}));
    EXPECT_EQ(read_file(before), bytes);
  }
  std::signal(SIGXFSZ, handler);
  EXPECT_NO_THROW(save(20, 2, 1));
}

TEST_F(Checkpoint, BadArgumentsAreRefused) {
  EXPECT_THROW(save(-1), std::invalid_argument);
  EXPECT_THROW(save(1, 1, 0), std::invalid_argument);
  Model model;
  auto tensors = model.tensors();
  tensors[1].name = "w";
  EXPECT_THROW(save_checkpoint(run_, 1, tensors, Json::object(), 1), std::invalid_argument);
  EXPECT_TRUE(names_in(run_.path()).empty());
}

TEST(ChangedOptions, AreNamedWithBothValues) {
  const Json saved = {{"lr", 0.004}, {"moe", {{"experts", 16}, {"top_k", 2}}}, {"gone", true}};
  const Json now = {{"lr", 0.002}, {"moe", {{"experts", 16}, {"top_k", 4}}}, {"new", "x"}};
  const auto changes = changed_options(saved, now);
  ASSERT_EQ(changes.size(), 4U);
  EXPECT_EQ(changes[0].name, "gone");
  EXPECT_EQ(changes[1].name, "lr");
  EXPECT_EQ(changes[1].saved, 0.004);
  EXPECT_EQ(changes[1].now, 0.002);
  EXPECT_EQ(changes[2].name, "moe.top_k");
  EXPECT_EQ(changes[3].name, "new");
  EXPECT_TRUE(changes[3].saved.is_null());

  EXPECT_NO_THROW(require_same_options(saved, saved, "c"));
  const std::string error = error_of([&] { require_same_options(saved, now, "some/step.x"); });
  EXPECT_TRUE(contains(error, "cannot resume from some/step.x"));
  EXPECT_TRUE(contains(error, "moe.top_k: 2 in the checkpoint, 4 now"));
  EXPECT_TRUE(contains(error, "lr: 0.004 in the checkpoint, 0.002 now"));
}

}  // namespace
}  // namespace tilemoe::train
