"""What a rank tells the process beside it under ``mpidist run``: that it starts MPI, and has."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

NOTES = "MPIDIST_RUN_NOTES"
"""Environment variable: the abstract address of the process that is beside this rank."""
STARTING, STARTED = "starting", "started"


def tell_run(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the process beside this rank; nothing where there is none.

    Parameters
    ----------
    state : {"starting", "started"}
        Of MPI in this process.
    """
    name = environ.get(NOTES)
    if name:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(state.encode(), f"\0{name}")


def give_back_signal(environ: Mapping[str, str] = os.environ) -> None:
    """Undo what MPICH did at its start: it took SIGUSR1, which nobody else had yet.

    To the process beside this rank, which keeps the signal until the program has a handler for it,
    it would seem to have one: a program asked to stop before it is at its ``StopRequest`` would
    never know.
    """
    free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if NOTES in environ and free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
