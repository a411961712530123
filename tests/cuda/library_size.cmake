# Checks that the stripped shared library has at most MAX_MIB.
cmake_minimum_required(VERSION 3.22)
math(EXPR max_bytes "${MAX_MIB} * 1024 * 1024")

execute_process(COMMAND ${STRIP} -o ${LIBRARY}.stripped ${LIBRARY} COMMAND_ERROR_IS_FATAL ANY)
file(SIZE ${LIBRARY}.stripped bytes)
file(REMOVE ${LIBRARY}.stripped)
message(STATUS "${bytes} bytes stripped, limit ${max_bytes}")
if(NOT bytes LESS max_bytes)
  message(FATAL_ERROR "${bytes} bytes stripped, limit ${max_bytes}")
endif()
