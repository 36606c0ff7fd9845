"""The service of a communicator: calls become programs, numbered and run by their deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from ..backends import rendezvous
from ..backends.base import Backend
from ..backends.executor import Executor
from ..backends.program import Program, library_call
from ..calls.call import Call
from ..calls.prepare import Prepared
from ..errors import (
    CollectiveTimeout,
    CommunicationError,
    CommunicatorBroken,
    InvalidArgument,
    MpidistError,
)
from ..selection.choose import Candidate, Chooser
from ..selection.config import CollectiveConfig
from ..selection.estimates import Calibration
from ..selection.segmentation import Segmentation
from ..shared_memory.compile import unbound_arrival
from ..shared_memory.heap import Heap
from ..topology import Topology
from ..trace import Served
from .background import Background
from .calibration import calibrate_shortly
from .door import Door
from .executors import EXECUTORS, NativeExecutor
from .programs import Bound, CallKey, Programs, key_of, owners_of
from .repeated import repeated, served_by, with_own_arrays
from .reports import Reports
from .run import Engine
from .watchdog import WATCHDOG
from .work import UNSET, keep

Choose = Callable[[Call, str, bool], tuple[Executor, Candidate]]


class Service:
    """Serves the calls of one communicator: numbers them, keeps deadlines and the broken state.

    Attributes
    ----------
    sequence : int
        Number of collectives begun on this communicator.
    door : Door
        Admits one caller at a time, until the communicator is broken.
    freed : bool
        Whether it cannot be used because it was freed.
    executors : list of Executor
        The executors of host arrays, in the order in which ``explain`` lists them.
    """

    def __init__(self, backend: Backend, config: CollectiveConfig, pipelining: Segmentation):
        self.backend, self.config, self.pipelining = backend, config, pipelining
        self.timeout: float | None = config.timeout
        self.topology = Topology.from_hosts(backend.rank, list(backend.hosts), {})
        self.groups = config.groups(self.topology.groups)  # by node, as the configuration counts
        self.arity = config.tree_arity
        self.sequence: int = 0
        self.heap: Heap | None = None
        if backend.native is not None and self.topology.num_nodes == 1:
            self.heap = Heap(backend.rank, backend.size, self.everyone, backend.patience)
        behind = self.heap.missing if self.heap is not None else tuple[int, ...]
        self.reports = Reports(backend, behind, lambda: self.sequence)
        # Ranks that are threads of one process see at once that they wait in vain.
        alarm = self.reports.alarm if backend.native is not None else None
        self.engine = Engine(backend, alarm)

        self.executors: list[Executor] = [make(self) for make in EXECUTORS]
        self._native = next(e for e in self.executors if isinstance(e, NativeExecutor))
        self.chooser = Chooser(self.executors, config, self.groups, backend.vendor, backend.crowded)
        self.on_gpu: Choose | None = None  # the executors of arrays on a GPU, once there is one
        self.programs = Programs(self)
        self.note: Callable[[Served], object] | None = None  # told how each call is served
        self.door = Door(backend.rank)
        self.freed = False
        self._setting_up = ("set-up", 0)  # call that needs a set-up exchange, and its number
        self._guarded = False
        self._slot_used = [0, 0]  # number of the operation that last used each staging slot
        self._meet: Callable[[int, int, str], None] | None = None
        self.met = 0  # number of the last operation that all ranks are known to have reached
        self.inside = 0  # number of the native call that this rank is in, for the watchdog
        self.background = Background(self)

    def calibrate(self, operation: str = "calibrate") -> Calibration:
        """Measure the cost model's constants now, and drop the choices made before; collective.

        `operation` is the call that needs them.
        """
        backend, groups = self.backend, self.topology.groups
        found = self.set_up(operation, lambda: calibrate_shortly(backend, groups, self.deadline()))
        self.learn(found)
        return found

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

        If the choice needs it, a blocking call calibrates first.  A background call does not: its
        ranks do not wait for each other.
        """
        if call.on_device:
            assert self.on_gpu is not None
            return self._noted(call, *self.on_gpu(call, algorithm, background))
        chooser = self.chooser
        chosen = chooser.choose(call, algorithm, background, None if background else self.calibrate)
        executor = chooser.executor(chosen)
        while not executor.ready:
            self.set_up(call.fingerprint, executor.make_ready)
            chooser.forget()
            chosen = chooser.choose(call, algorithm, background)
            executor = chooser.executor(chosen)
        return self._noted(call, executor, chosen)

    def _noted(
        self, call: Call, executor: Executor, chosen: Candidate
    ) -> tuple[Executor, Candidate]:
        if self.note is not None:
            self.note(served_by(call, executor, chosen))
        return executor, chosen

    def describe(
        self, call: Call, executor: Executor, chosen: Candidate, background: bool = False
    ) -> str:
        """Return the text that ranks compare: the call's fingerprint, and what its executor adds.

        That is an algorithm, the executor's name, or the location in symmetric memory.
        """
        operation, agreed = call.fingerprint, executor.agreed(call, chosen.choice)
        if agreed:
            operation = f"{operation} {agreed}"
        return f"{operation} in the background" if background else operation

    def intention(self, call: Call, algorithm: str, background: bool) -> str:
        """Return the text that :meth:`describe` would return for a call, before it is served."""
        chosen = self.chooser.choose(call, algorithm, background)
        return self.describe(call, self.chooser.executor(chosen), chosen, background)

    # -- running --------------------------------------------------------------------------------

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

        Parameters
        ----------
        prepared : Prepared
            The call.
        algorithm : str
            The requested algorithm, or "auto".
        purpose : str
            The user's call that this call is a part of.
        key, x, out : optional
            Key and arrays by which :meth:`Programs.find` finds the call when it is repeated.
        """
        call, programs = prepared.call, self.programs
        address = bound = None
        if not prepared.fresh and not call.on_device and isinstance(algorithm, str):
            address = key_of(call, algorithm)
            bound = programs.get(address)
        if bound is None:
            executor, chosen = self.choose(call, algorithm)
            if address is not None:
                bound = self._bound(address, call, executor, chosen)
            if bound is None:
                bound = self._of_kind(call, executor, chosen)
            if bound is None:
                operation = purpose + self.describe(call, executor, chosen)
                turn = (self.sequence + 1) % executor.turns
                self.run(
                    executor.bind(call, chosen.choice, turn=turn),
                    operation,
                    chosen.name,
                    prepared,
                )
                return prepared.give()
        if self.note is not None and bound.served is not None:
            self.note(bound.served)
        bound.serve(call)
        result = prepared.give()
        same = result is None or result is out or result is x
        if key is not None and same and not bound.shared:
            programs.repeat(key, call, bound, x, out)
        return result

    def _bound(
        self, key: Hashable, call: Call, executor: Executor, chosen: Candidate
    ) -> Bound | None:
        """Bind a call for its repetition and return it; None if that does not pay yet."""
        programs, owners = self.programs, owners_of(call)
        try:
            since = programs.last_use(key, *owners)
        except TypeError:  # no weak reference to an owner: its end would go unnoticed
            return None
        if since is None or not programs.make_room(since):
            return None
        bound = repeated(
            self, call, executor, chosen, self.describe(call, executor, chosen), owners
        )
        programs.keep(key, bound, owners)
        return bound

    def _of_kind(self, call: Call, executor: Executor, chosen: Candidate) -> Bound | None:
        """Return the bound call that all calls of one :meth:`Executor.kind` share, or None.

        It has arrays of its own, and is bound at the second call of the kind.
        """
        kind = executor.kind(call)
        if kind is None:
            return None
        programs, key = self.programs, (executor.name, kind, call.even, call.agreed)
        bound = programs.get(key)
        if bound is None:
            nbytes = sum(data.nbytes for data in (call.x, call.out) if data is not None)
            since = programs.last_use(key)
            if since is None or not programs.make_room(since, nbytes):
                return None
            operation = self.describe(call, executor, chosen)
            bound = repeated(self, with_own_arrays(call), executor, chosen, operation)
            programs.keep(key, bound)
        return bound

    def run(self, program: Program, operation: str, how: str, *memory: object) -> None:
        """Run a program as the next operation, blocking.

        Parameters
        ----------
        program : Program
            The program.
        operation : str
            The operation, as the ranks compare and report it.
        how : str
            The executor or algorithm, for reports.
        *memory : object
            Kept if the operation does not end: messages may still be stored there.
        """
        meets = program.meets
        if not program.announced or (meets and self.backend.native is None):
            # Backends without calls of a library underneath keep deadlines themselves.
            self.engine.run(program, None)
            return
        reports = self.reports
        self.sequence = sequence = self.sequence + 1
        try:
            if program.slot is not None:
                self.take_slot(program.slot, sequence, operation, how)
            for action in program.before:
                action()
            fingerprint = reports.fingerprint(operation, meets)
            if meets:
                meet = self._meet or self._make_meet()
                meet(sequence, fingerprint, operation)
            else:
                self.backend.board.announce(sequence, fingerprint)
                reports.check_first(sequence, operation, fingerprint)
            self.execute(program, operation, sequence, how)
            if not meets:
                reports.check_same(sequence, operation, fingerprint)
        except BaseException as error:
            raise self.broke(error, operation, sequence, program, *memory) from error.__cause__

    def _make_meet(self) -> Callable[[int, int, str], None]:
        self._meet = meet = unbound_arrival(self)
        return meet

    def take_slot(self, slot: int, sequence: int, operation: str, how: str) -> None:
        """Wait until every rank has left the operation that used a slot last; record this use.

        A staging slot is shared memory through which private arrays are copied.
        """
        last, reached = self._slot_used[slot], self.backend.board.all_reached
        late = last and last >= self.met and not reached(last + 1)
        if late and not self.engine.wait(lambda: reached(last + 1), self.deadline()):
            raise self.timed_out(operation, last + 1, how)
        self._slot_used[slot] = sequence

    def execute(self, program: Program, operation: str, sequence: int, how: str) -> None:
        """Run the rounds of a program, blocking, after its operation has been announced.

        `how` names its executor or algorithm, for reports.
        """
        program.tags[0] = 0
        if program.named is not None:
            program.named.name(sequence, operation, self.backend.board.fingerprint(sequence))
        if program.interruptible:
            if not self.engine.run(program, self.deadline()):
                raise self.timed_out(operation, sequence, how)
            return
        if not self._guarded:
            self.guard()
        self.inside = sequence
        self.engine.run(program, None)
        self.inside = 0

    # -- deadlines ------------------------------------------------------------------------------

    def deadline(self, timeout: Any = UNSET) -> float | None:
        """Return the deadline (``time.monotonic``) of a wait that begins now; None for never."""
        seconds = self.timeout if timeout is UNSET else timeout
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise InvalidArgument(
                f"rank {self.backend.rank}: timeout={seconds!r}: expected seconds, or None"
            )
        return None if seconds is None else time.monotonic() + seconds

    def announce(self, fingerprint: int) -> int:
        """Announce this rank's arrival at its next operation; return the operation's number."""
        self.sequence = sequence = self.sequence + 1
        self.backend.board.announce(sequence, fingerprint)
        return sequence

    def guard(self) -> None:
        """Register this communicator with the watchdog, before a native call."""
        if not self._guarded:
            WATCHDOG.watch(self)
            self._guarded = True

    def arrive(
        self,
        sequence: int,
        operation: str,
        deadline: float | None,
        how: str = "waiting for all ranks",
    ) -> None:
        """Wait until all ranks have arrived: a native call cannot be interrupted later.

        All ranks wait, even if there is no deadline: a native call does not poll the operations in
        the background, and another rank may wait for one of them before it arrives.
        """
        if not self.engine.patiently(
            lambda until: self.backend.arrive(sequence, until, self.engine.background()), deadline
        ) or not self.start_natives(deadline):
            raise self.timed_out(operation, sequence, how)
        self.reports.check_arrived(sequence, operation, self.everyone)
        self.met = sequence

    def start_natives(self, deadline: float | None) -> bool:
        """Start the pending native calls of the background; return False past the deadline.

        Called when all ranks have reached a later operation, before that starts: the MPI library
        needs its calls in the same order on every rank.
        """
        return self._native.advance() or self.engine.wait(self._native.advance, deadline)

    def meet(self, operation: str, act: Callable[[], Any]) -> Any:
        """Run an uninterruptible collective action, such as a split, once all ranks have arrived.

        A backend without native calls runs it at once: its own waits have deadlines.
        """
        self.check_usable()
        found: list[Any] = []
        self.run(library_call(lambda: found.append(act())), operation, operation)
        return found[0]

    # -- set-up ---------------------------------------------------------------------------------

    def set_up(
        self, operation: str, act: Callable[[], Any], how: str = "set-up", same: str | None = None
    ) -> Any:
        """Run ``act()``, a set-up that may use :meth:`everyone`, once all ranks have arrived.

        Parameters
        ----------
        operation : str
            The user's call, for reports.
        act : callable
            The set-up; its errors are the same on every rank, except communication errors.
        how : str
            Name of the set-up, for reports.
        same : str, optional
            Text that the ranks compare instead of `operation`.
        """
        self.check_usable()
        meets = self.backend.native is not None  # other backends keep deadlines themselves
        sequence, before = 0, self._setting_up
        if meets:
            sequence = self.announce(self.reports.fingerprint(same or operation))
        self._setting_up = (operation, sequence)
        try:
            if meets:
                self.arrive(sequence, operation, self.deadline(), how)
            return act()
        except BaseException as error:
            alike = isinstance(error, MpidistError) and not isinstance(error, CommunicationError)
            if alike or isinstance(error, MemoryError):
                raise
            raise self.broke(error, operation, sequence) from error.__cause__
        finally:
            self._setting_up = before

    def everyone(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; collective.

        Past the deadline the report names the call that needs this exchange, not the exchange.
        """
        deadline, (operation, sequence) = self.deadline(), self._setting_up

        def wait(test: Callable[[], bool]) -> None:
            if not self.engine.wait(test, deadline):
                raise self.timed_out(operation, sequence or None, "set-up")

        return rendezvous.everyone(self.backend, value, wait)

    def timed_out(
        self, operation: str, sequence: int | None, how: str, timeout: Any = UNSET
    ) -> CollectiveTimeout:
        """Return the error to raise for an operation that has passed its deadline.

        `sequence` is its number (None for one without, such as a message); `how` names its executor
        or algorithm, or what it waits for.
        """
        seconds = self.timeout if timeout is UNSET else timeout
        return self.reports.timed_out(operation, sequence, how, seconds)

    @property
    def broken(self) -> str | None:
        """Why the communicator can no longer be used; None while it can."""
        return self.door.broken

    def check_usable(self) -> None:
        """Raise `CommunicatorBroken`, with the reason, if the communicator is broken or freed."""
        self.door.check()

    def broke(
        self,
        error: BaseException,
        operation: str,
        sequence: int | None,
        *memory: object,
        elsewhere: bool = True,
    ) -> BaseException:
        """Mark the communicator broken by an unfinished operation; return the error to raise.

        An error that every rank sees before any work is done leaves the communicator usable.

        Parameters
        ----------
        error : BaseException
            Why the operation did not finish.
        operation : str
            The operation, for reports.
        sequence : int or None
            Its number; None for one without, such as a message: this rank begins no further one.
        *memory : object
            Kept, as messages may still be stored there.
        elsewhere : bool
            Whether MPI may be called, to notify ranks of other nodes: not by a thread of its own.
        """
        known = self.broken is not None and isinstance(error, CommunicatorBroken)
        if known or getattr(error, "harmless", False):
            return error
        self.inside = 0
        self.engine.abandon()
        keep(memory)
        error = self.backend.translate(error)
        self.reports.notify(sequence, error, elsewhere)
        number = "" if sequence is None else f" (collective #{sequence})"
        self.door.close(
            f"the communicator is broken since {operation}{number} ended with "
            f"{type(error).__name__}: {error}; create a new one"
        )
        return error
