// Every bit of routing is the same for every number of threads, and no workspace depends on it.
#include <gtest/gtest.h>

#include "routing_support.h"

namespace tilemoe::routing_test {
namespace {

constexpr int64_t kT = 900, kE = 70, kK = 6;

// Everything that was written, as bytes, so that NaN equals NaN.
using Bytes = std::string;
template <class Element>
void append(Bytes& bytes, const Element* data, size_t count) {
  bytes.append(reinterpret_cast<const char*>(data), count * sizeof(Element));
}
void append(Bytes& bytes, const Routed& routed) {
  for (const auto& part : {routed.offsets(), routed.row_tokens(), routed.pair_rows()})
    append(bytes, part.data(), part.size());
  append(bytes, routed.get().counters, TILEMOE_COUNTERS);
  append(bytes, routed.get().row_score, static_cast<size_t>(routed.rows()));
  if (routed.get().token_offsets != nullptr)
    append(bytes, routed.get().token_offsets, static_cast<size_t>(routed.get().spec.T) + 1);
  const size_t workspace = routed.workspace_bytes();
  append(bytes, &workspace, 1);
}

Bytes top_k_and_back(Scoring scoring) {
  Matrix logits(make_logits(Logits::kSpecial, kT, kE), DType::kFloat32, kT, kE);
  std::vector<int32_t> ids(static_cast<size_t>(kT * kK)), counts(static_cast<size_t>(kE));
  std::vector<float> scores(ids.size());
  const Tensor ids_view(ids.data(), DType::kInt32, {kT, kK});
  const Tensor scores_view(scores.data(), DType::kFloat32, {kT, kK});
  top_k({.device = Device::kCpu,
         .scoring = scoring,
         .K = kK,
         .logits = logits.tensor(),
         .ids = ids_view,
         .scores = scores_view,
         .expert_counts = vector_of(counts)});
  Routed routed(RoutingSpec::top_k(Device::kCpu, kT, kE, kK));
  routed.route_top_k(ids_view, scores_view);
  Matrix dlogits(DType::kFloat32, kT, kE);
  routed.backward(scoring, logits.tensor(), vector_of(scores), dlogits.tensor());
  Bytes bytes;
  append(bytes, ids.data(), ids.size());
  append(bytes, scores.data(), scores.size());
  append(bytes, counts.data(), counts.size());
  append(bytes, routed);
  append(bytes, dlogits.bytes().data(), dlogits.bytes().size());
  return bytes;
}

Bytes rounded_and_back(Rounding rule, int64_t round_tokens) {
  Matrix logits(make_logits(Logits::kSpecial, kT, kE), DType::kBFloat16, kT, kE);
  const RoutingSpec spec = RoutingSpec::rounded(Device::kCpu, kT, kE, kK, rule, 16, round_tokens);
  Routed routed(spec);
  routed.round(logits.tensor(), 3, 4);
  const std::vector<float> ds = make_logits(Logits::kNormal, spec.bound(), 1);
  Matrix dlogits(DType::kBFloat16, kT, kE);
  routed.backward(Scoring::kSoftmaxRenormalized, logits.tensor(), vector_of(ds), dlogits.tensor());
  Bytes bytes;
  append(bytes, routed);
  append(bytes, dlogits.bytes().data(), dlogits.bytes().size());
  return bytes;
}

Bytes general() {
  const int64_t pairs = 20000;
  std::mt19937 random(1);
  std::vector<int32_t> tokens(static_cast<size_t>(pairs)), experts(tokens.size());
  std::vector<float> scores(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>(i / 23 + random() % 3);
    experts[i] = static_cast<int32_t>(random() % (kE + 1)) - 1;
    scores[i] = random() % 5 == 0 ? kNaN : static_cast<float>(i);
  }
  Routed routed(RoutingSpec::general(Device::kCpu, kT, kE, pairs));
  routed.route_triples(vector_of(tokens), vector_of(experts), vector_of(scores));
  Bytes bytes;
  append(bytes, routed);
  return bytes;
}

Bytes losses() {
  Matrix logits(make_logits(Logits::kNormal, kT, kE), DType::kFloat32, kT, kE);
  Matrix dlogits(std::vector<float>(static_cast<size_t>(kT * kE), 0.f), DType::kFloat32, kT, kE);
  const std::vector<int32_t> counts(static_cast<size_t>(kE), 3);
  std::vector<float> out(2);
  Guarded workspace(router_losses_workspace_bytes(Device::kCpu, kT, kE));
  router_losses({.device = Device::kCpu,
                 .balance_coefficient = 0.5f,
                 .z_coefficient = 0.25f,
                 .logits = logits.tensor(),
                 .expert_counts = vector_of(counts),
                 .losses = vector_of(out),
                 .dlogits = dlogits.tensor(),
                 .workspace = workspace.data(),
                 .workspace_bytes = workspace.bytes()});
  Bytes bytes;
  append(bytes, out.data(), out.size());
  append(bytes, dlogits.bytes().data(), dlogits.bytes().size());
  return bytes;
}

Bytes everything() {
  Bytes all = general();
  for (int scoring = 0; scoring < 5; ++scoring)
    all += top_k_and_back(static_cast<Scoring>(scoring));
  for (int rule = 0; rule < 5; ++rule)
    for (int64_t round_tokens : {int64_t{0}, kT / 3, int64_t{20}})
      all += rounded_and_back(static_cast<Rounding>(rule), round_tokens);
  return all + losses();
}

TEST(RoutingThreads, ChangeNoBit) {
  const RestoreThreads restore;
  tilemoe_set_num_threads(1);
  const Bytes want = everything();
  for (int threads : {1, 2, 3, 7}) {
    tilemoe_set_num_threads(threads);
    EXPECT_TRUE(everything() == want) << threads << " threads";
  }
}

}  // namespace
}  // namespace tilemoe::routing_test
