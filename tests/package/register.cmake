# The installed package in both linkages: the build at hand is installed as it is, the other linkage
# is built for the purpose, by the same commands and next to the build at hand: ccache has its
# objects, which it knows by paths relative to the build's folder.
foreach(linkage static shared)
  set(build "")
  if((linkage STREQUAL "shared" AND BUILD_SHARED_LIBS) OR
     (linkage STREQUAL "static" AND NOT BUILD_SHARED_LIBS))
    set(build ${PROJECT_BINARY_DIR})
  endif()
  add_test(NAME package_${linkage}
    COMMAND ${CMAKE_COMMAND} -DLINKAGE=${linkage} -DSOURCE=${PROJECT_SOURCE_DIR}
      -DBINARY=${CMAKE_CURRENT_BINARY_DIR}/package_${linkage} -DBUILD=${build}
      -DOTHER_BUILD=${PROJECT_BINARY_DIR}_${linkage}
      -DWERROR=${TILEMOE_WERROR} -DBUILD_TYPE=${CMAKE_BUILD_TYPE} -DCXX_FLAGS=${CMAKE_CXX_FLAGS}
      -DCXX=${CMAKE_CXX_COMPILER} -DCC=${CMAKE_C_COMPILER}
      -P ${CMAKE_CURRENT_SOURCE_DIR}/package/check_package.cmake)
  set_tests_properties(package_${linkage} PROPERTIES TIMEOUT 900 COST 10)
  if(TILEMOE_CUDA)  # a static library's users link the runtime; its toolkit may be nowhere on PATH
    set_tests_properties(package_${linkage} PROPERTIES
      ENVIRONMENT CUDAToolkit_ROOT=${CUDAToolkit_BIN_DIR}/..)
  endif()
endforeach()
