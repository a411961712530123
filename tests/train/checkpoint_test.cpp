#include "train/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <limits>
#include <set>

#include "temp_folder.h"

namespace tilemoe::train {
namespace {

using Json = nlohmann::json;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A model of two tensors and one of the optimiser's; `fill` tells one from another.
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

std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
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
  EXPECT_EQ(load_checkpoint(path, loaded.tensors()), state);
  EXPECT_TRUE(loaded == model);
  EXPECT_EQ(read_checkpoint_state(path), state);
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
  save(21, 1, 2);  // goes on from step 20
  EXPECT_EQ(names_in(run_.path()),
            (std::set<std::string>{"step-00000020.safetensors", "step-00000021.safetensors",
                                   "step-00000030.safetensors", "step-00000040.safetensors"}));
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
  EXPECT_TRUE(contains(error_of([&] { find_checkpoint(run_.path()); }), "no checkpoint in"));
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

TEST_F(Checkpoint, EveryTruncationIsRefused) {
  const std::string whole = read_file(save(20));
  const auto path = run_.path() / "step-00000020.safetensors";
  for (size_t length = 0; length < whole.size(); ++length) {
    write_file(path, whole.substr(0, length));
    EXPECT_TRUE(contains(load_error(path), path.string()));
  }
}

TEST_F(Checkpoint, EveryFlippedBitOfTheDataIsRefused) {
  const auto path = save(20);
  const std::string whole = read_file(path);
  const size_t data_bytes = (6 + 3 + 6) * sizeof(float);
  for (size_t at = whole.size() - data_bytes; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
    write_file(path, damaged);
    EXPECT_TRUE(contains(load_error(path), "damaged"));
  }
}

TEST_F(Checkpoint, ADamagedNewestNamesTheOneBeforeIt) {
  const auto older = save(10);
  const auto newest = save(20);
  write_file(newest, read_file(newest).substr(0, 300));
  EXPECT_EQ(find_checkpoint(run_.path()), newest);
  for (const std::string& error :
       {load_error(newest), error_of([&] { read_checkpoint_state(newest); })}) {
    EXPECT_TRUE(contains(error, newest.string() + ": "));
    EXPECT_TRUE(contains(error, "--resume " + older.string()));
  }
  EXPECT_FALSE(contains(error_of([&] {
                          write_file(older, "");
                          read_checkpoint_state(older);
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
  EXPECT_TRUE(contains(error(tensors), "tensor 'w' has shape (2, 3), this model's is (3, 2)"));
  tensors = model.tensors();
  tensors.pop_back();
  EXPECT_TRUE(contains(error(tensors), "'optimizer.m.w' is not one of this model"));
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
  EXPECT_TRUE(contains(with("tilemoe-checkpoint", "pt________________"), "no checkpoint of"));
  EXPECT_TRUE(contains(with(R"("format_version":"1")", R"("format_version":"2")"), "version '2'"));
  EXPECT_TRUE(contains(with("data_sha256", "DATA_sha256"), "damaged"));
  EXPECT_TRUE(contains(with(R"({\"step\":10})", R"([\"step\",10])"), "no JSON object"));
  EXPECT_TRUE(contains(with(R"("dtype":"F32")", R"("dtype":"I32")"), "has type I32, expected F32"));
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
