#include "bench_dense.h"

#include <omp.h>

#include <algorithm>
#include <dnnl.hpp>
#include <stdexcept>
#include <thread>

#include "bench_statistics.h"
#include "bench_steps.h"
#include "cpu/thread_pool.h"

namespace tilemoe::app {
namespace {

using dnnl::memory;

using Way = DenseBaseline::Way;

const char* name_of(Way way) {
  switch (way) {
    case Way::kMatmul: return "matmul, all threads on an expert";
    case Way::kMatmulBatched: return "matmul, batch of experts";
    case Way::kMatmulExpertAThread: return "matmul, an expert a thread";
    case Way::kSgemm: return "sgemm, all threads on an expert";
    case Way::kSgemmExpertAThread: return "sgemm, an expert a thread";
  }
  return "";
}

bool is_sgemm(Way way) {
  return way == Way::kSgemm || way == Way::kSgemmExpertAThread;
}
bool expert_a_thread(Way way) {
  return way == Way::kMatmulExpertAThread || way == Way::kSgemmExpertAThread;
}

memory::data_type onednn_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return memory::data_type::f32;
    case DType::kBFloat16: return memory::data_type::bf16;
    case DType::kFloat16: return memory::data_type::f16;
    default: throw std::logic_error("onednn_type: not a floating type");
  }
}

std::vector<std::vector<Way>> families(DType dtype) {
  if (dtype != DType::kFloat32)
    return {{Way::kMatmul, Way::kMatmulBatched}, {Way::kMatmulExpertAThread}};
  return {{Way::kMatmul, Way::kMatmulBatched, Way::kSgemm},
          {Way::kMatmulExpertAThread, Way::kSgemmExpertAThread}};
}

// (batch, rows, columns), stored as (batch, columns, rows) where transposed.
memory::desc descriptor(memory::data_type type, int64_t batch, int64_t rows, int64_t columns,
                        bool transposed) {
  return {
      {batch, rows, columns}, type, transposed ? memory::format_tag::acb : memory::format_tag::abc};
}

dnnl::matmul::primitive_desc matmul_descriptor(const dnnl::engine& engine,
                                               const DenseProduct& product, int64_t batch,
                                               DType dtype) {
  const memory::data_type type = onednn_type(dtype);
  const memory::desc A = descriptor(type, batch, product.rows, product.depth, product.A_transposed);
  const memory::desc B =
      descriptor(type, batch, product.depth, product.columns, product.B_transposed);
  const memory::desc C = descriptor(type, batch, product.rows, product.columns, false);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // so that threads do not share it
#if DNNL_VERSION_MAJOR >= 3
  return {engine, A, B, C, attributes};
#else
  return {{A, B, C}, attributes, engine};
#endif
}

std::vector<DenseProduct> products_of(const verify::Case& layer) {
  return dense_products(layer, std::max<int64_t>(1, layer.T * layer.K / layer.E));
}

// Elements of the largest A, B and C of all experts.
struct Operands {
  int64_t A = 0, B = 0, C = 0;
};

Operands operands_of(const verify::Case& layer, const std::vector<DenseProduct>& products) {
  Operands most;
  for (const DenseProduct& product : products) {
    most.A = std::max(most.A, layer.E * product.rows * product.depth);
    most.B = std::max(most.B, layer.E * product.depth * product.columns);
    most.C = std::max(most.C, layer.E * product.rows * product.columns);
  }
  return most;
}

}  // namespace

void let_threads_rest() {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
}

// One product of every expert, done in one way.
class DenseBaseline::Runner {
 public:
  Runner(const DenseProduct& product, int64_t E, DType dtype, Way way, const Buffer& A,
         const Buffer& B, const Buffer& C)
      : product_(product), E_(E), dtype_(dtype), way_(way), A_(A), B_(B), C_(C) {
    if (is_sgemm(way)) return;
    const int workers = expert_a_thread(way) ? cpu::num_threads() : 1;
    for (int worker = 0; worker < workers; ++worker) {
      // oneDNN fixes a primitive's number of threads when it is made; inside a task it is one.
      if (expert_a_thread(way))
        cpu::parallel_for(1, [&](int64_t, int) { contexts_.push_back(make_context()); });
      else
        contexts_.push_back(make_context());
    }
  }

  bool backward() const { return product_.backward; }
  double flop() const {
    return 2.0 * static_cast<double>(E_ * product_.rows * product_.columns * product_.depth);
  }

  void run() {
    if (way_ == Way::kMatmulBatched) return multiply(0, 0);
    if (expert_a_thread(way_)) {
      cpu::parallel_for(E_, [&](int64_t e, int worker) { multiply(e, worker); });
      return;
    }
    for (int64_t e = 0; e < E_; ++e) multiply(e, 0);
  }

 private:
  struct Context {
    dnnl::matmul primitive;
    dnnl::stream stream;
    memory A, B, C, scratchpad;
  };

