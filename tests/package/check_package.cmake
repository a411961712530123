# Installs TileMoE to a fresh prefix and moves that elsewhere, then builds and runs the outside
# programs against it, and the command line where the build has one.
#
#   cmake -DLINKAGE=static|shared -DSOURCE=<TileMoE> -DBINARY=<scratch> -DBUILD=<TileMoE's build
#         directory, or "" to build the library in OTHER_BUILD, with the following>
#         -DOTHER_BUILD=<directory> -DBUILD_TYPE=<type> -DWERROR=ON|OFF -DCXX_FLAGS=<flags>
#         -DCXX=<compiler> -DCC=<compiler> -P ...
cmake_minimum_required(VERSION 3.22)

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "failed (${status}): ${command}")
  endif()
endfunction()

set(prefix ${BINARY}/prefix)
file(REMOVE_RECURSE ${prefix} ${BINARY}/installed ${BINARY}/outside_cxx_ON ${BINARY}/outside_cxx_OFF)

if(NOT BUILD)
  set(BUILD ${OTHER_BUILD})
  set(build_shared OFF)
  if(LINKAGE STREQUAL "shared")
    set(build_shared ON)
  endif()
  run(${CMAKE_COMMAND} -G Ninja -S ${SOURCE} -B ${BUILD} -DCMAKE_BUILD_TYPE=${BUILD_TYPE}
      -DTILEMOE_WERROR=${WERROR} -DCMAKE_CXX_FLAGS=${CXX_FLAGS}
      -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_COMPILER=${CC} -DBUILD_SHARED_LIBS=${build_shared}
      -DTILEMOE_BUILD_APPS=OFF -DTILEMOE_BUILD_TESTS=OFF -DTILEMOE_CUDA=OFF)
  run(${CMAKE_COMMAND} --build ${BUILD})
endif()
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${BINARY}/installed)
file(RENAME ${BINARY}/installed ${prefix})
set(command_line ${prefix}/bin/tilemoe)
if(EXISTS ${command_line})
  run(${command_line} info)
endif()

# A shared library shows its C interface and nothing else.
file(GLOB_RECURSE shared_library ${prefix}/libtilemoe.so)
if(LINKAGE STREQUAL "shared")
  if(NOT shared_library)
    message(FATAL_ERROR "no libtilemoe.so under ${prefix}")
  endif()
  execute_process(COMMAND nm --dynamic --defined-only --format=posix ${shared_library}
                  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" symbols "${symbols}")
  list(TRANSFORM symbols REPLACE " .*" "")
  set(strangers ${symbols})
  list(FILTER strangers EXCLUDE REGEX "^tilemoe_")
  list(FILTER symbols INCLUDE REGEX "^tilemoe_")
  list(LENGTH symbols count)
  if(strangers OR count LESS 20)
    message(FATAL_ERROR "${count} symbols of tilemoe_*, and also: ${strangers}")
  endif()
  message(STATUS "libtilemoe.so exports ${count} symbols, all tilemoe_*")
elseif(shared_library)
  message(FATAL_ERROR "a static build installed ${shared_library}")
endif()

# find_package, in a project with C++ and in one without
foreach(with_cxx ON OFF)
  set(outside ${BINARY}/outside_cxx_${with_cxx})
  run(${CMAKE_COMMAND} -G Ninja -S ${SOURCE}/tests/package -B ${outside} -DWITH_CXX=${with_cxx}
      -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_COMPILER=${CC}
      -DCMAKE_PREFIX_PATH=${prefix})
  run(${CMAKE_COMMAND} --build ${outside})
  if(with_cxx)
    run(${outside}/outside_cpp)
  endif()
  run(${outside}/outside_c)
endforeach()

# pkg-config, with --static too, which must change nothing
file(GLOB_RECURSE pc ${prefix}/tilemoe.pc)
get_filename_component(pc_dir ${pc} DIRECTORY)
get_filename_component(lib_dir ${pc_dir} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})
set(ENV{LD_LIBRARY_PATH} ${lib_dir})
foreach(option "" --static)
  execute_process(COMMAND pkg-config ${option} --cflags --libs tilemoe
                  OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run(${CC} -std=c99 ${SOURCE}/tests/package/outside.c -o ${BINARY}/by_pkg_config ${flags})
  run(${BINARY}/by_pkg_config)
endforeach()
