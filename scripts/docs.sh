#!/usr/bin/env bash
# Builds the documentation site into build/docs/html. A warning is an error.
#
#   scripts/docs.sh [--serve [PORT]]    --serve shows the site at http://localhost:PORT (8000), until Ctrl-C
#
# Installs doxygen, and Sphinx into .venv-docs (docs/requirements.txt).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

case ${1:-} in
'' | --serve) ;;
*) sed -n '2,6s/^# \?//p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac

require docs
require_docs
say "building the documentation"
.venv-docs/bin/sphinx-build -q -W --keep-going --fresh-env docs build/docs/html >&2 ||
  die "the site could not be built: see the lines above."
say "the site is build/docs/html/index.html"
[ "${1:-}" != --serve ] ||
  exec python3 -m http.server --bind localhost --directory build/docs/html "${2:-8000}"
