#include "problem.h"

#include <algorithm>

#include "number.h"

namespace tilemoe::verify {
namespace {

bool chooses(const Case& test_case) {
  return test_case.routing == RoutingKind::kTopK || test_case.routing == RoutingKind::kRounded;
}

std::vector<float> as_floats(const std::vector<int64_t>& values) {
  return {values.begin(), values.end()};
}

// Gives each pair its row: by expert, then in the order of pairs; pairs that do not fit have none.
std::vector<Pair> with_rows(std::vector<Pair> pairs, int64_t capacity) {
  std::vector<Pair*> by_expert;
  for (Pair& pair : pairs) by_expert.push_back(&pair);
  std::stable_sort(by_expert.begin(), by_expert.end(),
                   [](const Pair* a, const Pair* b) { return a->expert < b->expert; });
  int64_t row = 0;
  for (Pair* pair : by_expert) pair->row = row++;
  std::erase_if(pairs, [&](const Pair& pair) { return pair.row >= capacity; });
  return pairs;
}

}  // namespace

Problem::Problem(const Inputs& inputs, Memory& memory)
    : in_(inputs),
      case_(in_.test_case),
      memory_(memory),
      experts_(case_.experts(memory.device())),
      spec_(case_.spec(in_.pairs(), memory.device())),
      weights_(case_, case_.dtype,
               {.W1 = case_.format_1 == Format::kNone,
                .W2 = case_.format_2 == Format::kNone,
                .b1 = case_.biases,
                .b2 = case_.biases},
               memory),
      quantized_(in_, memory),
      quantized_view_(quantized_.view()),
      lora_(case_, case_.factor_dtype(), {.lora_1 = true, .lora_2 = true}, memory),
      packed_memory_(memory, experts_.packed_lora_bytes()),
      codes_of_H_(case_, spec_.bound(), memory),
      routing_memory_(memory, spec_.bytes()) {
  const MatrixLayout rows{.padded = case_.padded};
  const std::vector<int64_t> outer = {case_.outer_rows(), case_.d};
  add_input("X", X_, case_.dtype, outer, in_.X, rows);
  add_input("dO", dO_, case_.dtype, outer, in_.dO, rows);
  if (!in_.O_addend.empty())
    add_input("O_addend", O_addend_, case_.dtype, outer, in_.O_addend, rows);
  if (!in_.dX_addend.empty())
    add_input("dX_addend", dX_addend_, case_.dtype, outer, in_.dX_addend, rows);
  weights_.write(in_.weights);
  for (const auto& [name, tensor] : weights_.tensors())
    inputs_.push_back({{name, tensor}, tensor->fingerprint()});
  if (case_.lora.any()) pack_lora();
  const int64_t pairs = in_.pairs();
  if (chooses(case_)) add_input("logits", logits_, DType::kFloat32, {case_.T, case_.E}, in_.logits);
  switch (case_.routing) {
    case RoutingKind::kTopK:
      ids_.emplace(memory, case_.id_dtype, std::vector{case_.T, case_.K});
      chosen_scores_.emplace(memory, DType::kFloat32, std::vector{case_.T, case_.K});
      scores_.emplace(memory, case_.score_dtype, std::vector{case_.T, case_.K});
      break;
    case RoutingKind::kGeneral:
      add_input("tokens", tokens_, case_.id_dtype, {pairs}, as_floats(in_.tokens));
      add_input("experts", ids_, case_.id_dtype, {pairs}, as_floats(in_.experts));
      add_input("scores", scores_, case_.score_dtype, {pairs}, in_.scores);
      break;
    case RoutingKind::kRounded:
      add_input("seed", seed_, DType::kInt64, {1}, {20});
      add_input("step", step_, DType::kInt64, {1}, {3});
      break;
    case RoutingKind::kGrouped:
      add_input("counts", counts_, case_.id_dtype, {case_.E}, as_floats(case_.counts));
      if (!in_.scores.empty()) add_input("scores", scores_, DType::kFloat32, {pairs}, in_.scores);
      break;
  }

  const Gradients& wants = case_.wanted;
  O_.emplace(memory, case_.dtype, outer, rows);
  H_.emplace(memory, case_.dtype, std::vector{spec_.bound(), case_.h_width()});
  const auto make_P = [&](std::optional<GuardedTensor>& P, const char* name, int64_t rank) {
    if (rank == 0) return Tensor();
    outputs_.push_back({name, &P.emplace(memory, case_.dtype, std::vector{spec_.bound(), rank})});
    return P->view();
  };
  outputs_ = {{"O", &*O_}, {"H", &*H_}};
  const Tensor P1 = make_P(P1_, "P1", case_.lora.rank_1());
  const Tensor P2 = make_P(P2_, "P2", case_.lora.rank_2());
  saved_ = codes_of_H_.given() ? codes_of_H_.saved() : Saved(H_->view(), P1, P2);
  if (wants.dX) outputs_.push_back({"dX", &dX_.emplace(memory, case_.dtype, outer, rows)});
  if (wants.ds) {
    const bool top_k = case_.routing == RoutingKind::kTopK;
    const std::vector<int64_t> shape = top_k ? std::vector{case_.T, case_.K} : std::vector{pairs};
    outputs_.push_back({"ds", &ds_.emplace(memory, DType::kFloat32, shape)});
  }
  const WeightTensors::Parts parts{.W1 = wants.dW1,
                                   .W2 = wants.dW2,
                                   .b1 = wants.db1 && case_.biases,
                                   .b2 = wants.db2 && case_.biases};
  dweights_.emplace(case_, case_.dW_dtype(), parts, memory);
  for (const auto& [name, tensor] : dweights_->tensors())
    outputs_.push_back({std::string("d") + name, tensor});
  if (case_.gemms_apart) mm_.emplace(experts_, spec_, memory);
  dlora_.emplace(case_, case_.dW_dtype(),
                 LoraTensors::Parts{.lora_1 = wants.lora_1, .lora_2 = wants.lora_2}, memory);
  for (const auto& [name, tensor] : dlora_->tensors())
    outputs_.push_back({std::string("d") + name, tensor});
}

Problem::~Problem() = default;

void Problem::add_input(const char* name, std::optional<GuardedTensor>& place, DType dtype,
                        std::vector<int64_t> shape, const std::vector<float>& values,
                        MatrixLayout layout) {
  place.emplace(memory_, dtype, std::move(shape), layout);
  place->write(values);
  inputs_.push_back({{name, &*place}, place->fingerprint()});
}

void Problem::pack_lora() {
  lora_.write(in_.lora);
  for (const auto& [name, tensor] : lora_.tensors())
    inputs_.push_back({{name, tensor}, tensor->fingerprint()});
  packed_ = experts_.pack_lora(lora_.view(), quantized_.with_shapes(weights_.view()),
                               packed_memory_.data(), packed_memory_.bytes());
  packed_fingerprint_ = packed_memory_.fingerprint();
}

void Problem::poison() {
  for (const NamedTensor& output : outputs_) output.tensor->poison();
  codes_of_H_.poison();
  if (case_.accumulate_dW) dweights_->write(in_.dW_before), dlora_->write(in_.dlora_before);
  routing_memory_.poison();
  for (auto* workspace : {&routing_workspace_, &forward_workspace_, &backward_workspace_})
    if (*workspace) (*workspace)->poison();
  H_of_forward_.clear();
}

void* Problem::sized(std::unique_ptr<GuardedBuffer>& buffer, size_t bytes, Memory& memory) {
  if (!buffer || buffer->bytes() != bytes) buffer = std::make_unique<GuardedBuffer>(memory, bytes);
  return buffer->data();
}

// Top-K by the library, then the case's replacements of ids and scores.
void Problem::choose_experts() {
  top_k({.device = memory_.device(),
         .scoring = case_.scoring,
         .K = case_.K,
         .logits = logits_->view(),
         .ids = ids_->view(),
         .scores = chosen_scores_->view()});
  scores_->write(in_.scores.empty() ? chosen_scores_->read() : in_.scores);
  if (in_.bad_pairs.empty()) return;
  std::vector<float> ids = ids_->read();
  for (int64_t pair : in_.bad_pairs)
    ids[static_cast<size_t>(pair)] = static_cast<float>(pair % 2 ? -1 : case_.E + pair % 3);
  ids_->write(ids);
}

void Problem::route() {
  const size_t bytes = spec_.workspace_bytes();
  void* workspace = sized(routing_workspace_, bytes, memory_);
  routing_.emplace(spec_, routing_memory_.data(), routing_memory_.bytes());
  switch (case_.routing) {
    case RoutingKind::kTopK:
      choose_experts();
      routing_->from_top_k(ids_->view(), scores_->view(), workspace, bytes);
      break;
    case RoutingKind::kGeneral:
      routing_->from_triples(tokens_->view(), ids_->view(), scores_->view(), workspace, bytes);
      break;
    case RoutingKind::kRounded: {
      const bool stochastic = case_.rounding == Rounding::kStochastic;
      routing_->from_logits({.logits = logits_->view(),
                             .seed = stochastic ? seed_->view() : Tensor(),
                             .step = stochastic ? step_->view() : Tensor(),
                             .workspace = workspace,
                             .workspace_bytes = bytes});
      break;
    }
    case RoutingKind::kGrouped:
      routing_->from_counts(counts_->view(), scores_ ? scores_->view() : Tensor());
      break;
  }
}

void Problem::give_H(bool memory_of_dH) {
  if (codes_of_H_.given()) saved_.H = memory_of_dH ? H_->view() : Tensor();
}

ForwardArgs Problem::forward_args() {
  give_H(false);
  ForwardArgs args;
  args.routing = &*routing_;
  args.weights = weights_.view();
  args.X = X_->view(), args.O = O_->view();
  if (O_addend_) args.addend = O_addend_->view();
  args.saved = &saved_;
  if (case_.lora.any()) args.lora = &packed_;
  if (quantized_.any()) args.quantized = &quantized_view_;
  args.workspace_bytes = experts_.workspace_bytes(spec_, Pass::kForward);
  args.workspace = sized(forward_workspace_, args.workspace_bytes, memory_);
  return args;
}

BackwardArgs Problem::backward_args() {
  give_H(case_.dH_over_H);
  BackwardArgs args;
  args.routing = &*routing_;
  args.weights = weights_.view();
  args.X = X_->view(), args.dO = dO_->view();
  args.saved = &saved_;
  args.mode = case_.dH_over_H ? BackwardMode::kOverH : BackwardMode::kWhole;
  if (dX_) args.dX = dX_->view();
  if (dX_ && dX_addend_) args.addend = dX_addend_->view();
  args.dweights = dweights_->gradients();
  if (case_.lora.any()) args.lora = &packed_, args.dlora = dlora_->gradients();
  if (quantized_.any()) args.quantized = &quantized_view_;
  args.accumulate = case_.accumulate_dW;
  if (ds_) args.ds = ds_->view();
  args.workspace_bytes = experts_.workspace_bytes(spec_, args.mode);
  args.workspace = sized(backward_workspace_, args.workspace_bytes, memory_);
  return args;
}

Problem::BackwardCalls Problem::backward_calls() {
  BackwardCalls calls{backward_args(), backward_args()};
  auto& [first, second] = calls;
  if (!case_.dH_over_H) first.mode = BackwardMode::kFirst;
  second.mode = BackwardMode::kRest;
  if (codes_of_H_.given() && case_.dH_over_H) {  // whose memory OVER_H uses as workspace
    const size_t of_rest = experts_.workspace_bytes(spec_, BackwardMode::kRest);
    first.workspace_bytes = second.workspace_bytes = std::max(first.workspace_bytes, of_rest);
    first.workspace = second.workspace = sized(backward_workspace_, first.workspace_bytes, memory_);
  }
  first.dX = {}, first.addend = {};
  first.dweights.W1 = first.dweights.W1_up = first.dweights.b1 = first.dweights.b1_up = {};
  first.dlora.A1 = first.dlora.B1 = first.dlora.A1_up = first.dlora.B1_up = {};
  second.dlora.A2 = second.dlora.B2 = {};
  second.dO = {}, second.ds = second.dweights.W2 = second.dweights.b2 = {};
  return calls;
}

Parts Problem::parts() const {
  const int64_t T = spec_.T;
  return Parts(*routing_, {0, T / 3, T / 3, T - 1, T}, memory_);
}

void Problem::forward() {
  ForwardArgs args = forward_args();
  if (mm_) return mm_->forward(args, *H_);
  if (!case_.in_parts) return experts_.forward(args);
  const Parts cut = parts();
  for (const tilemoe_part& part : cut.in_order({2, 1, 0, 3})) {
    args.part = &part;
    experts_.forward(args);
  }
}

void Problem::infer() {
  ForwardArgs args = forward_args();
  args.saved = nullptr;
  args.workspace_bytes = experts_.workspace_bytes(spec_, Pass::kInference);
  args.workspace = sized(forward_workspace_, args.workspace_bytes, memory_);
  experts_.forward(args);
}

void Problem::backward() {
  if (mm_) return mm_->backward(backward_args());
  if (case_.dH_over_H && H_of_forward_.empty()) H_of_forward_ = read_H();
  if (case_.in_parts) {
    BackwardArgs args = backward_args();
    const Parts cut = parts();
    for (const tilemoe_part& part : cut.in_order({3, 0, 1, 2})) {
      args.part = &part;
      experts_.backward(args);
    }
    return;
  }
  if (!case_.in_two_calls) return experts_.backward(backward_args());
  auto [first, second] = backward_calls();
  experts_.backward(first);
  if (dX_ && dX_addend_) {
    dX_->write(in_.dX_addend);
    second.addend = second.dX;
  }
  experts_.backward(second);
}

void Problem::run(Passes passes) {
  poison();
  route();
  forward();
  if (passes == Passes::kAll) backward();
}

std::vector<Pair> Problem::pairs() const {
  std::vector<Pair> pairs;
  const auto add = [&](size_t index, int64_t token, int64_t expert, double score) {
    if (expert >= 0 && expert < case_.E)
      pairs.push_back({.index = static_cast<int64_t>(index),
                       .row = -1,
                       .token = token,
                       .expert = expert,
                       .score = score});
  };
  switch (case_.routing) {
    case RoutingKind::kTopK: {
      const std::vector<float> ids = ids_->read(), scores = scores_->read();
      for (size_t p = 0; p < ids.size(); ++p)
        add(p, static_cast<int64_t>(p) / case_.K, static_cast<int64_t>(ids[p]), scores[p]);
      break;
    }
    case RoutingKind::kGeneral:
      for (size_t p = 0; p < in_.tokens.size(); ++p)
        add(p, in_.tokens[p], in_.experts[p], in_.scores[p]);
      break;
    case RoutingKind::kGrouped: {
      size_t row = 0;
      for (size_t e = 0; e < case_.counts.size(); ++e)
        for (int64_t left = case_.counts[e]; left > 0; --left, ++row)
          add(row, static_cast<int64_t>(row), static_cast<int64_t>(e),
              in_.scores.empty() ? 1 : in_.scores[row]);
      break;
    }
    case RoutingKind::kRounded: return rounded_pairs();
  }
  return with_rows(std::move(pairs), spec_.bound());
}

std::vector<Pair> Problem::rounded_pairs() const {
  const auto copy = [&](auto* from, int64_t count) {
    std::vector<std::remove_cvref_t<decltype(*from)>> values(static_cast<size_t>(count));
    memory_.copy_out(values.data(), from, values.size() * sizeof(*from));
    return values;
  };
  const std::vector<int32_t> offsets = copy(routing_->offsets, case_.E + 1);
  const std::vector<int32_t> token_offsets = copy(routing_->token_offsets, case_.T + 1);
  const std::vector<int32_t> pair_row = copy(routing_->pair_row, routing_->pairs());
  const std::vector<float> row_score = copy(routing_->row_score, routing_->capacity());
  std::vector<Pair> pairs;
  for (size_t t = 0; t < static_cast<size_t>(case_.T); ++t)
    for (int32_t p = token_offsets[t]; p < token_offsets[t + 1]; ++p) {
      const int32_t row = pair_row[static_cast<size_t>(p)];
      if (row < 0) continue;
      const auto next = std::upper_bound(offsets.begin(), offsets.end(), row);
      pairs.push_back({.index = p,
                       .row = row,
                       .token = static_cast<int64_t>(t),
                       .expert = next - offsets.begin() - 1,
                       .score = row_score[static_cast<size_t>(row)]});
    }
  return pairs;
}

std::vector<float> Problem::read_H() const {
  if (codes_of_H_.given()) return codes_of_H_.read();
  std::vector<float> H = H_->read();
  const bool interleaved_columns =
      case_.gate_layout == GateLayout::kInterleaved && case_.W1_transposed;
  if (memory_.device() == Device::kCpu || !interleaved_columns) return H;
  const auto width = static_cast<size_t>(case_.h_width());
  std::vector<float> row(width);
  for (auto first = H.begin(); first != H.end(); first += case_.h_width()) {
    for (size_t i = 0; i < width; ++i)
      row[i % 2 * (width / 2) + i / 2] = first[static_cast<std::ptrdiff_t>(i)];
    std::copy(row.begin(), row.end(), first);
  }
  return H;
}

Computed Problem::computed() const {
  Computed result;
  const bool moved = !H_of_forward_.empty();
  if (wanted(case_, kH)) {
    result[kH] = moved ? H_of_forward_ : read_H();
    result[kH].resize(pairs().size() * static_cast<size_t>(case_.h_width()));
  }
  result[kO] = O_->read();
  if (dX_) result[kDX] = dX_->read();
  if (ds_) result[kDs] = ds_->read();
  ExpertValues gradients = dweights_->read();
  result[kDW1] = std::move(gradients.W1), result[kDW2] = std::move(gradients.W2);
  result[kDb1] = std::move(gradients.b1), result[kDb2] = std::move(gradients.b2);
  LoraValues factors = dlora_->read();
  result[kDA1] = std::move(factors.A1), result[kDB1] = std::move(factors.B1);
  result[kDA2] = std::move(factors.A2), result[kDB2] = std::move(factors.B2);
  return result;
}

std::vector<uint64_t> Problem::fingerprints() const {
  std::vector<uint64_t> all;
  for (const NamedTensor& output : outputs_) all.push_back(output.tensor->fingerprint());
  return all;
}

std::vector<std::string> Problem::outputs_other_than(
    const std::vector<uint64_t>& fingerprints) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < outputs_.size(); ++i)
    if (outputs_[i].tensor->fingerprint() != fingerprints.at(i)) names.push_back(outputs_[i].name);
  return names;
}

