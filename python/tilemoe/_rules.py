"""The names by which ops.py knows the sizes of a routing."""

from ._layout import h_width, offsets_of, reads_logits
from .options import GROUPED, SCORES_GIVEN, TOP_K

__all__ = ["GROUPED", "SCORES_GIVEN", "TOP_K", "h_width", "offsets_of", "reads_logits"]
