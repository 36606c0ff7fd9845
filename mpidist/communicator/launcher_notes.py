"""Notes from a rank to ``mpidist run``: MPI is starting, has started; the exception that ends it.

Standard library only: ``launcher/rank_program.py`` loads this file alone, before any package.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

NOTES = "MPIDIST_RUN_NOTES"
"""Environment variable: the abstract socket address of `mpidist run` or of the rank's monitor."""
STARTING, STARTED = "starting", "started"  # states of MPI, as the fact `mpi`
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
LONGEST = 60_000  # bytes of a note, which the monitor sends on as one line
TAKEN_WITHIN = 1.0  # seconds
OTHERS_FAIL_WITHIN = 0.3  # seconds for ranks that fail alike, before the first ends the job


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank that an MPI launcher gave to this process; None if none started it."""
    return next((int(environ[n]) for n in RANKS if environ.get(n, "").isdecimal()), None)


def send_note(**facts: object) -> bool:
    """Send facts to ``mpidist run``, if it started this process; return whether it got them."""
    name = os.environ.get(NOTES)
    if not name:
        return False
    known = {"rank": launched_rank(), "host": socket.gethostname()}
    note = json.dumps({**known, **facts}).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.settimeout(TAKEN_WITHIN)
        return len(note) <= LONGEST and line.sendto(note, f"\0{name}") == len(note)
    return False


def hand_over(failure: Mapping[str, str]) -> bool:
    """Hand over to ``mpidist run`` the exception that ends this rank, and wait a moment.

    Other ranks that fail can do the same in that time: the first to end ends the job.  Return
    whether ``mpidist run`` prints it; otherwise this rank must.
    """
    if not send_note(failure=dict(failure)):
        return False
    time.sleep(OTHERS_FAIL_WITHIN)
    return send_note()  # False if it was killed in the meantime


def give_back_signal() -> None:
    """Restore the default handler of SIGUSR1, which MPICH replaced at its start.

    The monitor of this rank (a process of ``mpidist run``) holds the signal back until the program
    has a handler, and would take MPICH's for the program's: a stop request that comes before its
    ``StopRequest`` would be lost.
    """
    free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if NOTES in os.environ and free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
