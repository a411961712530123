# Writes OUTPUT, which names the commit of SOURCE_DIR in the form of LINE, a text with @commit@; run at
# every build, it touches the file only where the text changes, so that nothing is compiled again
# without need. PATHS: what the product is made of, where a change means `-dirty`. Sources that lie in
# another project's repository have no commit.
cmake_minimum_required(VERSION 3.22)
set(commit unknown)
find_package(Git QUIET)
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --show-prefix --short=12 HEAD
                  WORKING_DIRECTORY ${SOURCE_DIR}
                  OUTPUT_VARIABLE told OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed AND told MATCHES "^\n?([0-9a-f]+)$")
    set(hash ${CMAKE_MATCH_1})
    set(commit ${hash})
    # A result file written beside it does not count.
    separate_arguments(PATHS)
    execute_process(COMMAND ${GIT_EXECUTABLE} status --porcelain -- ${PATHS}
                    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      string(APPEND commit -dirty)
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "${LINE}\n" @ONLY)
