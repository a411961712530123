"""The communication of a call whose tokens come from other ranks, for forward and backward."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Travel(Protocol):
    """The communication of one call. Backward computes dW1 and db1 last, from dH and X alone, so X
    may arrive until then, and dX may leave while they are computed."""

    overlap: bool  # dW1 and db1 are a stage of their own; else no communication overlaps

    def begin(self, source: Tensor) -> Tensor:
        """Starts to gather X from what forward kept in its place -> X, which may be on its way."""

    def arrived(self) -> None:
        """Makes the current stream wait for X."""

    def made(self, dX: Tensor) -> None:
        """Sends dX, which the current stream has computed."""

    def gradient_arrived(self, chunk: int | None = None) -> None:
        """Makes the current stream wait for dO, or for a chunk of it."""

    def chunk_arrived(self, chunk: int) -> None:
        """Makes the current stream wait for a chunk of X, in forward; the chunks come in order."""

    def chunk_made(self, O: Tensor) -> None:
        """Sends the next chunk of O, which the current stream has computed."""


class Chunks(NamedTuple):
    """The chunks of a batch whose X, and dO, arrive one chunk at a time."""

    bounds: Tensor  # (chunks + 1, E) int32: first row of each expert and chunk
    cuts: list[int]  # chunks + 1: first token of each chunk


class Comm(NamedTuple):
    """A call's communication, and the tensor that is kept in the place of X."""

    travel: Travel
    source: Tensor
    chunks: Chunks | None = None
