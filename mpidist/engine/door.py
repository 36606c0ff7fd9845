"""The door of a communicator: its own process may enter, and one caller at a time.

The ranks number their operations, and take staging slots by these numbers.  A caller that enters
while another is inside (another thread, a signal handler, the user's operation of the call that
runs) would take a slot that is still read, and a forked child would announce operations in its
parent's place: both end in wrong results without a word.  So they are refused.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from ..errors import CommunicatorBroken, CommunicatorInUse
from .call_site import PACKAGE, WITHIN

_doors: weakref.WeakSet[Door] = weakref.WeakSet()
_LOOKS = 20  # for a caller inside, before a token counts as lost
_PROCESS = {"forked from": ""}  # in a forked child, which process it was forked from


class Door:
    """Admits one caller at a time to a communicator, until that is broken or freed.

    A repeated call enters and leaves by :attr:`take` and :attr:`put` themselves, about 40 ns; all
    others by ``with door:``.

    Parameters
    ----------
    rank : int
        The communicator's rank, for messages.

    Attributes
    ----------
    broken : str or None
        Why nobody may enter any more.
    take, put : callable
        ``take()`` enters, or raises IndexError if the token is gone: then call :meth:`refuse`.
        ``put(None)`` leaves; :meth:`leave` does so after an error.
    """

    # To take the one element of a list is atomic: of two threads one gets it.

    def __init__(self, rank: int):
        self._rank, self.broken = rank, None  # type: int, str | None
        self._tokens: list[None] = [None]
        self.take, self.put = self._tokens.pop, self._tokens.append
        if not _doors:
            # Only once there is something to protect: importing the package installs nothing.
            _install()
        _doors.add(self)

    def close(self, reason: str) -> None:
        """Let nobody enter from now on; the callers' error gives the `reason`."""
        self.broken = reason
        self._tokens.clear()

    def check(self) -> None:
        """Raise `CommunicatorBroken`, with the reason, if the door was closed."""
        if self.broken is not None:
            raise CommunicatorBroken(f"rank {self._rank}: {self.broken}") from None

    def __enter__(self) -> None:
        try:
            self.take()
        except IndexError:
            self.refuse()

    def __exit__(self, *_: object) -> None:
        if self.broken is None and not self._tokens:  # as leave(), without a call
            self.put(None)

    def pending(self) -> AbstractContextManager[None]:
        """Return the door for the poll or wait of a pending operation.

        Messages may complete after the communicator broke: then there is nothing to enter.
        """
        return self if self.broken is None or forked_from() else nullcontext()

    def leave(self) -> None:
        """Let the next caller enter, unless the door was closed meanwhile."""
        if self.broken is None and not self._tokens:
            self.put(None)

    def refuse(self) -> None:
        """Raise the error of a caller who finds the token gone.

        It returns if nobody is inside: an exception, such as KeyboardInterrupt, struck a caller
        between its entry and the protected block.  Then this caller has entered.

        Raises
        ------
        CommunicatorBroken
            If the communicator is broken or freed, or this process was forked.
        CommunicatorInUse
            If another thread is inside, or this one; it names both places.
        """
        # Whoever was inside may have left by now, and even be inside again: only a token that stays
        # away while nobody is seen inside was lost.
        for _ in range(_LOOKS):
            self._refuse_beside_another(sys._getframe(1))
            try:
                return self.take()
            except IndexError:
                time.sleep(1e-4)

    def _refuse_beside_another(self, frame: FrameType) -> None:
        """Raise if the door is closed or somebody is inside; `frame` is the caller's."""
        self.check()
        mine = list(_outwards(frame))
        me = threading.get_ident()
        # My own frames up to the first of the user are this refused call's.
        own = next((i for i, frame in enumerate(mine) if not _within(frame)), len(mine))
        what, where = _name(mine[:own]), _place(mine[own:])
        inside = self._held(mine[own:])
        if inside:
            raise CommunicatorInUse(
                f"rank {self._rank}: {what} ({where}) was called inside {inside} of the same "
                "communicator: what interrupts a call (an operation of your own, a signal "
                "handler, a hook, __del__) must not call the communicator; set a flag, and make "
                "the call afterwards"
            ) from None
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, other in sys._current_frames().items():
            inside = "" if ident == me else self._held(list(_outwards(other)))
            if inside:
                raise CommunicatorInUse(
                    f"rank {self._rank}: {what} ({where}) was called in thread {names.get(me)!r} "
                    f"while thread {names.get(ident)!r} is in {inside} of the same communicator, "
                    "which serves one call at a time: give each thread a communicator of its own "
                    "(comm.split(0)), or make all calls in one thread"
                ) from None

    def _held(self, frames: list[FrameType]) -> str:
        """Return the call that holds this door, and where it was made; "" if none of `frames`."""
        for i, frame in enumerate(frames):
            if not _within(frame) or not self._serves(frame):
                continue
            last = next((j for j in range(i, len(frames)) if not _within(frames[j])), len(frames))
            return f"{_name(frames[i:last])} ({_place(frames[last:])})"
        return ""

    def _serves(self, frame: FrameType) -> bool:
        """Return whether a frame of the package works for this door's communicator."""
        for name in ("self", "service", "door"):
            found = frame.f_locals.get(name)
            for thing in (
                found,
                *(getattr(found, n, None) for n in ("door", "service", "_service")),
            ):
                if thing is self or getattr(thing, "door", None) is self:
                    return True
        return False


def forked_from() -> str:
    """Return which process this one was forked from, for messages; "" if it was not forked.

    Counted are only forks after the first communicator was made.
    """
    return _PROCESS["forked from"]


def _within(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name(frames: list[FrameType]) -> str:
    """Return the name of the outermost function, the one that the user called."""
    if not frames:
        return "a call"
    collective = frames[-1].f_locals.get("collective")  # of communicator.begun
    name = getattr(collective, "__name__", None)
    return f"i{name}" if name else frames[-1].f_code.co_name


def _place(frames: list[FrameType]) -> str:
    """Return "FILE:LINE" of the innermost frame that is the user's, not a library's wrapper."""
    frame = next((f for f in frames if not WITHIN[f.f_code.co_filename]), None)
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- processes ------------------------------------------------------------------------------------


def _install() -> None:
    if not _PROCESS.setdefault("watched", ""):
        _PROCESS["watched"] = "yes"
        os.register_at_fork(before=_about_to_fork, after_in_child=_in_child)


def _about_to_fork() -> None:
    _PROCESS["parent"] = str(os.getpid())


def _in_child() -> None:
    """Close all doors in a forked child, and end it without MPI, which belongs to its parent."""
    _PROCESS["forked from"] = parent = f"process {_PROCESS['parent']}"
    for door in list(_doors):
        door.close(
            f"this process ({os.getpid()}) was forked from {parent}, to which rank {door._rank} of "
            "the communicator belongs: make the call there, or exchange data with it by a pipe"
        )
    if "mpi4py.MPI" in sys.modules:
        end_without_mpi()


def end_without_mpi() -> None:
    """Let this forked child end before mpi4py calls MPI_Finalize, which would wait or crash.

    As a child of multiprocessing does, it skips the exit functions of its parent; those that it has
    registered itself run.
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
