# shellcheck shell=bash
# The packages that TileMoE needs from the distribution. Sourced; the one place that names packages.
#
# Supported: Debian 12, Ubuntu 22.04 and 24.04, whose packages have these names. Elsewhere, install
# the same software by your own means and set TILEMOE_SETUP=skip.
#
# One line a package: group, package, a command that serves as well ("-": none), what it is for.
packages() {
  cat <<'END'
build g++                  c++           C++20 compiler (GCC 11 or Clang 14, or newer)
build cmake                cmake         build system (3.22 or newer)
build ninja-build          ninja         runs the build on all cores
build libdnnl-dev          -             oneDNN: GEMMs of the CPU backend
build ocl-icd-opencl-dev   -             OpenCL: Debian's oneDNN requires it when it is configured
build libhwy-dev           -             Highway: vector units of the CPU backend
build libcli11-dev         -             CLI11: options of the command line
build nlohmann-json3-dev   -             JSON: logs, results, checkpoint headers
build libssl-dev           -             SHA-256 of texts and checkpoints
build zlib1g-dev           -             reads compressed texts
train dict-gcide           -             the default training text: a dictionary, 40 MB of English
train python3-matplotlib   -             draws the loss (tilemoe plot)
test  libgtest-dev         -             GoogleTest
test  libboost-context-dev -             Boost: the simulator's threads, exact whole numbers
test  python3              python3       kills trainings, reads their checkpoints
test  python3-venv         -             the Python tests' packages, in .venv
test  pkg-config           pkg-config    tests the installed tilemoe.pc
python python3             python3       builds and tests the PyTorch package
python python3-venv        -             its build's and its tests' packages, in .venv-*
python python3-dev         -             Python's headers: torch.compile's kernels
ci    ccache               ccache        compiles a file once for the tests and for the wheel
ci    git                git           lists the files for the formatter
ci    clang-format-14      -             the formatter; other versions format differently
docs  doxygen              doxygen       reads the headers for the reference of C and C++
docs  python3              python3       builds the documentation site
docs  python3-venv         -             its packages, in .venv-docs
fuzz  clang                clang++       libFuzzer (preset fuzz)
fuzz  libomp-dev           -             OpenMP for clang (preset fuzz)
END
}
