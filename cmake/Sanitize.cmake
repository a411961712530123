# TILEMOE_SANITIZE: a list for -fsanitize= ("address,undefined", "thread"); the first finding ends
# the program.
set(TILEMOE_SANITIZE "" CACHE STRING "Sanitizers to build with")
if(TILEMOE_SANITIZE)
  add_compile_options(
    -fsanitize=${TILEMOE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${TILEMOE_SANITIZE})
endif()
