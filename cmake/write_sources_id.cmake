# Writes OUTPUT, which names what the kernels are made of: a hash of the library's SOURCE_DIR and of
# COMPILED_BY, the compiler with its flags. It is the same for a program and a Python package of the
# same sources. Touches the file only where the text changes.
cmake_minimum_required(VERSION 3.22)
file(GLOB_RECURSE files RELATIVE ${SOURCE_DIR}
  ${SOURCE_DIR}/src/*.h ${SOURCE_DIR}/src/*.cpp ${SOURCE_DIR}/src/*.cu ${SOURCE_DIR}/src/*.in*
  ${SOURCE_DIR}/src/*.cmake ${SOURCE_DIR}/src/CMakeLists.txt ${SOURCE_DIR}/cmake/Cuda.cmake
  ${SOURCE_DIR}/include/*.h)
list(SORT files)
set(all "${COMPILED_BY}\n")
foreach(file IN LISTS files)
  file(SHA256 ${SOURCE_DIR}/${file} hash)
  string(APPEND all "${file} ${hash}\n")
endforeach()
string(SHA256 hash "${all}")
string(SUBSTRING ${hash} 0 16 hash)
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY
  CONTENT "#define TILEMOE_SOURCES_ID \"sources ${hash}, nvcc ${NVCC_VERSION}\"\n")
