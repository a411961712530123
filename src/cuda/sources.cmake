# The CUDA backend.
target_sources(tilemoe_cuda_objects PRIVATE
  cuda/cuda_backend.cpp
  cuda/arch.cpp
  cuda/layer_gemms.cpp
  cuda/plan.cpp
  cuda/weight_codes.cpp
  cuda/core/device.cpp
  cuda/core/tensor_map.cpp
  cuda/ops/table.cpp
  cuda/gemm/schedule/cost.cpp
  cuda/gemm/schedule/sizes.cpp
  cuda/two_cta.cpp
)
# GEMM kernels: generated from their table, for the architectures of each arch.
include(cuda/ops/kernels.cmake)
write_kernel_instances(gemm_kernels)
target_compile_definitions(tilemoe_cuda_objects PRIVATE ${arch_definitions})
list(JOIN TILEMOE_CUDA_ARCHS "," cuda_archs)
list(JOIN cuda_archs_of_sm80 "," cuda_archs_of_sm80)
list(JOIN cuda_archs_of_sm90 "," cuda_archs_of_sm90)
list(JOIN cuda_archs_of_sm100 "," cuda_archs_of_sm100)
set_source_files_properties(cuda/core/device.cpp
  PROPERTIES COMPILE_DEFINITIONS TILEMOE_CUDA_ARCHS="${cuda_archs}")
set(cuda_archs_of_archs)
foreach(arch IN LISTS archs)
  string(TOUPPER ${arch} name)
  list(APPEND cuda_archs_of_archs "TILEMOE_CUDA_ARCHS_OF_${name}=\"${cuda_archs_of_${arch}}\"")
endforeach()
set_source_files_properties(cuda/arch.cpp
  PROPERTIES COMPILE_DEFINITIONS "${cuda_archs_of_archs}")
# Everything else, by rows, tokens and pairs: for every architecture of the build.
set(kernel_sources
  cuda/kernels/bias_gradient.cu
  cuda/kernels/clear_rest.cu
  cuda/kernels/combine.cu
  cuda/kernels/lora_output_gradient.cu
  cuda/kernels/lora_output_sums.cu
  cuda/kernels/pack_lora.cu
  cuda/kernels/pair_sort.cu
  cuda/kernels/rank_experts.cu
  cuda/kernels/route_general.cu
  cuda/kernels/route_grouped.cu
  cuda/kernels/scale_rows.cu
  cuda/kernels/score_gradient.cu
  cuda/kernels/split_weight.cu
  cuda/kernels/sum_rows.cu
  cuda/ops/router_logits.cu
  cuda/ops/router_logits_sm80.cu
)
# The same. Routing and dequantisation give the CPU's bits: nothing may be contracted
# (routing/order.h).
set(uncontracted_kernels
  cuda/kernels/dequantize.cu
  cuda/kernels/quantize_fp8.cu
  cuda/kernels/round_targets.cu
  cuda/kernels/route_rounded.cu
  cuda/kernels/route_tokens.cu
  cuda/kernels/router_backward.cu
  cuda/kernels/router_losses.cu
  cuda/kernels/top_k.cu
  cuda/kernels/top_k_scores.cu
  cuda/kernels/weigh_tokens.cu
)
target_sources(tilemoe_cuda_objects PRIVATE
  ${gemm_kernels} ${kernel_sources} ${uncontracted_kernels})
if(cuda_archs_of_sm90)
  target_sources(tilemoe_cuda_objects PRIVATE cuda/ops/router_logits_sm90.cu)
  string(REPLACE "," ";" logits_archs "${cuda_archs_of_sm90}")
  cuda_code(logits_code ${logits_archs})
  set_source_files_properties(cuda/ops/router_logits_sm90.cu
    PROPERTIES COMPILE_OPTIONS "${logits_code};-Xptxas=-Werror")
endif()
cuda_code(kernel_code ${TILEMOE_CUDA_ARCHS})
set_source_files_properties(${kernel_sources}
  PROPERTIES COMPILE_OPTIONS "${kernel_code};-Xptxas=-Werror")
set_source_files_properties(${uncontracted_kernels}
  PROPERTIES COMPILE_OPTIONS "${kernel_code};-Xptxas=-Werror;-fmad=false")
# Whole-program: a relocatable kernel would lose registers to its calls. Spills and products that the
# assembler serialises are warnings of ptxas, and errors here.
target_compile_options(tilemoe_cuda_objects PRIVATE
  "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xptxas --warn-on-spills,--warn-on-local-memory-usage>")
# A sixth of the size for some decompression when a kernel is first used; nvcc has it from 12.8 on.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  target_compile_options(tilemoe_cuda_objects PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()
list(APPEND tilemoe_dependencies CUDA::cudart_static)
