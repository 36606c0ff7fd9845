"""The door of a communicator: its own process may enter, and one caller at a time.

The ranks number their operations, and take staging slots by these numbers.  A caller that enters
while another is inside (another thread, a signal handler, the user's operation of the call that
runs) would take a slot that is still read, and a forked child would announce operations in its
parent's place: both end in wrong results without a word.  So they are refused.

But a communicator may be shared by threads (:func:`share`), as PyTorch's users do with a group's
messages: then they wait for each other, and a wait for a message lets others in between its polls.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import math
import os
import re
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

from ..errors import CommunicatorBroken, CommunicatorInUse, RankFailed
from .call_site import PACKAGE, WITHIN

_LOOKS = 20  # for the caller inside, before another one is refused without its name
_NAP_SECONDS = 1e-4  # between these, and of a caller that waits


class _Token:
    """The right to be inside: one for each open door.

    A caller whose frame ends without a word, since an exception such as KeyboardInterrupt struck
    between its entry and the block that leaves, drops the token, and so gives it back.
    """

    __slots__ = ("_door",)

    def __init__(self, door: Door):
        self._door = weakref.ref(door)

    def __del__(self) -> None:
        door = self._door()
        if door is not None and door.broken is None:
            door.put(_Token(door))


class Door:
    """Admits one caller at a time to a communicator, until that is broken or freed.

    A repeated call enters and leaves by :attr:`take` and :attr:`put` themselves, about 40 ns; all
    others by ``with door:``, or, for a pending operation, by :meth:`enter_pending`.  If the token
    is gone, ``take()`` raises IndexError: then call :meth:`take_or_refuse`.  ``put(token)`` leaves
    a door that is not `broken`.
    """

    # To take the one element of a list is atomic: of two threads one gets it.

    def __init__(self, rank: int):
        self._rank = rank
        self.broken: str | None = None  # why nobody may enter any more
        self.loss: RankFailed | None = None  # the error, if that is the loss of a rank
        self._tokens = [_Token(self)]
        self._pop = self._tokens.pop
        self.take: Callable[[], _Token] = self._pop
        self.put = self._tokens.append
        self._held: _Token | None = None  # by the caller in ``with door:``
        self.forked = False  # whether this process is a child of the communicator's own
        # Seconds for which a caller waits while another thread is inside; None: for ever.
        self.patience: float | None = 0.0
        self._wanted: list[None] = []  # one for each caller that waits; to append is atomic
        _watch_forks()  # only once there is something to protect: the import installs nothing
        _doors.add(self)

    def before(self, act: Callable[[], object] | None) -> None:
        """Call ``act()`` in each call that enters, and in no poll; before the first is bound."""
        pop = self._pop
        if act is None:
            self.take = pop
            return

        def take() -> _Token:
            token = pop()
            act()
            return token

        self.take = take

    def close(self, reason: str, loss: RankFailed | None = None) -> None:
        """Let nobody enter from now on, for the latest `reason`, in a forked child for the fork.

        `loss` is the error if the reason is the loss of a rank.
        """
        if not self.forked:
            self.broken, self.loss = reason, loss
            self._tokens.clear()

    def check(self) -> None:
        """Raise `CommunicatorBroken` if the door was closed, or `RankFailed` if by a loss."""
        if self.broken is not None:
            text, loss = f"rank {self._rank}: {self.broken}", self.loss
            if loss is not None:
                raise RankFailed(text, ranks=loss.ranks, reasons=loss.reasons) from None
            raise CommunicatorBroken(text) from None

    def __enter__(self) -> None:
        try:
            self._held = self.take()
        except IndexError:
            self._held = self.take_or_refuse()

    def __exit__(self, *_: object) -> None:
        token, self._held = self._held, None
        if self.broken is None and token is not None:  # as leave(), without a call
            self.put(token)

    def enter_pending(self) -> _Token | None:
        """Enter for the poll or wait of a pending operation; return what :meth:`leave` takes.

        Messages may complete after the communicator broke: then there is nothing to enter.
        """
        try:
            return self._pop()
        except IndexError:
            if self.broken is not None and not self.forked:
                return None
            return self.take_or_refuse()

    def leave(self, token: _Token | None) -> None:
        """Let the next caller enter, unless the door was closed meanwhile."""
        if self.broken is None and token is not None:
            self.put(token)

    def give_way(self, held: list[_Token | None]) -> None:
        """Let callers in that wait, and enter again, in a wait for a pending operation.

        `held` has what :meth:`enter_pending` returned, and nothing after an exception.
        """
        if not self._wanted or held[0] is None:
            return
        self.leave(held.pop())
        while self._wanted and self._tokens:  # until one of them has it
            time.sleep(_NAP_SECONDS)
        held.append(self._await(None))

    def _await(self, seconds: float | None) -> _Token | None:
        """Return the token once another thread has left; None if `seconds` pass before."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        self._wanted.append(None)
        try:
            while time.monotonic() < until:
                self.check()
                try:
                    return self.take()
                except IndexError:
                    time.sleep(_NAP_SECONDS)
            return None
        finally:
            self._wanted.pop()

    def take_or_refuse(self) -> _Token:
        """Return the token for a caller who found it gone, once it is there again.

        That is waited for if the door has `patience`, and another thread is inside, not this one.
        Else CommunicatorInUse is raised, which names both places; or CommunicatorBroken, if the
        communicator is broken or freed, or this process was forked.
        """
        call = self._refuse_within(sys._getframe(1))
        if self.patience != 0:
            token = self._await(self.patience)
            if token is not None:
                return token
        me = threading.current_thread().name
        # Whoever was inside may leave meanwhile; then nobody is seen inside, and the token is back.
        for _ in range(_LOOKS):
            others = _calls_of_other_threads()
            self.check()
            try:
                return self.take()
            except IndexError:
                if others:
                    raise CommunicatorInUse(
                        f"rank {self._rank}: {call} was called in thread {me!r} while thread "
                        f"{' or thread '.join(others)} of the same communicator, which serves one "
                        "call at a time: give each thread a communicator of its own "
                        "(comm.split(0)), or make all calls in one thread"
                    ) from None
                time.sleep(_NAP_SECONDS)
        raise CommunicatorInUse(
            f"rank {self._rank}: another call of the same communicator has not ended"
        ) from None

    def _refuse_within(self, frame: FrameType) -> str:
        """Raise if the door is closed or this thread is inside; return the call of `frame`."""
        self.check()
        frames = list(_outwards(frame))
        places = [Place(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
        # The frames up to the first of the user are this refused call's.
        own = next((i for i, place in enumerate(places) if not place.within), len(places))
        call = _call(places)
        for i, place in enumerate(places[own:], own):
            if place.within and self._serves(frames[i]):
                raise CommunicatorInUse(
                    f"rank {self._rank}: {call} was called inside {_call(places[i:])} of the same "
                    "communicator: what interrupts a call (an operation of your own, a signal "
                    "handler, a hook, __del__) must not call the communicator; set a flag, and "
                    "make the call afterwards"
                ) from None
        return call

    def _serves(self, frame: FrameType) -> bool:
        """Return whether a frame of the package works for this door's communicator."""
        for name in ("self", "sequencer", "door"):
            found = frame.f_locals.get(name)
            parts = ("door", "_door", "sequencer", "_sequencer", "_service", "owner")
            for thing in (found, *(getattr(found, part, None) for part in parts)):
                sequencer = getattr(thing, "sequencer", None)
                doors = thing, getattr(thing, "door", None), getattr(sequencer, "door", None)
                if any(door is self for door in doors):
                    return True
        return False


def share(communicator: Any, seconds: float | None) -> None:
    """Let threads share a communicator: for `seconds` (None: for ever) a call waits for another.

    The calls of two threads then come in any order, so it must not matter: this is for messages.
    """
    communicator._door.patience = seconds


_doors: weakref.WeakSet[Door] = weakref.WeakSet()
_forked_from = ""
_parent = 0


def forked_from() -> str:
    """Return "process PID" of the rank that this process was forked from, for error messages.

    It is "" if this process was not forked.  Only forks after the first communicator was made, in
    processes that loaded MPI, are noticed.
    """
    return _forked_from


class Place(NamedTuple):
    """A frame of a stack: the file, the line, the function."""

    file: str
    line: int
    function: str

    @property
    def within(self) -> bool:
        """Whether the file is of this package."""
        return self.file.startswith(PACKAGE)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _call(places: list[Place]) -> str:
    """Return "NAME (FILE:LINE)" of a call, from its frames outwards.

    The name is that of the package's outermost function, which the user called; the place is that
    of the innermost frame which is the user's, not a library's wrapper.
    """
    until = next((i for i, place in enumerate(places) if not place.within), len(places))
    names = [place.function for place in places[:until]]
    name = names[-1] if names else "a call"
    if names[-1:] == ["begin"]:  # of communicator.begun
        name = f"i{names[-2]}"
    user = next((place for place in places[until:] if not WITHIN[place.file]), None)
    return f"{name} ({'?' if user is None else f'{user.file}:{user.line}'})"


_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+).*\n", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_INSIDE = tuple(f"{PACKAGE}{room}{os.sep}" for room in ("communicator", "engine", "gpu"))
_NOT_INSIDE = (__file__, f"{PACKAGE}engine{os.sep}watchdog.py")


def _calls_of_other_threads() -> list[str]:
    """Return "NAME is in CALL" of each other thread that is in a communicator, any one.

    faulthandler writes the stacks at once.  Where Python code walks from frame to frame, the thread
    goes on meanwhile, and CPython 3.11 reads freed memory: a crash in one of 600 refusals.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        _, *stacks = _THREAD.split(file.read())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    calls = []
    for ident, stack in zip(stacks[::2], stacks[1::2]):
        thread = int(ident, 16)
        places = [Place(file, int(line), name) for file, line, name in _FRAME.findall(stack)]
        # Innermost in this file is who waits to enter.
        if not places or thread == threading.get_ident() or places[0].file in _NOT_INSIDE:
            continue
        inside = (i for i, place in enumerate(places) if place.file.startswith(_INSIDE))
        first = next(inside, None)
        if first is not None and places[first].file not in _NOT_INSIDE:
            calls.append(f"{names.get(thread)!r} is in {_call(places[first:])}")
    return calls


# -- processes ------------------------------------------------------------------------------------


@cache
def _watch_forks() -> None:
    os.register_at_fork(before=_about_to_fork, after_in_child=_in_child)


def _about_to_fork() -> None:
    global _parent
    _parent = os.getpid()


def _in_child() -> None:
    """Close all doors in a forked child, and end it without MPI, which belongs to its parent."""
    global _forked_from
    for door in list(_doors):
        door.close(  # in a grandchild, too, the reason names the rank's process
            f"this process ({os.getpid()}) was forked from process {_parent}, to which rank "
            f"{door._rank} of the communicator belongs: make the call there, or exchange data with "
            "it by a pipe"
        )
        door.forked = True
    if "mpi4py.MPI" in sys.modules:
        if not _forked_from:
            end_without_mpi()
        _forked_from = _forked_from or f"process {_parent}"


def end_without_mpi() -> None:
    """Let this forked child end before mpi4py calls MPI_Finalize, which would wait or crash.

    As a child of multiprocessing does, it skips the exit functions of its parent; those that it has
    registered itself run.  The exit code is kept where it is known here: after ``sys.exit``,
    ``exit``, an exception; not after a ``raise SystemExit(n)`` of the program's own, which gives 0.
    """
    status: list[Any] = [0]
    leave, hook = sys.exit, sys.excepthook

    def leaving(code: Any = None, /) -> None:
        status[0] = code
        leave(code)

    def failing(kind: Any, error: Any, trace: Any) -> None:
        status[0] = 1
        hook(kind, error, trace)

    @atexit.register
    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # None, or closed
                pass
        code = status[0]
        os._exit(code & 0xFF if isinstance(code, int) else 0 if code is None else 1)

    sys.exit, sys.excepthook = leaving, failing  # type: ignore[assignment]
    for name in ("exit", "quit"):  # of the module site
        if hasattr(builtins, name):
            setattr(builtins, name, leaving)
