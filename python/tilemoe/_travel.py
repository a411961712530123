"""Define the communication of a call whose tokens come from other ranks."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Travel(Protocol):
    """Communication of one call.

    Backward computes dW1 and db1 last, from dH and X alone, so X may arrive until then, and dX may
    be sent while they are computed.
    """

    overlap: bool  # dW1 and db1 are a separate stage; else no communication overlaps

    def begin(self, source: Tensor) -> Tensor:
        """Start to gather X from the saved `source`; the result may still be in transfer."""

    def arrived(self) -> None:
        """Make the current stream wait for X."""

    def made(self, dX: Tensor) -> None:
        """Send dX, which the current stream has computed."""

    def gradient_arrived(self, chunk: int | None = None) -> None:
        """Make the current stream wait for dO, or for a chunk of it."""

    def chunk_arrived(self, chunk: int) -> None:
        """Make the current stream wait for a chunk of X, in forward; the chunks come in order."""

    def chunk_made(self, O: Tensor) -> None:
        """Send the next chunk of O, which the current stream has computed."""


class Chunks(NamedTuple):
    """Chunks of a batch whose X and dO arrive chunk by chunk."""

    bounds: Tensor  # (chunks + 1, E) int32: first row of each expert and chunk
    cuts: list[int]  # chunks + 1: first token of each chunk


class Comm(NamedTuple):
    """Communication of a call, and the tensor that is saved in the place of X."""

    travel: Travel
    source: Tensor
    chunks: Chunks | None = None
