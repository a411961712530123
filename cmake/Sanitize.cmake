# TILEMOE_SANITIZE: a list for -fsanitize= ("address,undefined", "thread"); the first finding ends
# the program.
set(TILEMOE_SANITIZE "" CACHE STRING "Sanitizers to build with")
if(TILEMOE_SANITIZE)
  add_compile_options(
    -fsanitize=${TILEMOE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${TILEMOE_SANITIZE})
  # Without two of x86's five instruction sets the CPU's files take about half of the time to compile.
  # The tests of the other builds run code of all five.
  add_compile_definitions("HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4)")
endif()
