# PyTorch's headers and libraries, from the torch that a Python has. Turns TILEMOE_TORCH from what
# was asked for (AUTO, ON, OFF) into what is built (ON, OFF).
set(torch_wanted ${TILEMOE_TORCH})
set(torch_least_version 2.10)

if(NOT torch_wanted MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TILEMOE_TORCH is '${torch_wanted}', expected AUTO, ON or OFF")
endif()
set(TILEMOE_TORCH OFF)
if(torch_wanted STREQUAL "OFF")
  return()
endif()

find_program(TILEMOE_TORCH_PYTHON NAMES python3 python
  HINTS ${Python3_EXECUTABLE} ${Python_EXECUTABLE} DOC "The Python whose torch is built against")
set(torch_missing "")
if(NOT TILEMOE_TORCH_PYTHON)
  set(torch_missing "no Python was found")
else()
  # torch is not imported: that takes seconds, and its version is a file of its own.
  execute_process(COMMAND ${TILEMOE_TORCH_PYTHON} -c
    "import importlib.util as u, importlib.metadata as m, os
print(m.version('torch')); print(os.path.dirname(u.find_spec('torch').origin))"
    OUTPUT_VARIABLE torch_found ERROR_QUIET RESULT_VARIABLE torch_result
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT torch_result EQUAL 0)
    set(torch_missing "${TILEMOE_TORCH_PYTHON} has no torch")
  else()
    string(REPLACE "\n" ";" torch_found "${torch_found}")
    list(GET torch_found 0 torch_version)
    list(GET torch_found 1 torch_root)
    string(REGEX MATCH "^[0-9.]+" torch_version "${torch_version}")
    if(torch_version VERSION_LESS torch_least_version)
      set(torch_missing "torch is ${torch_version}, needed is ${torch_least_version}")
    endif()
  endif()
endif()
if(torch_missing)
  if(torch_wanted STREQUAL "ON")
    message(FATAL_ERROR "TILEMOE_TORCH is ON: ${torch_missing}")
  endif()
  message(STATUS "PyTorch operators: not built (${torch_missing})")
  return()
endif()
set(TILEMOE_TORCH ON)
set(TILEMOE_TORCH_INCLUDE ${torch_root}/include)
set(TILEMOE_TORCH_LIB ${torch_root}/lib)
message(STATUS "PyTorch operators: built against torch ${torch_version} in ${torch_root}")
