"""The actions of a stage: F, B, and B's halves I and W; which rank holds which stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}

# Each has its letter as a field, so that F(0) and B(0), both tuples, differ.


class F(NamedTuple):
    """Forward: compute the chunk's output from its input; activations stay alive for backward.

    Attributes
    ----------
    microbatch : int
        Number of the microbatch, from 0.
    chunk : int
        Number of the chunk (part of the model) among those of this rank, from 0.
    kind : str
        Letter of the class; do not pass it.
    """

    microbatch: int
    chunk: int = 0
    kind: Literal["F"] = "F"

    def __repr__(self) -> str:
        return written(self)


class B(NamedTuple):
    """Backward: compute the gradients of the chunk's input and of its weights, both at once.

    The attributes are those of :class:`F`.
    """

    microbatch: int
    chunk: int = 0
    kind: Literal["B"] = "B"

    def __repr__(self) -> str:
        return written(self)


class I(NamedTuple):  # noqa: E742  (its name in the papers)
    """First half of backward: compute the gradient of the input, which the stage before needs.

    The attributes are those of :class:`F`.
    """

    microbatch: int
    chunk: int = 0
    kind: Literal["I"] = "I"

    def __repr__(self) -> str:
        return written(self)


class W(NamedTuple):
    """Second half of backward: compute the gradients of the weights, which no rank waits for.

    The attributes are those of :class:`F`.
    """

    microbatch: int
    chunk: int = 0
    kind: Literal["W"] = "W"

    def __repr__(self) -> str:
        return written(self)


Action = F | B | I | W
KINDS: dict[str, type[F] | type[B] | type[I] | type[W]] = {"F": F, "B": B, "I": I, "W": W}
"""The classes of actions by their letters."""


def written(action: Action) -> str:
    """Return an action as schedules write it: ``F(3)``, ``B(0, chunk=1)``."""
    chunk = f", chunk={action.chunk}" if action.chunk else ""
    return f"{action.kind}({action.microbatch}{chunk})"


SHAPES = ("loop", "v")


@dataclass(frozen=True)
class Placement:
    """Which rank holds which of ``ranks * chunks`` virtual stages, and as which of its chunks.

    Attributes
    ----------
    ranks : int
        Number of ranks.
    chunks : int
        Number of virtual stages on every rank.
    shape : {"loop", "v"}
        ``"loop"``: the stages of each chunk go from rank 0 to the last, as Megatron interleaves.
        ``"v"``: those of odd chunks go from the last rank to rank 0, so with two chunks rank 0
        holds the first and the last virtual stage.

    Examples
    --------
    >>> [Placement(3, 2, "loop").owner(stage) for stage in range(6)]
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    >>> [Placement(3, 2, "v").owner(stage) for stage in range(6)]
    [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    """

    ranks: int
    chunks: int = 1
    shape: str = "loop"

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int = 0) -> int:
        """Return the number of the virtual stage that `rank` holds as its `chunk`."""
        back = self.shape == "v" and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if back else rank)

    def owner(self, stage: int) -> tuple[int, int]:
        """Return the rank that holds a virtual stage, and the number of the chunk there."""
        chunk, rank = divmod(stage, self.ranks)
        back = self.shape == "v" and chunk % 2
        return (self.ranks - 1 - rank if back else rank), chunk
