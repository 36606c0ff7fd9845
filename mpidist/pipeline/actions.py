"""What a stage does, one thing after the other: F, B, or B in its halves I and W."""

from __future__ import annotations

from typing import Literal, NamedTuple

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
