"""The interface of executors, which serve calls; a communicator has an ordered list of them."""

from __future__ import annotations

from collections.abc import Hashable

from ..calls.call import Call
from ..schedule.registry import Choice
from .program import Program


class Executor:
    """Interface of an executor: a call is served by the first in the list that is able to.

    Subclasses define :meth:`why_not` and :meth:`bind`; the other members have defaults.  All
    answers must be the same on every rank.

    Attributes
    ----------
    name : str
        The name by which a call's ``algorithm=`` selects the executor.
    summary : str
        How the executor works, for the list of ``explain``.
    ready : bool
        Whether :meth:`make_ready` has been called, or is not needed.
    turns : int
        Number of programs among which the runs of a call alternate, by the operation's number.

    Examples
    --------
    An executor that serves every call on one rank, by copying::

        class Alone(Executor):
            name, summary = "alone", "copies the input"

            def why_not(self, call, background):
                return None if call.size == 1 and call.op else "needs one rank"

            def bind(self, call, choice, *, background=False, repeated=False, turn=0):
                return Program([Round((), None, (store(call.out, call.x),))])
    """

    name: str
    summary: str
    ready: bool = True
    turns: int = 1

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return why this executor cannot serve a call, as a sentence, or None if it can."""
        raise NotImplementedError

    def depends_on(self, call: Call) -> Hashable:
        """Return a key of further properties of a call on which :meth:`why_not` depends.

        Collective, size, dtype and operation need not be in it.
        """
        return None

    def make_ready(self) -> None:
        """Set the executor up, before the first call that it serves; collective.

        If that fails, :meth:`why_not` has a reason from then on.
        """

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return further text that must be equal on all ranks; empty if there is none."""
        return ""

    def kind(self, call: Call) -> Hashable:
        """Return the key of calls that may share one program; None if this call needs its own.

        A shared program copies the calls' arrays to and from its own, which pays for calls whose
        arrays are copied in less time than a program is bound.
        """
        return None

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Return the program of a call that this executor can serve, bound to the call's memory.

        Parameters
        ----------
        call : Call
            The call.
        choice : Choice or None
            The algorithm, for the executor of algorithms.
        background : bool
            Whether the program is to run in the background.
        repeated : bool
            Whether the program will be kept and run again, so that more work in binding pays.
        turn : int
            Number of the program among the `turns`, from 0.

        Returns
        -------
        Program
            It must not keep the call's arrays alive: it is dropped when they die.
        """
        raise NotImplementedError
