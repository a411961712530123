# The names by which ctest lists the tests are words: no bytes of a parameter.
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
