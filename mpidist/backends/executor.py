"""The interface of executors, which serve calls; a communicator has an ordered list of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..calls.call import Call
from ..schedule.registry import Choice
from .program import Program

MESSAGES = "messages"
"""The value of :attr:`Executor.memory` for schedules that only send messages."""


class Use(NamedTuple):
    """What a program is bound for; by default for one blocking run."""

    background: bool = False
    repeated: bool = False  # it will be kept and run again, so that more work in binding pays
    turn: int = 0  # its index among the `turns` programs of the call

    @property
    def persistent(self) -> bool:
        """Whether its messages are persistent requests: not in the background, as tags change."""
        return self.repeated and not self.background


ONCE = Use()


class Executor:
    """Interface of an executor, which serves calls: it binds each call to memory as a Program.

    A call is served by the executor that it names, or by that of the first rule of "auto" whose
    :meth:`why_not` returns None.  Subclasses define :meth:`why_not` and :meth:`bind`; the other
    members have defaults.  All ranks must choose the same executor for a call, so :meth:`why_not`
    must agree on them.  An executor that serves every call on one rank, by copying::

        class Alone(Executor):
            name, summary = "alone", "copies the input"

            def why_not(self, call, algorithm, background):
                return None if call.size == 1 and call.op else "needs one rank"

            def bind(self, call, choice, use=ONCE):
                return Program([Round((), None, (store(call.out, call.x),))])
    """

    name: str  # by which a call's ``algorithm=`` selects it
    summary: str  # how it works, for the table of ``comm.explain``
    ready: bool = True  # make_ready() has been called, or is not needed
    # The memory in which it runs the schedules that calls name: of schedule.memories.MEMORIES, or
    # MESSAGES; None if it runs none.
    memory: str | None = None
    on_device: bool = False  # serves calls with arrays on a GPU, instead of those on the host
    # Programs of a repeated call: operation number n runs program n % turns, so that consecutive
    # runs use different shared memory.
    turns: int = 1

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return why this executor cannot serve a call, as a sentence, or None if it can.

        `algorithm` is the schedule that the call names, asked only of an executor that runs
        schedules (see :attr:`memory`); else the call's ``algorithm=``: "auto", or an executor's
        name.
        """
        raise NotImplementedError

    def unknown(self, call: Call, choice: Choice, background: bool) -> str | None:
        """Return why ranks cannot know of each other whether they all can run a schedule, or None.

        "auto" does not choose such a schedule, which a call can name.  By default None.
        """
        return None

    def described(self) -> str:
        """Return how the executor works now, for ``comm.explain``; by default its `summary`."""
        return self.summary

    def schedules(self, collective: str) -> Sequence[Choice]:
        """Return the schedules of which the executor runs one for calls that give its own name.

        The cost model takes it to be as fast as the fastest of them.  By default there are none.
        """
        return ()

    def depends_on(self, call: Call) -> Hashable:
        """Return a key of further properties of a call on which :meth:`why_not` depends.

        The choice of an executor is cached by this key and by collective, size, dtype and
        operation, which need not be in the key.  By default None: there are no further properties.
        """
        return None

    def rivals(self, call: Call) -> Sequence[str]:
        """Return the executors that may be faster for a call that this one serves; alike on ranks.

        The first such call tries them out.  By default there are none.
        """
        return ()

    def make_ready(self) -> None:
        """Set the executor up, before the first call that it serves; collective.

        If that fails, :meth:`why_not` has a reason from then on.  By default nothing is done.
        """

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return text on how the call is served, which the ranks compare first; by default ""."""
        return ""

    def kind(self, call: Call) -> Hashable:
        """Return a key: calls with equal keys share one program; None if this call needs its own.

        A shared program has arrays of its own, to and from which each call's arrays are copied.
        That pays for a call whose arrays are copied in less time than a program is bound.  By
        default None.
        """
        return None

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Return the program of a call that this executor can serve, bound to the call's memory.

        `choice` is the schedule that the call names, or None.  The program must not keep the call's
        arrays alive: a cached program is dropped when they are garbage-collected.
        """
        raise NotImplementedError
