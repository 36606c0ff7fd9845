"""Background operations: starting them, and completing those without a waiting caller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..backends.executor import Executor, Use
from ..backends.program import Program
from ..backends.tags import tags_of
from ..calls.call import Call
from ..calls.prepare import Prepared
from ..selection.choose import Candidate
from .programs import Bound, CallKey, Programs, key_of, to_keep
from .repeated import served_by
from .run import Run
from .sequencer import Sequencer
from .work import UNSET, Work, sweep

Choose = Callable[[Call, str, bool], tuple[Executor, Candidate]]
Describe = Callable[[Call, Executor, Candidate, bool], str]
_BACKGROUND = Use(background=True)


class Background:
    """The background operations of one communicator; `works` are those that have not ended.

    `choose` and `describe` are those of the communicator's service.
    """

    def __init__(
        self, sequencer: Sequencer, programs: Programs, choose: Choose, describe: Describe
    ):
        self._sequencer, self._programs = sequencer, programs
        self._choose, self._describe = choose, describe
        self.works: set[Work] = set()
        self._begun = 0
        self._banks = tags_of(sequencer.backend.tag_limit).banks
        self._in_bank: dict[int, tuple[Run, int]] = {}  # with the number of its operation

    def begin(
        self,
        prepared: Prepared,
        algorithm: str,
        key: CallKey | None = None,
        x: Any = None,
        out: Any = None,
    ) -> Work:
        """Begin a call in the background; return its Work.

        By `key`, `x` and `out`, if given, :meth:`Programs.find` finds the call when it is repeated.
        """
        sequencer, call = self._sequencer, prepared.call
        sequencer.check_usable()
        executor, chosen = self._choose(call, algorithm, True)
        operation = self._describe(call, executor, chosen, True)
        bound: Bound | None = None
        if not call.on_device:
            address = ("background", *key_of(call, algorithm))
            bound = self._programs.get_or_bind(
                address, call, self._bind, executor, chosen, operation
            )
        if bound is not None:
            program = bound.program
        else:
            program = executor.bind(call, chosen.choice, _BACKGROUND)
            if program.begin is not None:  # of a GPU; its own calls are announced
                return program.begin(prepared.give)
        work = self._start(program, operation, chosen.name, prepared.give)
        if bound is not None and key is not None and prepared.gives(x, out):
            self._programs.repeat(key, call, bound, x, out)
        return work

    def _bind(self, call: Call, executor: Executor, chosen: Candidate, operation: str) -> Bound:
        """Bind a call for its repetition."""
        program = executor.bind(to_keep(call), chosen.choice, _BACKGROUND)
        door = self._sequencer.door

        def begin(result: Any) -> Work:
            with door:
                return self._start(program, operation, chosen.name, lambda: result)

        return Bound([program], begin, served=served_by(call, executor, chosen))

    def _start(self, program: Program, operation: str, how: str, give: Callable[[], Any]) -> Work:
        """Start a program as the next operation; return its Work, with result ``give()``."""
        sequencer = self._sequencer
        sequence = sequencer.sequence + 1
        try:
            if program.interruptible:
                self._take_bank(program, operation, how)
            for action in program.before:
                action()
            fingerprint = sequencer.begin(operation)
            if self.works:
                sweep(self.works)
            if program.queue is not None:
                check = partial(sequencer.reports.check_same, sequence, operation, fingerprint)
                done, end = program.queue(check)
                return self._queued(done, end, check, give, operation, sequence)
            if program.named is not None:
                program.named.name(sequence, operation, fingerprint)
            run = sequencer.engine.start(program)
            if program.interruptible:
                self._in_bank[program.bank[0]] = (run, sequence)
        except BaseException as error:
            raise sequencer.broke(error, operation, sequence) from error.__cause__
        return self._work(run.test, give, operation, sequence, how)

    def _work(
        self,
        poll: Callable[[], bool],
        give: Callable[[], Any],
        operation: str,
        sequence: int,
        how: str,
    ) -> Work:
        """Return the user's Work of a started program, polled by `poll`, with result ``give()``."""
        sequencer, door = self._sequencer, self._sequencer.door

        def test() -> bool:
            if door.broken is not None:
                door.check()
            try:
                return poll()
            except BaseException as error:
                raise sequencer.broke(error, operation, sequence) from error.__cause__

        def wait(test: Callable[[], bool], timeout: Any) -> None:
            if door.broken is not None:
                door.check()
            deadline = sequencer.deadline(timeout)
            try:
                # As a short operation has often ended by now, nothing is prepared for a wait.
                if not test() and not sequencer.engine.wait(test, deadline):
                    raise sequencer.timed_out(operation, sequence, how, timeout)
            except BaseException as error:
                raise sequencer.broke(error, operation, sequence) from error.__cause__

        return Work(test, wait, give, self.works, door=door)

    def _queued(
        self,
        done: Callable[[], bool],
        end: Callable[[], Any],
        check: Callable[[], Any],
        give: Callable[[], Any],
        operation: str,
        sequence: int,
    ) -> Work:
        """Return the user's Work of a run on a stream; the first three are of ``Program.queue``.

        Its ``wait()`` lets streams wait and not the host, so it never times out; but it raises, as
        every poll does, once another rank has announced a different call.
        """
        sequencer = self._sequencer

        def compare() -> None:
            sequencer.check_usable()
            try:
                check()
            except BaseException as error:
                raise sequencer.broke(error, operation, sequence) from error.__cause__

        def test() -> bool:
            compare()
            return done()

        def ended() -> Any:
            end()
            return give()

        return Work(test, lambda test, timeout: compare(), ended, door=sequencer.door)

    def _take_bank(self, program: Program, operation: str, how: str) -> None:
        """Assign a bank (a numbered range of message tags) to a program; the same on all ranks.

        If a pending program uses the bank, this method waits until it has ended.  It is called
        before the program's first action, because kernels in shared memory synchronise the ranks by
        words in shared memory that belong to the bank too.
        """
        # All ranks begin the same operations in the same order, so they count alike.  Waiting for a
        # bank cannot deadlock: its operation was begun earlier, every wait polls all that this rank
        # has begun, and so the oldest pending operation always advances.
        sequencer = self._sequencer
        self._begun += 1
        bank = 1 + self._begun % self._banks
        before, number = self._in_bank.get(bank, (None, 0))
        if before is not None and not sequencer.engine.wait(before.test, sequencer.deadline(UNSET)):
            raise sequencer.timed_out(operation, number, how)
        self._in_bank = {s: r for s, r in self._in_bank.items() if not r[0].done}
        program.bank[0] = bank

    def finish(self) -> None:
        """Wait for all pending operations."""
        for work in list(self.works):
            work.complete()
