# The CUDA backend.
target_sources(tilemoe_cuda_objects PRIVATE
  cuda/backend.cpp
  cuda/call_limits.cpp
  cuda/kit_choice.cpp
  cuda/products.cpp
  cuda/core/device.cpp
  cuda/sm80/shared_memory.cpp
  cuda/core/device_code.cpp
  cuda/core/tensor_map.cpp
  cuda/instances/table.cpp
  cuda/schedule/cost.cpp
  cuda/schedule/projection_sizes.cpp
  cuda/schedule/weight_gradient_shares.cpp
  cuda/sm100/pairs.cpp
)
# Products: files that their table makes, for the architectures that a kit runs on.
include(cuda/instances/instances.cmake)
write_product_instances(product_kernels)
target_compile_definitions(tilemoe_cuda_objects PRIVATE ${kit_definitions})
list(JOIN TILEMOE_CUDA_ARCHS "," archs)
list(JOIN archs_of_sm80 "," archs_of_sm80)
list(JOIN archs_of_sm90 "," archs_of_sm90)
list(JOIN archs_of_sm100 "," archs_of_sm100)
set_source_files_properties(cuda/core/device.cpp
  PROPERTIES COMPILE_DEFINITIONS TILEMOE_CUDA_ARCHS="${archs}")
set(archs_of_kits)
foreach(kit IN LISTS kits)
  string(TOUPPER ${kit} name)
  list(APPEND archs_of_kits "TILEMOE_ARCHS_OF_${name}=\"${archs_of_${kit}}\"")
endforeach()
set_source_files_properties(cuda/kit_choice.cpp
  PROPERTIES COMPILE_DEFINITIONS "${archs_of_kits}")
# Everything else, by rows, tokens and pairs: for every architecture of the build.
set(rowwise_kernels
  cuda/rowwise/bias_gradient.cu
  cuda/rowwise/combine.cu
  cuda/rowwise/pair_sort.cu
  cuda/rowwise/rank_experts.cu
  cuda/rowwise/route_general.cu
  cuda/rowwise/route_grouped.cu
  cuda/rowwise/score_gradient.cu
  cuda/rowwise/sum_rows.cu
)
# The same. Routing gives the CPU's bits: nothing may be contracted (routing/order.h).
set(uncontracted_kernels
  cuda/rowwise/round_targets.cu
  cuda/rowwise/route_rounded.cu
  cuda/rowwise/route_tokens.cu
  cuda/rowwise/router_backward.cu
  cuda/rowwise/router_losses.cu
  cuda/rowwise/top_k.cu
  cuda/rowwise/top_k_scores.cu
  cuda/rowwise/weigh_tokens.cu
)
target_sources(tilemoe_cuda_objects PRIVATE
  ${product_kernels} ${rowwise_kernels} ${uncontracted_kernels})
cuda_code(rowwise_code ${TILEMOE_CUDA_ARCHS})
set_source_files_properties(${rowwise_kernels}
  PROPERTIES COMPILE_OPTIONS "${rowwise_code};-Xptxas=-Werror")
set_source_files_properties(${uncontracted_kernels}
  PROPERTIES COMPILE_OPTIONS "${rowwise_code};-Xptxas=-Werror;-fmad=false")
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
