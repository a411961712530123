#!/usr/bin/env bash
# Makes the package as Hugging Face's kernels load it: build/hub, a folder for a repository of the
# kernel hub, with this machine's variant in build/hub/build. TILEMOE_CUDA=OFF makes the variant for
# the CPU alone, next to an existing one with CUDA. Options go to `pip wheel`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

require_torch ""
commit=$(git describe --always --abbrev=12 --dirty --exclude='*') ||
  die "git cannot describe the commit, which is part of the operators' namespace."
case $(.venv-torch/bin/python cmake/find_cuda.py) in
ON) backend=cuda ;;
*) backend=cpu ;;
esac
# Copies of different builds go into one process: each has its operators under a name of its own.
export TILEMOE_TORCH_NAMESPACE=tilemoe_${backend}_${commit//-/_}
TILEMOE_DIST=build/hub/wheel scripts/dist.sh wheel "$@"

say "laying out the folder"
PATH=$root/.venv-wheel/bin:$PATH .venv-wheel/bin/python scripts/hub_folder.py \
  build/hub/wheel/*.whl build/hub || die "the folder could not be made; see the lines above."
rm -r build/hub/wheel
say "build/hub: torch.ops.$TILEMOE_TORCH_NAMESPACE; kernels.get_local_kernel takes the folder"
