# The names by which ctest lists the tests are words, no bytes of a parameter, of 60 characters at
# most.
#   cmake -DCTEST=<ctest> -DBUILD=<directory> -P ...
cmake_minimum_required(VERSION 3.22)
execute_process(COMMAND ${CTEST} -N --test-dir ${BUILD} OUTPUT_VARIABLE listed
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "Test +#[0-9]+: [^\n]+" tests "${listed}")
list(LENGTH tests count)
if(count LESS 10)
  message(FATAL_ERROR "${count} tests are listed:\n${listed}")
endif()
set(wrong ${tests})
list(FILTER wrong INCLUDE REGEX "GetParam|-byte object")
if(wrong)
  list(JOIN wrong "\n" wrong)
  message(FATAL_ERROR "give each parameter a name:\n${wrong}")
endif()
set(long ${tests})
list(TRANSFORM long REPLACE "^Test +#[0-9]+: " "")
list(FILTER long INCLUDE REGEX "^.............................................................")
if(long)
  list(JOIN long "\n" long)
  message(FATAL_ERROR "60 characters of a test's name fit into ctest's line:\n${long}")
endif()
