# Writes OUTPUT, a header that names the commit of SOURCE_DIR; run at every build, it touches the
# file only where the text changes, so that nothing is compiled again without need.
cmake_minimum_required(VERSION 3.22)
set(commit unknown)
find_package(Git QUIET)
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --short=12 HEAD WORKING_DIRECTORY ${SOURCE_DIR}
                  OUTPUT_VARIABLE hash OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed)
    set(commit ${hash})
    # Only what the executable is made of: a result file written beside it does not count.
    execute_process(COMMAND ${GIT_EXECUTABLE} status --porcelain -- include src verify apps CMakeLists.txt
                    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      string(APPEND commit -dirty)
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define TILEMOE_COMMIT \"@commit@\"\n" @ONLY)
