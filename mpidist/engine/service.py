"""The service of a communicator: calls become programs, which are kept for their repetition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..backends.executor import ONCE, Executor, Use
from ..calls.call import Call
from ..calls.prepare import Prepared
from ..errors import Unsupported
from ..schedule.registry import find
from ..selection.calibration import Calibration
from ..selection.choose import Candidate, Chooser, memory_of
from ..selection.config import CollectiveConfig
from ..selection.names import SYMMETRIC
from ..selection.segmentation import Segmentation
from ..shared_memory import compiled
from ..shared_memory.heap import Heap
from ..shared_memory.host import Host
from ..topology import RANKS_PER_NODE, Topology
from ..trace import Served
from . import memory_probes
from .background import Background
from .calibration import LineTrips, calibrate_shortly
from .executors import EXECUTORS, MessagesExecutor, NativeExecutor
from .probes import Key, calls_of, choice_of
from .programs import Bound, CallKey, Programs, key_of, owners_of
from .repeated import repeated, served_by, with_own_arrays
from .sequencer import Sequencer
from .trial import FIRST, least, near, rows_of, shortened, times_of


class Service:
    """Serves the calls of one communicator: chooses, binds, and keeps what is repeated."""

    def __init__(self, backend: Backend, config: CollectiveConfig, pipelining: Segmentation):
        self.backend, self.config, self.pipelining = backend, config, pipelining
        self.topology = Topology.from_hosts(backend.rank, list(backend.hosts), {})
        self.groups = config.groups(self.topology.groups)  # by node, as the configuration counts
        self.arity = config.tree_arity
        self.sequencer = sequencer = Sequencer(backend, config.timeout)
        self.heap: Heap | None = None  # of the ranks of this node, as `groups` tells nodes
        self._trips: LineTrips | None = None
        # Why there is no heap, the same on all ranks; why there is none of all ranks.
        self.no_heap = self.apart = self._why_no_heap()
        if self.no_heap is None:
            node = next(group for group in self.groups if backend.rank in group)
            self.heap = Heap(backend.rank, node, sequencer.everyone, backend.patience)
            sequencer.behind = self.heap.missing
            if len(self.groups) > 1:
                self.apart = f"{len(self.groups)} nodes: memory is shared within each node only"
        host = Host(
            *(backend, self.heap, self.apart, self.groups, pipelining, self.arity),
            sequencer.reports.check_same,
            sequencer.reports.mismatch,
        )
        # In the order in which ``explain`` lists them; from the first array on a GPU on, `add` adds
        # those of such arrays.
        self.executors: list[Executor] = [make(host) for make in EXECUTORS]
        native = next(e for e in self.executors if isinstance(e, NativeExecutor))
        sequencer.start_natives = native.advance
        self.chooser = Chooser(self.executors, config, self.groups, backend.crowded)
        self.programs = Programs(sequencer)
        self.note: Callable[[Served], object] | None = None  # told how each call is served
        self.background = Background(sequencer, self.programs, self.choose, self.describe)

    def add(
        self,
        executors: Sequence[Executor],
        required: Mapping[tuple[str, bool], str],
        takes_turns: bool,
    ) -> None:
        """Add executors of arrays on a GPU; for the others see :meth:`Chooser.relist`."""
        self.executors += executors
        self.chooser.relist(self.executors, required, takes_turns)

    def _why_no_heap(self) -> str | None:
        backend, hosts = self.backend, self.topology.groups
        if backend.native is None:
            return f"the {backend.name} backend has no shared memory"
        for group in self.groups:
            if not any(set(group) <= set(host) for host in hosts):
                return (
                    f"num_nodes={len(self.groups)} makes a node of the ranks {group}, which are on "
                    "several hosts and share no memory"
                )
        if not backend.shares_memory:
            return (
                "the ranks of a node cannot map the same memory: they may be in containers of "
                f"their own, or on several hosts that {RANKS_PER_NODE} counts as a node"
            )
        return None

    def calibrate(self, operation: str = "calibrate") -> Calibration:
        """Measure the cost model's constants now, and drop the choices made before; collective."""
        backend, groups, sequencer = self.backend, self.topology.groups, self.sequencer
        # A rank that is alone on its node would have nobody to read from.
        heap = self.heap if min(map(len, self.groups)) > 1 else None
        found = sequencer.set_up(
            operation, lambda: calibrate_shortly(backend, groups, heap, sequencer.deadline())
        )
        self.learn(found)
        return found

    def probes(
        self, public: str, sizes: Sequence[int]
    ) -> tuple[dict[Key, Call], dict[Key, Callable[[], None]]]:
        """Return the calls of probes, and functions that run them for a caller outside the door.

        The last one is what a short call by the algorithm `public` is bound to.
        """
        executor = next(e for e in self.executors if isinstance(e, MessagesExecutor))
        calls = calls_of(self.backend.rank, self.backend.size, sizes)
        choices = {key: choice_of(key[0]) for key in calls}
        key = public, sizes[0]
        calls[key], choices[key] = next(iter(calls.values())), find("allreduce", public)
        runs = {}
        for key, call in calls.items():
            chosen = Candidate(choices[key].name, choices[key], "it is a probe")
            operation = f"{call.signature}: {chosen.name}, to calibrate"
            bound = repeated(self.sequencer, call, executor, chosen, operation)
            assert bound.run is not None
            runs[key] = bound.run
        return calls, runs

    def memory_probes(self) -> tuple[dict[Key, Call], dict[Key, Callable[[], None]]]:
        """Return the calls of probes of memory, and functions as those of `probes`; collective.

        There are none where not all ranks share memory, or they cannot.
        """
        calls: dict[Key, Call] = {}
        runs: dict[Key, Callable[[], None]] = {}
        heap, sequencer = self.heap, self.sequencer
        if heap is None or self.apart is not None:
            return calls, runs
        dtype = np.dtype(np.uint8)
        for memory in memory_probes.NAMES:
            purpose = f"probes of {memory} memory, to calibrate"
            executor = next(e for e in self.executors if e.memory == memory and not e.on_device)
            if not executor.ready:
                sequencer.set_up(purpose, executor.make_ready)
            empty = heap.empty if memory == "mapped" else np.empty
            made = partial(memory_probes.calls_of, memory, self.backend.rank, self.backend.size)
            try:
                found = sequencer.set_up(purpose, partial(made, partial(empty, dtype=dtype)))
            except MemoryError:  # on all ranks
                continue
            choices = {key: memory_probes.choice_of(key[0]) for key in found}
            if any(executor.why_not(found[key], choices[key], False) for key in found):
                continue  # it could not be made ready, on all ranks
            for key, call in found.items():
                chosen = Candidate(choices[key].name, choices[key], "it is a probe")
                operation = self.describe(call, executor, chosen)
                bound = repeated(sequencer, call, executor, chosen, operation)
                assert bound.run is not None
                calls[key], runs[key] = call, bound.run
        return calls, runs

    def round_trip(self) -> float | None:
        """Return the seconds of a line's way from rank 0 to the next one and back; collective.

        None if these share no memory, ranks share a core, or there is no compiled code.
        """
        heap, backend, sequencer = self.heap, self.backend, self.sequencer
        if heap is None or len(self.groups[0]) < 2:
            return None

        def measure() -> float | None:
            if self._trips is None:
                able = sequencer.everyone(compiled.runs_steps() and not backend.crowded)
                if not all(able):
                    return None
                self._trips = LineTrips(backend, heap, sequencer.deadline)
            return self._trips.seconds()

        return sequencer.set_up("round trip of a line", measure)

    def learn(self, calibration: Calibration) -> None:
        """Set the cost model's constants, equal on all ranks, and drop the choices made before."""
        if self.chooser.estimates is not None:
            self.chooser.estimates.learn(calibration)
        self.chooser.forget()
        self.programs.clear()

    # -- choosing -------------------------------------------------------------------------------

    def choose(
        self, call: Call, algorithm: str, background: bool = False
    ) -> tuple[Executor, Candidate]:
        """Choose the executor and algorithm of a call, and make the executor ready.

        If the choice needs it, a blocking call calibrates first, or tries out several ways.  A
        background call does not: its ranks do not wait for each other.
        """
        chooser = self.chooser
        chosen = chooser.choose(call, algorithm, background, None if background else self)
        executor = chooser.executor(chosen, call, background)
        # An executor that could not be made ready has a reason from then on: another one is chosen.
        while not executor.ready:
            # Not the call's text alone: a rank that calls the library announces the same.
            self.sequencer.set_up(f"{call.signature} by {executor.name}", executor.make_ready)
            chooser.forget()
            chosen = chooser.choose(call, algorithm, background)
            executor = chooser.executor(chosen, call, background)
        if self.note is not None:
            self.note(served_by(call, executor, chosen))
        return executor, chosen

    def try_out(self, call: Call, names: Sequence[str]) -> None:
        """Measure several ways to serve a call, on arrays of its kind; collective."""
        own, sequencer, estimates = shortened(call), self.sequencer, self.chooser.estimates
        assert estimates is not None
        memory, ways = memory_of(names), {}
        try:
            own = self._symmetric(own) if memory == SYMMETRIC else with_own_arrays(own)
        except MemoryError:
            if memory != SYMMETRIC:
                raise
            return  # on all ranks: the rules choose, for a call needs no memory to be served
        for name in names:
            try:
                executor, chosen = self.choose(call, name)
            except Unsupported:  # it could not be made ready, on all ranks
                continue
            operation = f"{call.signature} by {name}, tried out"
            ways[name] = repeated(sequencer, own, executor, chosen, operation)
        times = self._times_of(own, ways, FIRST)
        again = {name: ways[name] for name in near(times)}
        if again:
            further = self._times_of(own, again, rows_of(own.nbytes))
            times |= {name: min(times[name], seconds) for name, seconds in further.items()}
        estimates.learn_trial(call, memory, times)

    def _symmetric(self, call: Call) -> Call:
        """Return a copy of a call with arrays in symmetric memory; collective."""
        heap = self.heap
        assert heap is not None
        # As long on every rank, whatever a rank has of them: an allocation has one shape.
        shape, purpose = (call.count,), f"{call.signature}, tried out"
        allocate = partial(heap.empty, shape, call.dtype)
        whole = [self.sequencer.set_up(purpose, allocate) for _ in range(2)]
        return with_own_arrays(call, lambda size, _: whole.pop()[:size])

    def _times_of(
        self, own: Call, ways: Mapping[str, Bound], rows: Sequence[int]
    ) -> dict[str, float]:
        """Return the seconds of each way to serve a call, the same on all ranks; collective."""
        sequencer, purpose = self.sequencer, f"{own.signature}, tried out"
        try:
            mine = times_of(own, ways, rows)
        except BaseException as error:
            if sequencer.broken is not None:
                raise
            # As by Ctrl-C between two turns: the other ranks are in the next one.
            raise sequencer.broke(error, purpose, sequencer.sequence) from error.__cause__
        every = sequencer.set_up(purpose, lambda: sequencer.everyone(mine))
        return dict(zip(ways, least(np.array(every))))

    def describe(
        self, call: Call, executor: Executor, chosen: Candidate, background: bool = False
    ) -> str:
        """Return the text that ranks compare: the call's signature, and what its executor adds.

        That is an algorithm, the executor's name, or the location in symmetric memory.
        """
        operation, agreed = call.signature, executor.agreed(call, chosen.choice)
        if agreed:
            operation = f"{operation} {agreed}"
        return f"{operation} in the background" if background else operation

    def intention(self, call: Call, algorithm: str, background: bool) -> str:
        """Return the text that :meth:`describe` would return for a call, before it is served."""
        chosen = self.chooser.choose(call, algorithm, background)
        executor = self.chooser.executor(chosen, call, background)
        return self.describe(call, executor, chosen, background)

    # -- serving --------------------------------------------------------------------------------

    def serve(
        self,
        prepared: Prepared,
        algorithm: str,
        *,
        purpose: str = "",
        key: CallKey | None = None,
        x: Any = None,
        out: Any = None,
    ) -> Any:
        """Serve a call, blocking, and return the user's result; the caller is inside the door.

        `purpose` is the user's call that this one is a part of.  By `key`, `x` and `out`
        :meth:`Programs.find` finds the call when it is repeated.
        """
        call, programs = prepared.call, self.programs
        bound = None
        # Memory made for this call has a new address each time: to bind it would never pay.
        if not prepared.fresh and not call.on_device and isinstance(algorithm, str):
            bound = programs.get_or_bind(key_of(call, algorithm), call, self._bind, algorithm)
        if bound is None:
            executor, chosen = self.choose(call, algorithm)
            bound = self._of_kind(call, executor, chosen)
            if bound is None:
                operation = purpose + self.describe(call, executor, chosen)
                turn = (self.sequencer.sequence + 1) % executor.turns
                use = Use(turn=turn) if turn else ONCE
                program = executor.bind(call, chosen.choice, use)
                self.sequencer.run(program, operation, chosen.name, prepared)
                return prepared.give()
        if self.note is not None and bound.served is not None:
            self.note(bound.served)
        bound.serve(call)
        result = prepared.give()
        if key is not None and bound.shared:
            programs.repeat_alike(key, call, bound, x, out, result)
        elif key is not None and (result is None or result is out or result is x):
            programs.repeat(key, call, bound, x, out)
        return result

    def _bind(self, call: Call, algorithm: str) -> Bound:
        """Bind a call for its repetition."""
        executor, chosen = self.choose(call, algorithm)
        operation = self.describe(call, executor, chosen)
        return repeated(self.sequencer, call, executor, chosen, operation, owners_of(call))

    def _of_kind(self, call: Call, executor: Executor, chosen: Candidate) -> Bound | None:
        """Return the bound call that all calls of one :meth:`Executor.kind` share, or None.

        It has arrays of its own, and is bound at the second call of the kind.
        """
        kind = executor.kind(call)
        if kind is None:
            return None
        key = executor.name, chosen.name, kind, call.even, call.agreed
        return self.programs.get_or_bind(key, call, self._bind_kind, executor, chosen, owners=None)

    def _bind_kind(self, call: Call, executor: Executor, chosen: Candidate) -> Bound:
        """Bind all calls of one kind, to arrays of their own."""
        operation = self.describe(call, executor, chosen)
        return repeated(self.sequencer, with_own_arrays(call), executor, chosen, operation)
