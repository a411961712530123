# Counts the kernels of the grouped GEMM in the objects that OBJECTS lists, by the host's function
# that launches each; that function's cold part (name.cold) is none. Every instantiation costs
# compile time and bytes of every program.
cmake_minimum_required(VERSION 3.22)
set(most 80)

set(count 0)
file(STRINGS ${OBJECTS} objects)
foreach(object IN LISTS objects)
  if(NOT object MATCHES "\\.cu\\.o$")
    continue()
  endif()
  execute_process(COMMAND ${NM} --defined-only --format=posix ${object}
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "(^|\n)_ZN7tilemoe4cuda(4sm90)?L?[0-9]+[a-z_]*gemmI[^ .\n]* [tTwW] " kernels
    "${symbols}")
  list(LENGTH kernels here)
  if(here GREATER 0)
    get_filename_component(name ${object} NAME)
    message(STATUS "${here} in ${name}")
  endif()
  math(EXPR count "${count} + ${here}")
endforeach()
message(STATUS "${count} GEMM kernels, at most ${most}")
if(count EQUAL 0)
  message(FATAL_ERROR "no GEMM kernel was found: this test looks for names that are gone")
elseif(count GREATER most)
  message(FATAL_ERROR "${count} GEMM kernels, at most ${most}")
endif()
