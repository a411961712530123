"""Access the registry of verification cases (verify/registry.cpp) in the operators' library."""

import json

from .errors import Failed, WrongUsage

REDUCED_HELP = "Run only the quick cases, which together run every kernel"


def operators():
    try:
        from .. import ops
        from .._library import operators as loaded
    except (ImportError, OSError) as error:
        raise Failed(f"{error}; `tilemoe doctor` reports what is missing") from None
    if not hasattr(loaded, "verify_case"):
        raise Failed("the loaded operators are from an older TileMoE; install one version")
    return loaded, ops.call


def why_no_layer(index=0):
    """Return why no layer runs on a GPU; None if one does."""
    import torch

    from .. import _config, _library

    if (reason := _library.why_no_cuda()) is not None:
        return reason
    if not torch.cuda.is_available():
        return "torch finds no GPU (torch.cuda.is_available() is False)"
    if index >= (count := torch.cuda.device_count()):
        return f"this machine has {count} GPUs, the first is cuda:0"
    return _config.arch_of(index)[1]


class Registry:
    """Registry on one device, "cpu" or "cuda:0"."""

    def __init__(self, device):
        import torch

        self._operators, self._call = operators()
        self._like = torch.empty(0, device=device)

    def description(self):
        return self._call(self._operators.device_description, self._like)

    def cases(self, patterns=(), dtype="all", reduced=False):
        """Return [{"case", "rows", ...}]; raise WrongUsage for a pattern without a match."""
        text = self._call(
            self._operators.verification_cases, self._like, list(patterns), dtype, reduced
        )
        found = json.loads(text)
        if found["complaint"]:
            raise WrongUsage(found["complaint"])
        return found["cases"]

    def run(self, case, seed=1, repeats=0, backward=True):
        """Return the results of a case by name, from verify::to_json of its Outcome.

        Raises:
            RuntimeError: The device reported an error.
        """
        text = self._call(self._operators.verify_case, self._like, case, seed, repeats, backward)
        return json.loads(text)


class Results:
    """Results of several cases."""

    LISTS, COUNTS = ("rows", "failures", "impossible"), ("spoilings", "refused")

    def __init__(self):
        self.all = {**{key: [] for key in self.LISTS}, **dict.fromkeys(self.COUNTS, 0)}
        self.cases = 0

    def add(self, result):
        self.cases += 1
        for key in (*self.LISTS, *self.COUNTS):
            self.all[key] += result[key]

    @property
    def tensors(self):
        return len(self.all["rows"])
