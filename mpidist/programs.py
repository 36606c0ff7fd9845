"""The program cache: a schedule bound to a buffer is kept for reuse while the buffer lives."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np

from .arrays import address, owner
from .backends.base import Backend
from .binding import Binder, Program, Round, Side
from .call import Call
from .operations import divide_half, divides_first, division, is_mean
from .pipelining import Pipelining
from .plan import Lengths, Written, materialise
from .schedule.contract import COLLECTIVES
from .schedule.registry import Algorithm, Choice, Groups
from .schedule.rounds import segmented
from .storage import Storage, view_at
from .symmetric import Heap, Place, kernels, single_copy, staged, where
from .symmetric.kernels import Kernel

_PROGRAMS = 64


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
        self.backend, self.groups, self.pipelining = backend, groups, pipelining
        self._written: dict[Hashable, Written] = {}
        self._programs: OrderedDict[Hashable, tuple[Program, bool]] = OrderedDict()
        self._watched: dict[int, tuple[weakref.ref, set[Hashable]]] = {}

    def program(self, call: Call, choice: Choice, arity: int, background: bool) -> Program:
        """Give a program for the call that is not busy."""
        key = self._key(call, choice, arity)
        known = self._programs.get(key)
        if known is not None and not known[0].busy:
            program, persistent = known
            # Persistent requests have the tags of blocking calls; background ones change theirs.
            if persistent != background:
                self._programs.move_to_end(key)
                return program
        if background or (known is not None and known[0].busy):
            key = (*key, "background")
            known = self._programs.get(key)
            if known is not None and not known[0].busy:
                return known[0]
        persistent = known is not None and not background and not known[0].busy
        program = self._bind(call, choice, arity, persistent)
        if not program.busy and self._watch(call, key):
            self._keep(key, program, persistent)
        return program

    def kernel(self, call: Call, place: Place, heap: Heap, background: bool = False) -> Kernel:
        """Give a kernel, not busy, for a call whose arrays lie in symmetric memory."""
        key = (*self._key(call, None, 0), "kernel", where(call, place, heap), background)

        def make() -> Kernel:
            made = kernels.kernel(call, place, heap)
            return made.in_background(self.backend.board) if background else made

        return self._kernel(call, key, make)

    def staged(self, call: Call, heap: Heap, slot: int) -> Kernel:
        """Give a kernel for a call whose arrays go through slots of shared memory."""
        key = (*self._key(call, None, 0), "staged", slot)
        return self._kernel(call, key, lambda: staged.kernel(call, heap, slot))

    def single_copy(self, call: Call, reach: single_copy.Reach) -> Kernel:
        """Give a kernel for a call whose arrays the ranks read in each other's memory."""
        key = (*self._key(call, None, 0), "single_copy")
        return self._kernel(call, key, lambda: single_copy.kernel(call, reach))

    def _kernel(self, call: Call, key: Hashable, make: Callable[[], Kernel]) -> Kernel:
        known = self._programs.get(key)
        if known is not None and not known[0].busy:
            self._programs.move_to_end(key)
            assert isinstance(known[0], Kernel)
            return known[0]
        made = make()
        if known is None and self._watch(call, key):
            self._keep(key, made, True)
        return made

    def _keep(self, key: Hashable, program: Program, persistent: bool) -> None:
        self._programs[key] = (program, persistent)
        if len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)

    def clear(self) -> None:
        """Drop every program, and its persistent requests with it."""
        self._programs.clear()
        self._watched.clear()

    def _segments(self, call: Call, algorithm: Algorithm, block_count: int) -> tuple[int, int]:
        """Give the number of pieces that each block is cut into, and how many are under way."""
        largest = -(-call.nbytes // max(block_count, 1))
        if call.counts:
            per_rank = max(1, block_count // call.size)
            largest = -(-max(call.counts) * call.dtype.itemsize // per_rank)
            if not call.even and call.collective == "alltoall":
                return 1, self.pipelining.window  # no rank knows the largest part of all
        nodes = len(self.groups)
        return self.pipelining.of(algorithm, call.size, nodes, block_count, largest)

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

    def _watch(self, call: Call, key: Hashable) -> bool:
        """Have the program dropped when its memory dies; False where that cannot be."""
        for data in (call.x, call.out):
            if data is None:
                continue
            holder = owner(data)
            try:
                self._watch_one(holder, key)
            except TypeError:  # not every owner of memory can be watched
                return False
        return True

    def _watch_one(self, holder: Any, key: Hashable) -> None:
        mark = id(holder)
        if mark not in self._watched:
            keys: set[Hashable] = set()
            programs, watched = self._programs, self._watched

            def forget(_: weakref.ref) -> None:
                watched.pop(mark, None)
                for dead in keys:
                    programs.pop(dead, None)

            self._watched[mark] = (weakref.ref(holder, forget), keys)
        self._watched[mark][1].add(key)

    def _bind(self, call: Call, choice: Choice, arity: int, persistent: bool) -> Program:
        algorithm, contract = choice.algorithm, COLLECTIVES[call.collective]
        count = algorithm.block_count(call.size, groups=self.groups)
        segments, window = self._segments(call, algorithm, count)
        written = self._write_down(call, choice, arity, segments, window)
        if call.counts:
            each = count // call.size
            lengths = Lengths.per_rank(call.counts, call.out_counts, each, segments)
        else:
            lengths = Lengths.even(call.count, count, segments)
        x = _by_address(call.x)
        out = x if call.out is call.x else _by_address(call.out)
        if call.collective == "broadcast" and call.rank == call.root and call.in_place:
            out = None  # the root's array is read, whatever the schedule brings back to it
        scaled: list[Round | Side] = []
        finish: list[Callable[[], Any]] = []
        scratch_bytes = 0
        if divides_first(call.op, call.dtype) and x is not None:
            brought = x
            if call.collective == "allreduce" and out is not None:
                x = out
            else:
                x = np.empty(brought.size, call.dtype)
                scratch_bytes = x.nbytes
            scaled = [Round((partial(divide_half, brought, call.size, x),), None, ())]
        elif is_mean(call.op) and out is not None and out.size:
            finish = [division(out, call.size)]
        place = (call.rank, call.size, call.root)
        storage = Storage(contract, place, lengths, x, out, call.dtype)
        program = Binder(self.backend, storage, call.op, persistent).program(written, finish)
        program.items[:0] = scaled
        program.scratch_bytes += scratch_bytes
        return program

    def _write_down(
        self, call: Call, choice: Choice, arity: int, segments: int, window: int
    ) -> Written:
        algorithm = choice.algorithm
        key = (algorithm, arity, call.root, segments, window)
        if key not in self._written:

            def make() -> Any:
                return algorithm.schedule(call.rank, call.size, call.root, arity, self.groups)

            schedule = segmented(make, call.size, segments, window)
            self._written[key] = materialise(schedule)
        return self._written[key]


def _by_address(data: np.ndarray | None) -> np.ndarray | None:
    return None if data is None else view_at(address(data), data.size, data.dtype)
