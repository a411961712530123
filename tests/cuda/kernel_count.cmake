# Counts the kernels of the grouped GEMM of each arch in the objects that OBJECTS lists, by the host
# function that launches each kernel; that function's cold part (name.cold) does not count. Every
# instantiation costs compile time and bytes of every program. ARCHS: the archs of the build,
# sm90+sm80.
cmake_minimum_required(VERSION 3.22)
set(max_count 171)  # 8 are the router's, whose kernel of two tiles is not counted
string(REGEX MATCHALL "sm[0-9]+" ARCHS "${ARCHS}")

foreach(arch IN LISTS ARCHS)
  set(count_${arch} 0)
endforeach()
file(STRINGS ${OBJECTS} objects)
foreach(object IN LISTS objects)
  if(NOT object MATCHES "\\.cu\\.o$")
    continue()
  endif()
  execute_process(COMMAND ${NM} --defined-only --format=posix ${object}
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  foreach(arch IN LISTS ARCHS)
    string(LENGTH ${arch} letters)
    string(REGEX MATCHALL
      "(^|\n)_ZN7tilemoe4cuda${letters}${arch}L?[0-9]+[a-z_]*gemmI[^ .\n]* [tTwW] "
      kernels "${symbols}")
    list(LENGTH kernels here)
    if(here GREATER 0)
      get_filename_component(name ${object} NAME)
      message(STATUS "${here} in ${name}")
    endif()
    math(EXPR count_${arch} "${count_${arch}} + ${here}")
  endforeach()
endforeach()
foreach(arch IN LISTS ARCHS)
  message(STATUS "${count_${arch}} GEMM kernels of ${arch}, limit ${max_count}")
  if(count_${arch} EQUAL 0)
    message(FATAL_ERROR "no GEMM kernel of ${arch} was found: does this test search for old names?")
  elseif(count_${arch} GREATER max_count)
    message(FATAL_ERROR "${count_${arch}} GEMM kernels of ${arch}, limit ${max_count}")
  endif()
endforeach()
