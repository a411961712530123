#!/usr/bin/env bash
# Installs the package as a user without a compiler does, and trains a layer with it:
#
#   scripts/test_wheel.sh FILE [PYTHON...]            in a fresh environment of each PYTHON
#   scripts/test_wheel.sh --root ROOT FILE [PYTHON]   in another system below ROOT, by chroot (as root)
#
# ROOT is what debootstrap makes, such as a Debian 12 that has Python and nothing else:
#
#   debootstrap --variant=minbase --include=python3-venv bookworm build/bookworm
#
# FILE is a wheel, or a source distribution, from which a wheel for the CPU of this system is built
# first (minutes).
# Nothing is downloaded: the environment uses the torch of PYTHON, or of .venv-torch if PYTHON has
# none, after the package was tried without. Without PYTHON it is /usr/bin/python3 or, if .venv-torch
# is of another version, the Python of that. With ROOT it is ROOT's /usr/bin/python3, and PYTHON one of
# the same version that has torch.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
system=
[ "${1:-}" != --root ] || { system=${2:-} && shift 2; }
[ -f "${1:-}" ] || die "usage: scripts/test_wheel.sh [--root ROOT] FILE [PYTHON...]"
file=$1
shift
version_of() { "$1" -c 'import sys; print(*sys.version_info[:2])'; }
version=$(version_of .venv-torch/bin/python)
if [ $# = 0 ]; then
  [ "$(version_of /usr/bin/python3)" != "$version" ] || set -- /usr/bin/python3
  [ $# != 0 ] || set -- .venv-torch/bin/python
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Prints the folder that has torch and what it imports, for a Python.
packages_of() {
  local torch
  torch=$("$1" cmake/find_torch.py 2>/dev/null | tail -n 1) ||
    { [ "$(version_of "$1")" = "$version" ] &&
      torch=$(.venv-torch/bin/python cmake/find_torch.py | tail -n 1); } ||
    die "$1 has no torch, and .venv-torch has another Python version."
  dirname "$torch"
}

# FOLDER has the wheel; PYTHON makes an environment there, which sees the packages of TORCH in the end.
# COMMAND goes before every command. No program but the environment's own is on its PATH.
try_wheel() { # FOLDER PYTHON TORCH [COMMAND...]
  local folder=$1 python=$2 torch=$3 wheel=${file##*/}
  shift 3
  local inside=("$@" /usr/bin/env -i "HOME=$folder" "PATH=$folder/venv/bin" CUDA_VISIBLE_DEVICES=)
  { "$@" "$python" -m venv "$folder/venv" &&
    "${inside[@]}" pip install -q --no-index "$folder/$wheel" &&
    "${inside[@]}" python - "$torch" <"$root/tests/wheel/first_steps.py"; } ||
    die "the wheel does not work; see the lines above."
}

case $file in
*.tar.gz)
  say "building a wheel from $file"
  require build
  TILEMOE_CUDA=OFF .venv-torch/bin/python -m pip wheel -q --no-deps -w "$folder/built" "$file" >&2 ||
    die "the wheel could not be built; see the lines above."
  file=$(echo "$folder"/built/*.whl)
  ;;
esac

if [ -n "$system" ]; then
  say "trying ${file##*/} in $system, $(chroot "$system" /usr/bin/python3 --version)"
  place=$system/try
  packages=$(packages_of "$1")
  { rm -rf "$place" && mkdir "$place" && cp "$file" "$place" &&
    cp -r --link "$packages" "$place/torch"; } || die "the wheel and torch could not be copied."
  try_wheel /try /usr/bin/python3 /try/torch chroot "$system"
  rm -rf "$place"
else
  count=0
  for python; do
    place=$folder/$((count += 1))
    say "trying ${file##*/} with $("$python" --version)"
    mkdir "$place" && cp "$file" "$place"
    try_wheel "$place" "$python" "$(packages_of "$python")"
  done
fi
say "${file##*/} works without a compiler"
