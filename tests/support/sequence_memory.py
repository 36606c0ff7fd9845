"""The memory of a player: private and symmetric pieces, used again and again, with edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.sequence_cases import BFLOAT16, JOINING, RECORD, Case
from tests.support.sequence_steps import PRIVATE

try:
    import torch

    from mpidist.device.tensors import as_tensor
except ImportError:
    torch = None

POOL = 600_007  # bytes of a piece at first: no multiple of anything
EDGE = 64  # bytes on either side of an array that nobody may touch
JUNK = 0x5A
Place = tuple[str, str]  # whose memory, and whether inputs or results lie there


@dataclass
class Arrays:
    """The arrays of one call on this rank, and what is passed for them."""

    x: np.ndarray
    out: np.ndarray | None
    places: tuple[Place, ...]
    edges: list[np.ndarray] = field(default_factory=list)
    given_x: Any = None
    given_out: Any = None

    def fill(self, data: np.ndarray | None) -> None:
        """Make ready for a call: `data` into x, junk into the rest."""
        for array in (*self.edges, self.out, self.x):
            if array is not None:
                array[...] = np.frombuffer(bytes([JUNK]) * array.itemsize, array.dtype)[0]
        if data is not None:
            self.x[...] = data.reshape(self.x.shape)

    def pass_on(self, case: Case) -> None:
        """Make what is passed: the arrays, or tensors and buffers on their memory."""
        step, x, out = case.call, self.x, self.out
        if case.scalar:
            x = x.reshape(())
            if out is not None and out.size and step.collective not in JOINING:
                out = out.reshape(())
        read = step.collective == "broadcast" and case.rank == case.root and out is None
        written = case.only_receives or (out is not None and np.may_share_memory(x, out))
        frozen = step.frozen and (read or not written)
        if frozen:
            x = x.view()
            x.flags.writeable = False
        # PyTorch would warn of read-only memory; the kind of the result is to be alike everywhere.
        guise = "array" if step.frozen and step.x_guise == "tensor" else step.x_guise
        self.given_x = disguised(x, guise)
        if out is not None:
            self.given_out = disguised(out, step.out_guise)
            if self.out is self.x and not frozen and guise == step.out_guise:
                self.given_out = self.given_x

    def edges_hold(self) -> bool:
        """Tell whether nobody wrote beside an array."""
        return all((edge == JUNK).all() for edge in self.edges)


def disguised(array: np.ndarray, guise: str) -> Any:
    """Return what is passed for an array: itself, a tensor or a buffer, if there is such a one."""
    if guise == "tensor" and torch is not None and array.dtype != RECORD:
        return array if any(step < 0 for step in array.strides) else as_tensor(array)
    if guise == "buffer" and array.dtype != BFLOAT16:
        room = getattr(array.base, "obj", None)
        return room if isinstance(room, bytearray) else memoryview(array)
    return array


def undisguised(got: Any) -> Any:
    """Return an array on the memory of a result."""
    if torch is not None and isinstance(got, torch.Tensor):
        made = got.numpy() if got.dtype is not torch.bfloat16 else got.view(torch.int16).numpy()
        return made.view(BFLOAT16) if got.dtype is torch.bfloat16 else made
    return np.asarray(got)


class Memory:
    """Pieces of memory by place; a piece of 0 bytes is not there yet."""

    def __init__(self) -> None:
        self.pieces = {("kept", which): np.zeros(POOL, np.uint8) for which in ("x", "out")}

    def arrays(self, case: Case) -> Arrays:
        """Choose the memory of a call, and as what it is passed."""
        made = self._arrays(case)
        made.pass_on(case)
        return made

    def _arrays(self, case: Case) -> Arrays:
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
        kind = "kept" if case.stride != 1 and kind not in PRIVATE else kind
        kind = kind if (kind, "x") in self.pieces else "kept"
        most = case.shape.most * abs(case.stride)
        need = (case.call.offset + most) * case.dtype.itemsize + 2 * EDGE
        fits = all(self.pieces[kind, which].size >= need for which in ("x", "out"))
        return kind if fits else "fresh"

    def _array(self, place: Place, n: int, case: Case, edges: list) -> np.ndarray:
        size, many = case.dtype.itemsize, n * abs(case.stride)
        if place[0] == "fresh":
            if case.dtype == np.uint8 and case.stride == 1:
                return np.frombuffer(bytearray(n), np.uint8)
            return np.empty(many, case.dtype)[:: case.stride]
        piece, start = self.pieces[place], EDGE + case.call.offset * size
        stop = start + many * size
        edges += [piece[start - EDGE : start], piece[stop : stop + EDGE]]
        if case.stride == 2:
            edges.append(piece[start:stop].reshape(n, 2, size)[:, 1])
        return piece[start:stop].view(case.dtype)[:: case.stride]
