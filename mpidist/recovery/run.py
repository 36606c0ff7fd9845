"""``md.elastic``: a training function that runs again, on other ranks, when one of them is lost."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, overload

import numpy as np

from ..arguments import whole
from ..backends import recorder
from ..communicator import launch, layers
from ..communicator.communicator import Communicator
from ..communicator.launcher_notes import SPARE
from ..errors import (
    CommunicationError,
    InvalidArgument,
    LaunchError,
    RankFailed,
    ReplicasDiffer,
)
from ..measure import counted, format_time, plural
from ..stop import Stopped, in_elastic
from . import records
from .state import State

log = logging.getLogger("mpidist")
Train = Callable[..., Any]
NAP = 5e-3  # seconds between two looks of a spare
KNOWN_WITHIN = 1.0  # seconds from an error until it is known whether a rank is lost
_ENDED = 77  # tag of the message that ends the wait of a spare: what it has is the exit code of
_GOES_ON, _EXITED = -1, -2  # StopRequest.leave(), or says that the program goes on or has ended
_trainings = itertools.count(1)  # of this program: the same on all ranks, and in each start
# All ranks after a call in which some were lost, how many of them train, and this one's number.
_left: tuple[Communicator, int, int | None] | None = None


@overload
def elastic(train: Train) -> Train: ...


@overload
def elastic(*, min_ranks: int = 1) -> Callable[[Train], Train]: ...


def elastic(train: Train | None = None, *, min_ranks: int = 1) -> Any:
    """Decorate a training function, which then goes on when a rank is lost.

    The function is called with a communicator and a :class:`State`; who calls it passes the state
    alone.  When a rank is lost it is left by an exception, and called again with a communicator of
    the ranks that go on, and the state of the last commit::

        @md.elastic
        def train(comm, state):
            model = md.DDP(net, comm)
            data = state.keep("data", md.shard(samples, comm, shuffle=True))
            while data.epoch < 10:
                for x, y in data:
                    ...
                    optimizer.step()
                    state.commit()

        train(md.State(net=net, optimizer=optimizer))

    If ``mpidist run --spares N`` has started spare ranks, they wait in this call, and one takes the
    place of a lost rank: then the bits are those of a run without a loss.  Else the others go on
    as fewer ranks.

    Parameters
    ----------
    train : callable
        The function ``train(comm, state, …)``.  Communicators, and what holds one, are made in it.
    min_ranks : int
        Least number of ranks on which training goes on.

    Returns
    -------
    callable
        ``train(state, …)``, collective; it returns what the function returns, on a spare that
        was not needed None.

    Raises
    ------
    InvalidArgument
        If the first argument is not a State, or `min_ranks` is wrong.
    RankFailed
        If a rank is lost, and this launch does not let the others go on, or fewer than `min_ranks`
        are left.
    """
    whole("min_ranks", min_ranks, 1)

    def decorated(function: Train) -> Train:
        if not callable(function):
            raise InvalidArgument(f"elastic: {function!r}: expected a function train(comm, state)")

        @wraps(function)
        def run(state: State, *arguments: Any, **options: Any) -> Any:
            if not isinstance(state, State):
                raise InvalidArgument(
                    f"{getattr(function, '__name__', 'train')}: the first argument has type "
                    f"{type(state).__name__}: expected a State, such as md.State(net=net)"
                )
            return _Job(state, min_ranks).run(
                lambda comm: function(comm, state, *arguments, **options)
            )

        return run

    return decorated if train is None else decorated(train)


class _Job:
    """All ranks of an elastic job, in one generation after another.

    `world` are all ranks that are alive, spares too; `comm` those that train, in the order of their
    numbers; `number` is this rank's among them.  On a spare the last two are None.
    """

    def __init__(self, state: State, min_ranks: int):
        self.state, self.min_ranks = state, min_ranks
        launch.ends_alone = None  # the exit of a training before was caught
        self.training = state.training = next(_trainings)
        self.number: int | None
        if _left is None:
            self.world, spares = launch.start_elastic()
            self.size = self.world.size - spares
            self.number = self.world.rank if self.world.rank < self.size else None
        else:  # by a call before, with a loss: MPI's own world is of no use any more
            world, self.size, self.number = _left
            again = layers.over(world, range(world.size))
            assert again is not None
            self.world = again
        if not min_ranks <= self.size:
            raise InvalidArgument(f"min_ranks={min_ranks}: expected at most {self.size}, the ranks")
        self.comm: Communicator | None = None
        self.lost: dict[int, str] = {}  # in the last change, by number
        self.measured: Any = None  # by the communicator before
        self._failed: list[int] = []  # ranks that an exception ended, in the last change
        self.generation = 0
        self._since = 0.0
        # The ranks of the world that train; None while the numbers are dealt, by all ranks.
        self._members: list[int] | None = None
        self.why_not = self.world.backend.why_no_survivors() if self.world.size > 1 else "one rank"
        alone = self.world.size == 1 or records.folder() is not None  # or it is started again
        if self.why_not and not alone and self.world.rank == 0:
            log.warning(
                "md.elastic: the job ends when a rank is lost: %s; mpidist run --max-restarts K "
                "starts it again, from memory",
                self.why_not,
            )

    def run(self, train: Callable[[Communicator], Any]) -> Any:
        """Run the function until it has ended on all ranks; return what it returns."""
        global _left
        in_elastic.append(self)
        try:
            while True:
                try:
                    self._deal()
                    result = self._wait() if self.number is None else self._train(train)
                    if self.why_not or self._vote(True):
                        if self.generation:
                            _left = self.world, self.size, self.number
                        if isinstance(result, Stopped):
                            result.announce()
                            raise result
                        return result
                    self._recover()  # another rank has met a loss before it came here
                except Exception as error:
                    self._end_if_at_fault(error)
                    if not self._is_loss(error):
                        raise
                    self._leave(error)
                    self._vote(False)
                    self._recover()
        finally:
            in_elastic.remove(self)
            self.state.end()

    # -- a generation ------------------------------------------------------------------------------

    def _deal(self) -> None:
        """Deal the numbers of lost ranks to spares, and form the communicator of who trains."""
        # Five ranks of which the last is a spare, before and after rank 1 is lost::
        #
        #     world     0  1  2  3  4        0     1  2  3
        #     number    0  1  2  3  -        0     2  3  1
        #
        # Without a spare the numbers 0 2 3 become 0 1 2.
        _phase("deals the numbers")
        self._members = None
        told = layers.everyone(self.world, (self.number, self._failed, self.lost))
        numbers, all_failed, losts = zip(*told)
        failed: list[int] = next(filter(None, all_failed), [])
        if failed:  # other ranks may fail alike
            raise _ended(
                f"{plural(len(failed), 'rank')} {', '.join(map(str, failed))} ended by an "
                "exception while another was lost"
            )
        if self.generation and all(number is None for number in numbers):
            # All that had begun are lost: by exit codes they have given up, and not by an accident.
            whys = [" ".join(lost.get(r, "") for lost in losts) for r in set().union(*losts)]
            if whys and all("exit code" in why for why in whys):
                raise _ended(f"all ranks have ended: {self._who()}")
        free = sorted(set(range(self.size)) - set(numbers))
        spares = [r for r, number in enumerate(numbers) if number is None]
        holder = {number: r for r, number in enumerate(numbers) if number is not None}
        holder |= dict(zip(free, spares))
        members = [holder[number] for number in sorted(holder)]
        if len(members) < self.min_ranks:
            left = f"{counted(len(members), 'rank')} {'is' if len(members) == 1 else 'are'} left"
            raise _ended(f"{left}, min_ranks={self.min_ranks}")
        self.size, here = len(members), self.world.rank
        self.number = members.index(here) if here in members else None
        all_of_them = members == list(range(self.world.size))
        self.comm = self.world if all_of_them else layers.over(self.world, members)
        self._members = members

    def _train(self, train: Callable[[Communicator], Any]) -> Any:
        """Call the function, and tell the spares when it has ended on all ranks.

        Return what it returns, or the request by which all ranks have left it.
        """
        comm = self.comm
        assert comm is not None
        launch.take_place(comm)
        _phase("restores the state of the last commit" if self.generation else "begins")
        known = self.state.begin(comm, self.lost, self.measured)
        if self._since and comm.rank == 0:
            log.warning(
                "%s: step %d goes on with %s after %s%s",
                *(
                    self._who() or "a rank was lost",
                    self.state.step + 1,
                    counted(comm.size, "rank"),
                ),
                format_time(time.perf_counter() - self._since),
                "" if known else ": none of those that are left had begun, so training begins anew",
            )
        self._since = 0.0
        _phase("trains")
        try:
            result = train(comm)
        except Stopped as end:
            _forget(end)  # its frames hold this generation, and another one may follow
            result = end
        except SystemExit as end:
            if end.code is None or (isinstance(end.code, int) and not end.code):
                self._tell_spares(_EXITED)
            elif not self.why_not:  # by another code this rank is lost, and the others go on
                launch.ends_alone = (end.code & 0xFF if isinstance(end.code, int) else 0) or 1
            raise
        comm.barrier()
        self._tell_spares(result.status if isinstance(result, Stopped) else _GOES_ON)
        return result

    def _tell_spares(self, how: int) -> None:
        """Tell the spares, on the first rank, how training has ended: they would wait for ever."""
        assert self.comm is not None and self._members is not None
        if self.comm.rank == 0:
            note = np.full(1, how, np.int64)
            for spare in sorted(set(range(self.world.size)) - set(self._members)):
                self.world.send(note, spare, tag=_ENDED)

    def _wait(self) -> Stopped | None:
        """Wait, as a spare, until training has ended; RankFailed if a rank is lost.

        Return the request by which all ranks have left it, if they have; SystemExit if the others
        have left the program by ``sys.exit()``.
        """
        _phase(SPARE)
        self._since = 0.0  # the others train: the next loss is another one
        world, members, note = self.world, self._members, np.zeros(1, np.int64)
        assert members is not None
        ended = world.irecv(note, members[0], tag=_ENDED)
        while not ended.test():
            lost = self._lost()
            if lost:
                raise RankFailed(f"rank {world.rank}: a rank is lost", ranks=tuple(lost))
            time.sleep(NAP)
        how = int(note[0])
        if how == _EXITED:
            raise SystemExit
        return None if how == _GOES_ON else Stopped(how)

    def _who(self) -> str:
        """Return as text who was lost in the last change, and how."""
        return "; ".join(f"rank {rank} {why}" for rank, why in sorted(self.lost.items()))

    # -- a loss ------------------------------------------------------------------------------------

    def _end_if_at_fault(self, error: Exception) -> None:
        """End this process as a lost rank if it computes wrongly: the others go on without.

        Not where the others would restore a copy, of which a share is this rank's.
        """
        at_fault = isinstance(error, ReplicasDiffer) and error.at_fault
        if at_fault and not self.why_not and not self.state.copies:
            log.error("%s; this rank ends", error)
            logging.shutdown()
            sys.stdout.flush()
            os._exit(1)

    def _is_loss(self, error: Exception) -> bool:
        """Return whether a rank is lost, by which any call may have ended in an error."""
        if self.why_not or getattr(error, "echo", False):
            return False
        until = time.monotonic() + KNOWN_WITHIN
        # LaunchError: a vault was not to be opened, as that of a rank which just ends.
        # ReplicasDiffer: the rank at fault ends itself.  One that is known to is waited for.
        if isinstance(error, ReplicasDiffer) and error.another_is and not self.state.copies:
            until = time.monotonic() + (self.world.timeout or math.inf)
        kinds = (CommunicationError, LaunchError, RuntimeError, ReplicasDiffer)
        follows = isinstance(error, kinds)
        # Of a lost spare a rank that has dealt the numbers hears by others alone, which have not.
        while not (self.world.backend.lost() if follows else self._lost()):
            if not follows or time.monotonic() > until:
                return False
            time.sleep(1e-3)
        # What ends by an exception would be raised by others, too: the job ends.
        return not any(map(self.world.backend.raised, self._lost()))

    def _lost(self) -> dict[int, str]:
        """Return the lost ranks of those that train: a spare is needed in the deal only."""
        lost, members = self.world.backend.lost(), self._members
        return {r: why for r, why in lost.items() if members is None or r in members}

    def _leave(self, error: Exception) -> None:
        """Let the calls of all ranks end, and free what belongs to this generation."""
        self._since = self._since or time.perf_counter()
        _phase("leaves its calls, as a rank is lost")
        if not isinstance(error, (CommunicationError, RuntimeError)):
            log.warning("rank %d: %s: %s", self.world.rank, type(error).__name__, error)
        self.world.backend.leave_all()
        _forget(error)

    def _vote(self, ended: bool) -> bool:
        """Return whether training has ended on all ranks; collective.

        Each rank votes once in a generation, whether it has met a loss or the end: so that none
        leaves while another one needs it.
        """
        _phase("waits for the others, as training has ended" if ended else "waits for the others")
        return self.world.backend.vote(ended, self.world.timeout)

    def _recover(self) -> None:
        """Leave this generation, and form the world of the ranks that are left; collective."""
        self._since = self._since or time.perf_counter()
        _phase("forms the world of the ranks that are left")
        comm = self.comm
        self.measured = layers.known(comm) if comm is not None and self.number is not None else None
        for ddp in self.state.leave():
            ddp.abandon()
        self.comm = None
        made = self.world.survivors()
        # Only now: what this rank waited for there may have been one that ends by an exception.
        lost = self._lost()
        self._failed = [r for r in lost if self.world.backend.raised(r)]
        if self._members is not None:  # else whoever is lost had no number yet
            members = self._members
            self.lost = {members.index(r): why for r, why in lost.items()}
        self.world = made
        self.generation += 1


def _ended(why: str) -> RankFailed:
    """Return the error that ends the job, which is no loss that the others survive."""
    error = RankFailed(f"md.elastic: {why}")
    error.echo = True
    return error


def _phase(what: str) -> None:
    """Record what this rank does, for the timeline of a loss."""
    recorder.phase("md.elastic", what)


def _forget(error: BaseException) -> None:
    """Free what the frames of an exception hold: wrappers with callbacks, memory of the loss."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            with suppress(RuntimeError):  # a frame that runs
                traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]
            one.__traceback__ = None
    gc.collect()
