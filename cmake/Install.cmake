# The files of `cmake --install`: the library, the public headers, find_package(TileMoE) and
# pkg-config; and the command line if it is built.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/TileMoE)

install(TARGETS tilemoe EXPORT TileMoETargets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TILEMOE_BUILD_APPS AND NOT TILEMOE_SANITIZE)
  install(TARGETS tilemoe_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tilemoe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT TileMoETargets NAMESPACE TileMoE:: DESTINATION ${package_dir})

# The C++ runtime, which a C compiler does not link.
set(tilemoe_cxx_runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(REMOVE_ITEM tilemoe_cxx_runtime ${CMAKE_C_IMPLICIT_LINK_LIBRARIES})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/TileMoEConfig.cmake.in ${PROJECT_BINARY_DIR}/TileMoEConfig.cmake
  INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TileMoEConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/TileMoEConfig.cmake ${PROJECT_BINARY_DIR}/TileMoEConfigVersion.cmake
  DESTINATION ${package_dir})

# A static library's dependencies stand in Libs, so that `pkg-config --libs` is enough in both linkages.
set(tilemoe_pc_dependencies "")
if(NOT BUILD_SHARED_LIBS)
  list(TRANSFORM tilemoe_cxx_runtime PREPEND -l OUTPUT_VARIABLE runtime)
  list(JOIN runtime " " runtime)
  set(tilemoe_pc_dependencies " ${runtime} -pthread")
  if(TILEMOE_CPU)
    string(PREPEND tilemoe_pc_dependencies " -ldnnl -lhwy ${OpenMP_CXX_FLAGS}")
  endif()
  if(TILEMOE_CUDA)
    string(PREPEND tilemoe_pc_dependencies
      " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
file(RELATIVE_PATH tilemoe_pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/tilemoe.pc.in ${PROJECT_BINARY_DIR}/tilemoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tilemoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
