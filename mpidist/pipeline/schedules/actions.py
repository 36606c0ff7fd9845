"""The actions of a stage, F, B, or B in its halves I and W; which rank holds which stage."""

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
    """Forward: the chunk's output from its input; both stay alive for the backward pass.

    Attributes
    ----------
    microbatch : int
        Which microbatch, from 0.
    chunk : int
        Which of the chunks of the model that this rank holds, from 0.
    kind : str
        The letter of its class; not to be given.
    """

    microbatch: int
    chunk: int = 0
    kind: Literal["F"] = "F"

    def __repr__(self) -> str:
        return written(self)


class B(NamedTuple):
    """Backward as one: the gradients of the chunk's input and of its weights, as by I and W.

    Attributes as of :class:`F`.
    """

    microbatch: int
    chunk: int = 0
    kind: Literal["B"] = "B"

    def __repr__(self) -> str:
        return written(self)


class I(NamedTuple):  # noqa: E742  (its name in the papers)
    """First half of backward: the gradient of the chunk's input, which the stage before needs.

    Attributes as of :class:`F`.
    """

    microbatch: int
    chunk: int = 0
    kind: Literal["I"] = "I"

    def __repr__(self) -> str:
        return written(self)


class W(NamedTuple):
    """Second half of backward: the gradients of the chunk's weights, which nobody waits for.

    Attributes as of :class:`F`.
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
    """Give an action as it stands in a schedule: ``F(3)``, ``B(0, chunk=1)``."""
    chunk = f", chunk={action.chunk}" if action.chunk else ""
    return f"{action.kind}({action.microbatch}{chunk})"


SHAPES = ("loop", "v")


@dataclass(frozen=True)
class Placement:
    """The model cut into ``ranks * chunks`` virtual stages, dealt to the ranks.

    Attributes
    ----------
    ranks : int
        Number of ranks.
    chunks : int
        Virtual stages that every rank holds.
    shape : {"loop", "v"}
        ``"loop"``: every chunk goes from rank 0 to the last, as in Megatron's interleaved schedule.
        ``"v"``: odd chunks come back, so that with two chunks rank 0 holds the first and the last
        virtual stage.

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
        """Give the virtual stage that is `chunk` of `rank`."""
        back = self.shape == "v" and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if back else rank)

    def owner(self, stage: int) -> tuple[int, int]:
        """Give the rank and the chunk of a virtual stage."""
        chunk, rank = divmod(stage, self.ranks)
        back = self.shape == "v" and chunk % 2
        return (self.ranks - 1 - rank if back else rank), chunk
