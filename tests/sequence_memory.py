"""The memory of a player: private and symmetric pieces, used again and again, with edges."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from sequence_cases import Case
from sequence_steps import PRIVATE

POOL = 600_007  # bytes of a piece at first: no multiple of anything
EDGE = 64  # bytes on either side of an array that nobody may touch
JUNK = 0x5A
Place = tuple[str, str]  # whose memory, and whether inputs or results lie there


@dataclass
class Arrays:
    """The arrays of one call on this rank."""

    x: np.ndarray
    out: np.ndarray | None
    places: tuple[Place, ...]
    edges: list[np.ndarray] = field(default_factory=list)

    def fill(self, data: np.ndarray | None) -> None:
        """Make ready for a call: `data` into x, junk into the rest."""
        for array in (*self.edges, self.out, self.x):
            if array is not None:
                array.view(np.uint8)[...] = JUNK
        if data is not None:
            self.x[...] = data

    def edges_hold(self) -> bool:
        """Tell whether nobody wrote beside an array."""
        return all((edge == JUNK).all() for edge in self.edges)


class Memory:
    """Pieces of memory by place; a piece of 0 bytes is not there yet."""

    def __init__(self) -> None:
        self.pieces = {("kept", which): np.zeros(POOL, np.uint8) for which in ("x", "out")}

    def arrays(self, case: Case) -> Arrays:
        """Choose the memory of a call: alike on all ranks, for all know the longest array."""
        step, shape, edges = case.call, case.shape, []

        def array(place: Place, n: int) -> np.ndarray:
            return self._array(place, n, case, edges)

        here, there = (self._kind(step.x, case), "x"), (self._kind(step.out, case), "out")
        root, same = case.rank == case.root, step.out == "same"
        if step.collective in ("gather", "scatter") and here[0] not in PRIVATE:
            same = False  # the root's own part has another place than the others' arrays
        if same or there[0] == "same":
            there = (here[0], "out")
        if same and (step.collective == "allgather" or (step.collective == "gather" and root)):
            out = array(there, shape.gives)
            return Arrays(out[case.own_part], out, (there,), edges)
        x, out = array(here, shape.takes), None
        if not same or (step.collective == "scatter" and not root):
            if there[0] != "none":
                out = array(there, shape.gives)
            return Arrays(x, out, (here, there), edges)
        if step.collective in ("reduce_scatter", "scatter"):
            out = x[case.own_part]
        elif step.collective in ("allreduce", "reduce", "alltoall") and not case.table:
            out = x
        return Arrays(x, out, (here,), edges)

    def _kind(self, kind: str, case: Case) -> str:
        if kind in ("fresh", "none", "same"):
            return kind
        kind = case.call.comm if kind == "own" else kind
        kind = kind if (kind, "x") in self.pieces else "kept"
        need = (case.call.offset + case.shape.most) * case.dtype.itemsize + 2 * EDGE
        fits = all(self.pieces[kind, which].size >= need for which in ("x", "out"))
        return kind if fits else "fresh"

    def _array(self, place: Place, n: int, case: Case, edges: list) -> np.ndarray:
        if place[0] == "fresh":
            return np.empty(n, case.dtype)
        piece, start = self.pieces[place], EDGE + case.call.offset * case.dtype.itemsize
        stop = start + n * case.dtype.itemsize
        edges += [piece[start - EDGE : start], piece[stop : stop + EDGE]]
        return piece[start:stop].view(case.dtype)
