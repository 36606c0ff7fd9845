"""Notes from a rank to its monitor under ``mpidist run``: MPI is starting, has started."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

NOTES = "MPIDIST_RUN_NOTES"
"""Environment variable: the abstract socket address of this rank's companion process."""
STARTING, STARTED = "starting", "started"


def tell_run(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send this rank's state of MPI to its monitoring process under ``mpidist run``, if any.

    Parameters
    ----------
    state : {"starting", "started"}
        State of MPI in this process.
    """
    name = environ.get(NOTES)
    if name:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(state.encode(), f"\0{name}")


def give_back_signal(environ: Mapping[str, str] = os.environ) -> None:
    """Restore the default handler of SIGUSR1, which MPICH replaced at its start.

    The companion process of this rank holds the signal back until the program has a handler, and
    would take MPICH's for it: a stop request before the program's ``StopRequest`` would be lost.
    """
    free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if NOTES in environ and free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
