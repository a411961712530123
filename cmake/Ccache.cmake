# Compiles through ccache if it is installed and no other launcher is set. Two builds share the
# objects that both compile, the kernels too: files below the source folder are known by their
# relative names, since the kernels' instances are written into each build's folder; and a build's
# folder is not part of a kernel's name, as ccache has it for debug information, for which it takes
# -gencode.
find_program(CCACHE_PROGRAM ccache)
mark_as_advanced(CCACHE_PROGRAM)
if(NOT CCACHE_PROGRAM)
  return()
endif()
set(ccache_of_CXX CCACHE_BASEDIR=${PROJECT_SOURCE_DIR})
set(ccache_of_CUDA ${ccache_of_CXX} CCACHE_NOHASHDIR=1)
foreach(language CXX CUDA)
  if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
    set(CMAKE_${language}_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env ${ccache_of_${language}} ${CCACHE_PROGRAM})
  endif()
endforeach()
