"""Notes from a rank to ``mpidist run``: MPI is starting, has started; the exception that ends it.

Standard library only: rank_program.py and rank_process.py load this file alone, without a package.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

NOTES = "MPIDIST_RUN_NOTES"
"""Environment variable: the abstract socket address of `mpidist run` or of the rank's monitor."""
STARTING, STARTED = "starting", "started"  # states of MPI, as the fact `mpi`
SPARE = "waits as a spare"  # what a rank records that has nothing to do
LONGEST = 60_000  # bytes of a note, which the monitor sends on as one line
TAKEN_WITHIN = 1.0  # seconds
OTHERS_FAIL_WITHIN = 0.3  # seconds for ranks that fail alike, before the first ends the job
ROLL_CALL_WITHIN = 1.0  # seconds for a look at the ranks, after a missed deadline
AT_ONCE = 1000  # notes to read: a flood of them must not keep the reader
CREDENTIALS = struct.Struct("3i")  # process, user and group of the sender of a note
# Two waits of Open MPI (5.0.11) for ever: MPI_Finalize waits now and then for a lost rank.  And a
# rank whose parent in the tree of an agreement dies asks the grandparent for the result, which
# does not answer if it has not heard of the death by its own decision.  In a star (3) nobody has a
# grandparent.
FOR_LOSSES = {"OMPI_MCA_async_mpi_finalize": "1", "OMPI_MCA_coll_ftagree_era_topology": "3"}


class Variables(NamedTuple):
    """The variables that a launcher sets in each process it starts; empty where it has none."""

    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""


OPEN_MPI = Variables(
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
HYDRA = Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
PMIX = Variables("PMIX_RANK")
SLURM = Variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")  # in batch scripts too
OF_MPI = OPEN_MPI, HYDRA, PMIX
LAUNCHERS = *OF_MPI, SLURM


def launched_rank(
    environ: Mapping[str, str] = os.environ, launchers: tuple[Variables, ...] = LAUNCHERS
) -> int | None:
    """Return the rank that a launcher gave to this process, before MPI; None if none started it."""
    texts = (environ.get(names.rank, "") for names in launchers)
    return next((int(text) for text in texts if text.isdecimal()), None)


def launched_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that an MPI launcher started; 1 if none did, or if unknown."""
    texts = (environ.get(names.size, "") for names in OF_MPI if names.size)
    return next((int(text) for text in texts if text.isdecimal()), 1)


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


def receive_note(notes: socket.socket) -> tuple[int, dict] | None:
    """Return the next note that has arrived: its process and its facts; None if there is none.

    Every user of the host can send to an abstract socket: what is not from a process of this
    user, or no JSON object, gives no facts.
    """
    try:
        text, extra, _, _ = notes.recvmsg(
            LONGEST, socket.CMSG_SPACE(CREDENTIALS.size), socket.MSG_DONTWAIT
        )
    except OSError:
        return None
    pid, user, _ = next((CREDENTIALS.unpack(data) for *_, data in extra), (0, -1, 0))
    try:
        note = json.loads(text) if user == os.getuid() else None
    except (ValueError, RecursionError):
        note = None
    return pid, note if isinstance(note, dict) else {}


def hand_over(failure: Mapping[str, str]) -> bool:
    """Hand over to ``mpidist run`` the exception that ends this rank, and wait a moment.

    Other ranks that fail can do the same in that time: the first to end ends the job.  Return
    whether ``mpidist run`` prints it; otherwise this rank must.
    """
    if not send_note(failure=dict(failure)):
        return False
    late = failure["kind"] == "CollectiveTimeout"
    time.sleep(ROLL_CALL_WITHIN if late else OTHERS_FAIL_WITHIN)
    return send_note()  # False if it was killed in the meantime


def ask_roll_call() -> None:
    """Have ``mpidist run`` look at all ranks, if it started this process, before this one ends."""
    if send_note(late=True):
        time.sleep(ROLL_CALL_WITHIN)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with suppress(OSError), open(f"/proc/{pid}/status", errors="replace") as file:
        masks = (line.split()[1] for line in file if line.startswith("SigCgt"))
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


def give_back_signal() -> None:
    """Restore the default handler of SIGUSR1, which MPICH replaced at its start.

    The monitor of this rank (a process of ``mpidist run``) holds the signal back until the program
    has a handler, and would take MPICH's for the program's: a stop request that comes before its
    ``StopRequest`` would be lost.
    """
    free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if NOTES in os.environ and free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
