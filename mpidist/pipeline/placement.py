"""Where the virtual stages lie: which rank holds which chunk of the model."""

from __future__ import annotations

from dataclasses import dataclass

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