  Context make_context() const {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    const int64_t batch = way_ == Way::kMatmulBatched ? E_ : 1;
    const auto descriptor = matmul_descriptor(engine, product_, batch, dtype_);
    return {.primitive = dnnl::matmul(descriptor),
            .stream = dnnl::stream(engine),
            .A = memory(descriptor.src_desc(), engine, A_.data()),
            .B = memory(descriptor.weights_desc(), engine, B_.data()),
            .C = memory(descriptor.dst_desc(), engine, C_.data()),
            .scratchpad = memory(descriptor.scratchpad_desc(), engine)};
  }

  void multiply(int64_t expert, int worker) {
    const int64_t m = product_.rows, n = product_.columns, k = product_.depth;
    if (is_sgemm(way_)) {
      const auto status =
          dnnl_sgemm(product_.A_transposed ? 'T' : 'N', product_.B_transposed ? 'T' : 'N', m, n, k,
                     1.f, A_.as<float>() + expert * m * k, product_.A_transposed ? m : k,
                     B_.as<float>() + expert * k * n, product_.B_transposed ? k : n, 0.f,
                     C_.as<float>() + expert * m * n, n);
      if (status != dnnl_success) throw std::runtime_error("onednn-dense: sgemm failed");
      return;
    }
    Context& context = contexts_[static_cast<size_t>(worker)];
    const auto place = [&](const Buffer& buffer, int64_t elements) {
      return buffer.as<char>() + static_cast<size_t>(expert * elements) * size_of(dtype_);
    };
    context.A.set_data_handle(place(A_, m * k));
    context.B.set_data_handle(place(B_, k * n));
    context.C.set_data_handle(place(C_, m * n));
    context.primitive.execute(context.stream, {{DNNL_ARG_SRC, context.A},
                                               {DNNL_ARG_WEIGHTS, context.B},
                                               {DNNL_ARG_DST, context.C},
                                               {DNNL_ARG_SCRATCHPAD, context.scratchpad}});
    context.stream.wait();
  }

  DenseProduct product_;
  int64_t E_;
  DType dtype_;
  Way way_;
  const Buffer &A_, &B_, &C_;
  std::vector<Context> contexts_;
};

bool DenseBaseline::available(DType dtype) {
  if (dtype == DType::kFloat32) return true;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  try {
    matmul_descriptor(engine, {"", false, 64, 64, 64, false, true}, 1, dtype);
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

size_t DenseBaseline::bytes(const verify::Case& layer) {
  const Operands most = operands_of(layer, products_of(layer));
  return size_of(layer.dtype) * static_cast<size_t>(most.A + most.B + most.C);
}

DenseBaseline::DenseBaseline(const verify::Case& layer) {
  omp_set_num_threads(cpu::num_threads());
  const std::vector<DenseProduct> products = products_of(layer);
  const auto [A, B, C] = operands_of(layer, products);
  A_ = Buffer(layer.dtype, A), B_ = Buffer(layer.dtype, B), C_ = Buffer(layer.dtype, C);
  fill_normal(layer.dtype, A_.data(), A, 0.2, 6);
  fill_normal(layer.dtype, B_.data(), B, 0.02, 7);

  // All products in one family: a thread of OpenMP's spins for a while after its work, and would
  // take a core from an expert-a-thread product that followed.
  double best_ms = 0;
  for (const std::vector<Way>& family : families(layer.dtype)) {
    Trial trial = try_out(layer, products, family);
    if (!runners_.empty() && trial.ms >= best_ms) continue;
    best_ms = trial.ms;
    runners_ = std::move(trial.runners), chosen_ = std::move(trial.chosen);
  }
}

DenseBaseline::Trial DenseBaseline::try_out(const verify::Case& layer,
                                            const std::vector<DenseProduct>& products,
                                            const std::vector<Way>& family) const {
  constexpr int kRepeats = 7;
  Trial trial;
  for (const DenseProduct& product : products) {
    std::unique_ptr<Runner> best;
    Way best_way = family.front();
    double best_ms = 0;
    for (Way way : family) {
      auto runner = std::make_unique<Runner>(product, layer.E, layer.dtype, way, A_, B_, C_);
      runner->run();  // generates code, touches memory
      std::vector<double> times;
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        const auto start = std::chrono::steady_clock::now();
        runner->run();
        times.push_back(milliseconds_since(start));
      }
      const double ms = median(times);
      if (best && ms >= best_ms) continue;
      best = std::move(runner), best_way = way, best_ms = ms;
    }
    trial.ms += best_ms;
    trial.chosen.push_back({product.step, name_of(best_way), best->flop() / best_ms * 1e-6});
    trial.runners.push_back(std::move(best));
  }
  let_threads_rest();
  return trial;
}

DenseBaseline::~DenseBaseline() = default;

double DenseBaseline::run(bool backward) {
  const auto start = std::chrono::steady_clock::now();
  for (const auto& runner : runners_)
    if (runner->backward() == backward) runner->run();
  return milliseconds_since(start);
}

double DenseBaseline::forward() {
  return run(false);
}
double DenseBaseline::backward() {
  return run(true);
}

}  // namespace tilemoe::app
