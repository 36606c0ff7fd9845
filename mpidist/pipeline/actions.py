"""What a stage does, one thing after the other: F, B, or B in its halves I and W."""

from __future__ import annotations

from typing import NamedTuple


class _Action(NamedTuple):
    microbatch: int
    chunk: int = 0

    def __eq__(self, other: object) -> bool:
        # Plain tuples of the same numbers would be equal: F(0) is not B(0).
        return type(self) is type(other) and tuple.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.microbatch, self.chunk))

    def __repr__(self) -> str:
        chunk = f", chunk={self.chunk}" if self.chunk else ""
        return f"{type(self).__name__}({self.microbatch}{chunk})"

    @property
    def kind(self) -> str:
        """``"F"``, ``"B"``, ``"I"`` or ``"W"``."""
        return type(self).__name__


class F(_Action):
    """Forward: the chunk's output from its input; both stay alive for the backward pass.

    Parameters
    ----------
    microbatch : int
        Which microbatch, from 0.
    chunk : int
        Which of the chunks of the model that this rank holds, from 0.
    """

    __slots__ = ()


class B(_Action):
    """Backward as one: the gradients of the chunk's input and of its weights (I, then W)."""

    __slots__ = ()


class I(_Action):  # noqa: E742  (its name in the papers)
    """First half of backward: the gradient of the chunk's input, which the stage before needs."""

    __slots__ = ()


class W(_Action):
    """Second half of backward: the gradients of the chunk's weights, which nobody waits for."""

    __slots__ = ()


Action = F | B | I | W
KINDS: dict[str, type[Action]] = {"F": F, "B": B, "I": I, "W": W}
"""The classes of actions by their letters."""
