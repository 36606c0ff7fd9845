"""The program cache: a schedule bound to a buffer is kept for reuse while the buffer lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import numpy as np

from ..backends.base import Backend
from ..backends.program import Program
from ..calls.arrays import address, owner
from ..calls.call import Call
from ..schedule.registry import Choice, Groups
from ..selection.segmentation import Pipelining
from ..shared_memory import Heap, Place, in_place, single_copy, slots, where
from ..shared_memory.in_place import Kernel
from .binding import CallBinder, held_bytes
from .bound_calls import BoundCalls
from .storage import HostMemory

LIMIT = 128 << 20  # bytes held by the programs of one communicator


class _Known:
    """A program that is kept, with what watches its memory."""

    __slots__ = ("program", "persistent", "nbytes", "used", "_watched")

    def __init__(self, program: Program, persistent: bool, now: int, watched: list[weakref.ref]):
        self.program, self.persistent, self.used = program, persistent, now
        self.nbytes, self._watched = held_bytes(program), watched


class ProgramCache:
    """Makes programs for calls, and keeps them.

    The first use of a buffer posts its messages one by one; from the second on they are persistent
    requests.  A program refers to memory by address and is dropped when the memory's owner dies,
    so it neither outlives the user's array nor keeps it alive.

    Parameters
    ----------
    backend : Backend
        Where programs run.
    groups : tuple of tuple of int
        Which ranks share a node.
    pipelining : Pipelining
        How long blocks are cut.
    """

    def __init__(self, backend: Backend, groups: Groups, pipelining: Pipelining):
        self.backend, self.pipelining = backend, pipelining
        self._binder = CallBinder(groups, pipelining)
        self._kept: BoundCalls[_Known] = BoundCalls(LIMIT)
        self._uses = 0

    def program(self, call: Call, choice: Choice, arity: int, background: bool) -> Program:
        """Give a program for the call that is not busy."""
        key = self._key(call, choice, arity)
        known = self._find(key)
        if known is not None and not known.program.busy and known.persistent != background:
            # Persistent requests have the tags of blocking calls; background ones change theirs.
            return known.program
        if background or (known is not None and known.program.busy):
            key = (*key, "background")
            known = self._find(key)
            if known is not None and not known.program.busy:
                return known.program
        persistent = known is not None and not background and not known.program.busy
        program = self._bind(call, choice, arity, persistent)
        self._keep(call, key, program, persistent)
        return program

    def kernel(self, call: Call, place: Place, heap: Heap, background: bool = False) -> Kernel:
        """Give a kernel, not busy, for a call whose arrays lie in symmetric memory."""
        key = (*self._key(call, None, 0), "kernel", where(call, place, heap), background)

        def make() -> Kernel:
            made = in_place.kernel(call, place, heap)
            return made.in_background(self.backend.board) if background else made

        return self._kernel(call, key, make)

    def staged(self, call: Call, heap: Heap, slot: int, keep: bool = True) -> Kernel:
        """Give a kernel for a call whose arrays go through slots of shared memory.

        One that the caller keeps need not be kept here as well.
        """
        key = (*self._key(call, None, 0), "staged", slot)
        return self._kernel(call, key, lambda: slots.kernel(call, heap, slot), keep)

    def single_copy(self, call: Call, reach: single_copy.Reach) -> Kernel:
        """Give a kernel for a call whose arrays the ranks read in each other's memory."""
        key = (*self._key(call, None, 0), "single_copy")
        return self._kernel(call, key, lambda: single_copy.kernel(call, reach))

    def _kernel(
        self, call: Call, key: Hashable, make: Callable[[], Kernel], keep: bool = True
    ) -> Kernel:
        known = self._find(key)
        if known is not None and not known.program.busy:
            assert isinstance(known.program, Kernel)
            return known.program
        made = make()
        if known is None and keep:
            self._keep(call, key, made, True)
        return made

    def _find(self, key: Hashable) -> _Known | None:
        self._uses += 1
        known = self._kept.entries.get(key)
        if known is not None:
            known.used = self._uses
        return known

    def _keep(self, call: Call, key: Hashable, program: Program, persistent: bool) -> None:
        """Keep a program until its memory dies, where that can be watched and there is room."""
        kept, op = self._kept, call.op
        if op is not None and not op.builtin and not isinstance(op.function, np.ufunc):
            # A function may be made anew for every call, with all that it captures: it is kept
            # from its second call on.
            try:
                if kept.last_use(key, self._uses, op.function) is None:
                    return
            except TypeError:  # it cannot be watched
                return
        if not kept.admits(key, self._uses):
            return

        def forget(_: weakref.ref) -> None:
            kept.drop(key)

        holders = [owner(data) for data in (call.x, call.out) if data is not None]
        if len(holders) == 2 and holders[0] is holders[1]:
            del holders[1]
        try:
            watched = [weakref.ref(holder, forget) for holder in holders]
        except TypeError:  # not every owner of memory can be watched
            return
        kept.keep(key, _Known(program, persistent, self._uses, watched))

    def clear(self) -> None:
        """Drop every program, and its persistent requests with it."""
        self._kept.clear()

    def _key(self, call: Call, choice: Choice | None, arity: int) -> tuple:
        return (
            call.collective,
            None if choice is None else choice.algorithm,
            arity,
            None if call.op is None else call.op.identity,
            call.dtype,
            call.root,
            call.counts,
            call.out_counts,
            None if call.x is None else (address(call.x), call.x.size),
            None if call.out is None else (address(call.out), call.out.size),
        )

    def _bind(self, call: Call, choice: Choice, arity: int, persistent: bool) -> Program:
        memory = HostMemory(call.dtype)
        return self._binder.program(self.backend, memory, call, choice, arity, persistent)
