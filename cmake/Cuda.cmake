# CUDA as a language of this project: one architecture, whose instructions the kernels are made of.
if(NOT CMAKE_CUDA_COMPILER)
  find_program(TILEMOE_NVCC nvcc PATHS /usr/local/cuda PATH_SUFFIXES bin REQUIRED
    DOC "CUDA's compiler")
  set(CMAKE_CUDA_COMPILER ${TILEMOE_NVCC})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # named below: CMake 3.22 does not know 90a
enable_language(CUDA)
find_package(CUDAToolkit 12.5 REQUIRED)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know it of every nvcc that has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
