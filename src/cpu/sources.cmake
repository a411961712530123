# The CPU backend.
find_package(dnnl REQUIRED)  # oneDNN: matrix multiplication
find_package(hwy REQUIRED)   # Highway: elementwise work, at the best vector width of the machine
find_package(OpenMP REQUIRED COMPONENTS CXX)  # only to keep an OpenMP-built oneDNN on the calling thread
target_sources(tilemoe_cpu_objects PRIVATE
  cpu/thread_pool.cpp
  cpu/cpu_backend.cpp
  cpu/gemm.cpp
  cpu/tiles.cpp
  cpu/activation.cpp
  cpu/elementwise.cpp
  cpu/up_projection.cpp
  cpu/down_projection.cpp
  cpu/combine.cpp
  cpu/activation_gradient.cpp
  cpu/score_gradient.cpp
  cpu/weight_gradient.cpp
  cpu/input_gradient.cpp
  cpu/lora_projection.cpp
  cpu/pack_lora.cpp
  cpu/dequantize.cpp
  cpu/quantize_fp8.cpp
  cpu/fp8_gemm.cpp
  cpu/bias_gradient.cpp
  cpu/clear_rest.cpp
  cpu/top_k.cpp
  cpu/route.cpp
  cpu/route_rounded.cpp
  cpu/route_tokens.cpp
  cpu/router_backward.cpp
  cpu/router_logits.cpp
  cpu/router_losses.cpp
  cpu/sum_rows.cpp
)
# Routing and dequantisation give the same bits on every machine: nothing may be contracted
# (routing/order.h); so does the fp8 recipe. fmaf may become an instruction and a comparison a select, or the loops would not
# become vectors.
set_source_files_properties(
  cpu/top_k.cpp cpu/route_rounded.cpp cpu/route_tokens.cpp cpu/router_backward.cpp
  cpu/router_losses.cpp cpu/dequantize.cpp cpu/quantize_fp8.cpp
  cpu/fp8_gemm.cpp
  PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-fno-math-errno;-fno-trapping-math")
list(PREPEND tilemoe_dependencies DNNL::dnnl hwy::hwy OpenMP::OpenMP_CXX)