std::vector<std::string> Problem::damage() {
  std::vector<std::string> lines;
  for (const Input& input : inputs_)
    if (input.tensor.tensor->fingerprint() != input.fingerprint)
      lines.push_back("the input " + input.tensor.name + " was changed");
  for (const NamedTensor& output : outputs_)
    if (!output.tensor->gaps_intact())
      lines.push_back("bytes outside the elements of " + output.name + " were written");
  const auto check = [&](const char* name, const GuardedBuffer* buffer) {
    if (buffer && !buffer->guards_intact())
      lines.push_back(std::string("bytes outside the ") + name + " were written");
  };
  check("packed adapters", &packed_memory_);
  if (case_.lora.any() && packed_memory_.fingerprint() != packed_fingerprint_)
    lines.emplace_back("the packed adapters were changed");
  for (const std::string& line : quantized_.damage()) lines.push_back(line);
  for (const std::string& line : codes_of_H_.damage()) lines.push_back(line);
  if (mm_) lines.insert(lines.end(), mm_->damage().begin(), mm_->damage().end());
  check("routing", &routing_memory_);
  check("workspace of the routing", routing_workspace_.get());
  check("workspace of forward", forward_workspace_.get());
  check("workspace of backward", backward_workspace_.get());
  return lines;
}

}  // namespace tilemoe::verify
