"""What the ranks of one node do without messages: symmetric arrays, staged ones, barriers."""

from __future__ import annotations

from ..backends.base import Backend
from ..calls.call import Call
from ..errors import Unsupported
from ..schedule.registry import SINGLE_COPY, STAGED, SYMMETRIC
from ..shared_memory import NEEDS, Heap, Place, place_of, single_copy, slots, where
from ..shared_memory.in_place import Kernel, meeting
from .programs import ProgramCache


class SharedMemory:
    """The kernels of one communicator.

    Attributes
    ----------
    heap : Heap or None
        The memory; None where the ranks share none.
    """

    def __init__(self, backend: Backend, cache: ProgramCache):
        self._backend, self._cache = backend, cache
        self.heap: Heap | None = None
        self._no_staging: str | None = None
        self._no_reach: str | None = None
        self._reach: single_copy.Reach | None = None
        self.last_use = [0, 0]  # number of the operation that last used each staging slot

    def place(self, call: Call) -> Place | None:
        """Give the place of the array that must be symmetric, or None."""
        return place_of(call, self.heap)

    def where(self, call: Call, place: Place | None) -> str:
        """Name the symmetric memory of a call; empty if there is none."""
        return "" if self.heap is None or place is None else where(call, place, self.heap)

    def why_not_symmetric(self, call: Call, place: Place | None) -> str | None:
        """Give why a call cannot be served in symmetric memory, or None."""
        if self.heap is None:
            return "the ranks share no memory"
        if call.collective == "barrier":
            return None
        if place is None:
            return f"{NEEDS.get(call.collective, 'x')} is no array of comm.empty()"
        return "rows of other ranks are not known" if call.uneven_alltoall else None

    def why_not_staged(self, call: Call) -> str | None:
        """Give why a call of private arrays cannot go through shared slots, or None."""
        if self.heap is None:
            return "the ranks share no memory"
        return self._no_staging or slots.why_not(call)

    def why_not_single_copy(self, call: Call) -> str | None:
        """Give why the ranks cannot read a call's private arrays, or None; the first use tries."""
        if self.heap is None:
            return "the ranks share no memory"
        return self._no_reach or single_copy.why_not(call)

    def kernel(
        self,
        call: Call,
        name: str,
        place: Place | None,
        sequence: int,
        background: bool = False,
        keep: bool = True,
    ) -> Kernel:
        """Give the kernel for operation number `sequence`; `keep` says to keep a staged one."""
        assert self.heap is not None
        if call.collective == "barrier":
            return meeting().in_background(self._backend.board) if background else meeting()
        if name == SYMMETRIC:
            assert place is not None
            return self._cache.kernel(call, place, self.heap, background)
        if name == SINGLE_COPY:
            assert self._reach is not None
            return self._cache.single_copy(call, self._reach)
        return self._cache.staged(call, self.heap, sequence % 2, keep)

    def has(self, name: str) -> bool:
        """Tell whether there is what a way needs."""
        if name == STAGED:
            return self.heap is not None and self.heap.has_staging
        return name != SINGLE_COPY or self._reach is not None

    def make(self, name: str) -> None:
        """Make what a way needs, collective; where it cannot be, that is a reason against it."""
        assert self.heap is not None
        try:
            if name == STAGED:
                self.heap.make_staging()
            else:
                self._reach = single_copy.Reach(self.heap)
        except (MemoryError, Unsupported) as error:
            if name == STAGED:
                self._no_staging = str(error)
            else:
                self._no_reach = str(error)

    def slot_is_free(self, slot: int) -> bool:
        """Tell whether every rank has done with what was last in a staging slot."""
        last = self.last_use[slot]
        return not last or self._backend.board.all_reached(last + 1)
