# Writes OUTPUT, which names the commit of SOURCE_DIR in the form of LINE, a text with @commit@; run at
# every build, it touches the file only if the text changes, so that nothing is compiled again
# without need. PATHS: the sources of the build, in which a change means `-dirty`. Sources that lie in
# another project's repository have no commit.
cmake_minimum_required(VERSION 3.22)
set(commit unknown)
find_package(Git QUIET)
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --show-prefix --short=12 HEAD
                  WORKING_DIRECTORY ${SOURCE_DIR}
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed AND found MATCHES "^\n?([0-9a-f]+)$")
    set(hash ${CMAKE_MATCH_1})
    set(commit ${hash})
    # A result file written next to it does not count.
    separate_arguments(PATHS)
    execute_process(COMMAND ${GIT_EXECUTABLE} status --porcelain -- ${PATHS}
                    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      string(APPEND commit -dirty)
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "${LINE}\n" @ONLY)
