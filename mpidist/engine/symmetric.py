"""The ``symmetric`` executor: it runs schedules in the arrays of ``comm.empty``."""

from __future__ import annotations

from ..backends.executor import Executor
from ..backends.program import Program, Round
from ..calls.call import Call
from ..schedule.registry import Choice, find
from ..shared_memory.barrier import BoardArrival
from ..shared_memory.host import Host
from ..shared_memory.in_place import NEEDS, NO_HEAP, location_of, memory_key
from ..shared_memory.kernel import one_shot
from .mapped import Mapped
from .rooted import rooted_program

_SHIPPED = {
    "allreduce": ("in_place",),
    "reduce_scatter": ("in_place",),
    "allgather": ("in_place",),
    "broadcast": ("in_place",),
    "alltoall": ("in_place",),
    "reduce": ("in_place", "in_place_fetched"),
    "gather": ("in_place", "in_place_fetched"),
    "scatter": ("in_place", "in_place_stored"),
}
"""The schedules of each collective; of two, each rank takes one (see :mod:`.rooted`)."""


class Symmetric(Executor):
    """Executor of the barrier, and of collectives directly in the arrays of ``comm.empty``."""

    name, summary = "symmetric", "every rank reads and writes the others' memory in place"
    memory = "mapped"

    def __init__(self, host: Host):
        self._heap, self._board = host.heap, host.backend.board
        self._check_same = host.check_same
        self._mapped = None if host.heap is None else Mapped(host.heap, host.arity)
        self._shipped = {
            collective: [find(collective, name) for name in names]
            for collective, names in _SHIPPED.items()
        }
        self._one_shot = find("reduce", "in_place_one_shot")

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return why the call cannot be served, usually a private array; None if it can."""
        heap = self._heap
        if heap is None:
            return NO_HEAP
        if call.collective == "barrier":
            return None
        if call.collective not in NEEDS:
            return f"there is no {call.collective} in symmetric memory"
        if location_of(call, heap) is None:
            return f"{NEEDS[call.collective]} was not allocated by comm.empty()"
        return (
            "the counts of the other ranks are unknown (uneven alltoall)"
            if call.uneven_alltoall
            else None
        )

    def cannot_run(self, call: Call, choice: Choice, background: bool) -> str | None:
        """Return why a schedule cannot run on the arrays of a call, or None if it can."""
        if call.on_device:
            return "its arrays are on a GPU"
        if self._mapped is None:
            return NO_HEAP
        return self._mapped.why_not(call, choice, background)

    def depends_on(self, call: Call) -> bool:
        """Return whether this rank's array is in symmetric memory, as the call requires it."""
        return self._heap is not None and location_of(call, self._heap) is not None

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return how the call is served, and where its array is, as text that ranks compare."""
        heap, mapped = self._heap, self._mapped
        assert heap is not None and mapped is not None
        if choice is not None:
            return f"by {choice.name} in symmetric memory {mapped.agreed(call, choice)}".rstrip()
        location = location_of(call, heap)
        return "in symmetric memory" + (
            "" if location is None else f" {memory_key(call, location, heap)}"
        )

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Return the program of a schedule: the one that the call names, or those of `_SHIPPED`.

        In the background its first round waits for all ranks, as the engine does before a blocking
        call.
        """
        heap, mapped = self._heap, self._mapped
        assert heap is not None and mapped is not None
        choices = self._own(call, background) if choice is None else [choice]
        if not choices:
            program = Program([], meets=True)
        elif len(choices) == 1:
            program = mapped.program(call, choices[0])
        else:
            direct, otherwise = (mapped.plan(call, one) for one in choices)
            last = background or call.collective != "reduce"
            program = rooted_program(call, direct, otherwise, heap, last)
        if background:
            board_arrival = BoardArrival(self._board, self._check_same)
            program.items = [Round((), board_arrival, ()), *program.items]
            program.named, program.meets = board_arrival, False
        return program

    def _own(self, call: Call, background: bool) -> list[Choice]:
        """Return the schedules of a call that names none; the barrier needs none."""
        if call.collective == "reduce" and one_shot(call):
            # It saves a barrier: 4 KiB in 0.6 to 0.8 of the time on 2 and 4 ranks, 64 KiB in the
            # same; from 256 KiB on it would take 1.15 to 1.5 times as long.
            return [self._one_shot]
        if call.collective == "reduce" and background:
            # Not in_place_fetched: operations on one input would share the memory beside it.
            return [self._shipped["reduce"][0], self._one_shot]
        return self._shipped.get(call.collective, [])
