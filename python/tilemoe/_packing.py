"""The names by which ops.py knows the lists of operators."""

from ._layout import GRADIENTS, WEIGHTS, names_of_gradients, pack_gradients
from .options import NUMBERS, REALS, RULE, At

__all__ = [
    "GRADIENTS", "NUMBERS", "REALS", "RULE", "WEIGHTS", "At", "names_of_gradients",
    "pack_gradients",
]  # fmt: skip
