# Every public header compiles on its own, and twice: each gets a source that does nothing but
# include it. The C header does so as C99, too. (A private header comes first in its own source.)
file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include
  ${PROJECT_SOURCE_DIR}/include/tilemoe/*.h)

set(sources "")
foreach(header IN LISTS headers)
  string(MAKE_C_IDENTIFIER ${header} name)
  list(APPEND sources ${CMAKE_CURRENT_BINARY_DIR}/header_check/${name}.cpp)
endforeach()
list(APPEND sources ${CMAKE_CURRENT_BINARY_DIR}/header_check/tilemoe_tilemoe_h.c)
list(APPEND headers tilemoe/tilemoe.h)
foreach(source header IN ZIP_LISTS sources headers)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
endforeach()

add_library(header_check OBJECT ${sources})
set_target_properties(header_check PROPERTIES
  C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_link_libraries(header_check PRIVATE TileMoE::tilemoe tilemoe_warnings)
