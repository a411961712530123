# What `cmake --install` puts where: the library, the public headers, find_package(TileMoE) and
# pkg-config; and the command line where it is built.
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

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/TileMoEConfig.cmake.in ${PROJECT_BINARY_DIR}/TileMoEConfig.cmake
  INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TileMoEConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/TileMoEConfig.cmake ${PROJECT_BINARY_DIR}/TileMoEConfigVersion.cmake
  DESTINATION ${package_dir})

if(BUILD_SHARED_LIBS)
  set(tilemoe_pc_private "")
else()
  set(tilemoe_pc_private "-lstdc++ -lm -pthread")
  if(TILEMOE_CPU)
    string(PREPEND tilemoe_pc_private "-ldnnl -lhwy ${OpenMP_CXX_FLAGS} ")
  endif()
  if(TILEMOE_CUDA)
    string(PREPEND tilemoe_pc_private "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
  endif()
endif()
file(RELATIVE_PATH tilemoe_pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/tilemoe.pc.in ${PROJECT_BINARY_DIR}/tilemoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tilemoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
