"""ULFM: what MPI offers a job that goes on after the loss of a rank (Open MPI 5).

A launch asks for it: ``mpirun --with-ft ulfm``.  Then an operation with a rank that is dead raises
an error instead of ending the job, and a communicator can be left by three calls:

    Revoke   every operation on it, of any rank, raises an error from now on
    Shrink   a new communicator of the ranks that are alive, in the same order
    Agree    the least of the ranks' flags: also of a broken communicator, and the same on all

To make a communicator is where the library itself (5.0.11) goes wrong at a loss: see :func:`part`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import RankFailed
from .liveness import FAULT_TOLERANT
from .waiting import poll

# Of PMIx, the same in all its versions.
_PROCESS_ABORTED, _PMIX_PROC, _THIS_PROCESS, _INFO_BYTES = -7, 22, 7, 4096
LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""The classes of errors after a loss; an error in the statuses, or of no class, may hide them."""
LIMIT = 30.0  # seconds for a call of the library that all ranks have come to
KNOWN_WITHIN = 0.3  # seconds from an error by a loss until the library tells which rank is lost
_LOOK = 1e-3  # seconds between two looks for dead ranks while a communicator is made


def why_not(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this job cannot go on after the loss of a rank; None if it can."""
    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    works = "Open MPI 5 or later does, started by mpidist run --survive"
    if vendor != "Open MPI" or version[0] < 5:
        return f"{name} does not go on after the loss of a rank: {works}"
    if environ.get(FAULT_TOLERANT, "").lower() not in ("1", "true", "yes", "t", "y"):
        return (
            f"{name} was started without fault tolerance: start the job by mpidist run --survive, "
            "or mpirun --with-ft ulfm"
        )
    return None


def tolerates_faults() -> bool:
    """Return whether MPI was started so that it outlives a lost rank."""
    return why_not() is None


def dead_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of a communicator that the library knows to be dead."""
    everyone, dead = comm.Get_group(), comm.Get_failed()
    ranks = list(dead.Translate_ranks(None, everyone))
    for group in (everyone, dead):
        group.Free()
    return ranks


class _Process(ctypes.Structure):
    """``pmix_proc_t``: a rank of COMM_WORLD."""

    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


def report(ranks: Iterable[int], environ: Mapping[str, str] = os.environ) -> None:
    """Tell the library that these ranks of COMM_WORLD are dead.

    By itself it hears of those that a signal has ended only, and 20 to 50 ms later.  It is told
    with the event by which its launcher would, raised in this process alone.
    """
    library, namespace = _pmix(), environ.get("PMIX_NAMESPACE", "")
    if library is None or not namespace:
        return
    for rank in ranks:
        process = _Process(namespace.encode(), rank)
        info = ctypes.create_string_buffer(_INFO_BYTES)  # a pmix_info_t
        library.PMIx_Info_load(info, b"pmix.evproc", ctypes.byref(process), _PMIX_PROC)
        where = ctypes.c_uint8(_THIS_PROCESS)
        count = ctypes.c_size_t(1)
        library.PMIx_Notify_event(
            _PROCESS_ABORTED, ctypes.byref(process), where, info, count, None, None
        )


@cache
def _pmix() -> ctypes.CDLL | None:
    """Return the PMIx library that this process has loaded; None without the functions needed."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if "/libpmix.so" in line:
                library = ctypes.CDLL(line.split(maxsplit=5)[-1].strip())
                if hasattr(library, "PMIx_Info_load"):  # from PMIx 4.2 on
                    return library
    return None


def revoke(comm: MPI.Comm) -> None:
    """Let every operation on a communicator raise an error, on all ranks; not collective."""
    with suppress(MPI.Exception):  # it is revoked, or freed
        comm.Revoke()


def agree(
    comm: MPI.Comm, flag: bool, deadline: float | None, look: Callable[[], object] | None = None
) -> tuple[bool, bool] | None:
    """Return whether all ranks that are alive gave a true flag, and whether one has died unseen.

    It is collective among these, on a revoked communicator too, and the same on all.  None past the
    deadline: a rank has not come.  ``look()`` is called in the wait now and then, and may raise.
    """
    flags, lost = np.array([flag], np.intc), False
    request = comm.Iagree(flags)

    def test() -> bool:
        nonlocal lost
        try:
            return request.Test()
        except MPI.Exception:  # that some rank is dead, which all ranks hear alike
            lost = True
            return True

    ended = False
    try:
        ended = poll(test, deadline, nudge=look)
    finally:
        if not ended:
            _unfinished.append((request, flags))
    return (bool(flags[0]), lost) if ended else None


def part(comm: MPI.Intracomm, group: MPI.Group, look: Callable[[], object] | None) -> Any:
    """Return a communicator of this rank's group; collective over all of `comm`.

    The groups of two ranks are the same, or have no member in common; COMM_NULL for an empty one.
    ``look()`` is called now and then, by another thread: if it raises RankFailed, the call ends
    with an error on every rank, and `comm` is revoked.
    """
    # If a rank dies in a call that makes a communicator, the library (5.0.11)
    #
    # - waits for it for ever, also when `comm` is revoked, in MPI_Comm_create_group, which does not
    #   ask whether its receives have failed (comm_request.c): MPI_Comm_create of all ranks does;
    # - crashes if it hears of the death when the communicator is in its list and not complete
    #   (comm_ft_revoke.c): it hears after 20 ms or more, by then `comm` is revoked and left;
    # - takes the number of the failed call for the least that is pending (comm_cid.c): calls on
    #   communicators of higher numbers wait for ever, until there is one on that of the lowest.
    if look is None or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return comm.Create(group)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK):
            try:
                look()
            except RankFailed:
                revoke(comm)
                return

    watcher = threading.Thread(target=watch, name="mpidist-part", daemon=True)
    watcher.start()
    try:
        return comm.Create(group)
    except MPI.Exception:
        MPI.COMM_SELF.Dup().Free()
        raise
    finally:
        ended.set()
        watcher.join()


def shrink(comm: MPI.Intracomm, deadline: float | None) -> Any:
    """Return a communicator of the ranks that are alive, which all have come; collective.

    The call cannot be interrupted: past the deadline this process ends.
    """
    timer = None
    if deadline is not None:
        timer = threading.Timer(max(deadline - time.monotonic(), 1.0), _end, (comm.Get_rank(),))
        timer.daemon = True
        timer.start()
    try:
        return comm.Shrink()
    finally:
        if timer is not None:
            timer.cancel()


def _end(rank: int) -> None:
    sys.stderr.write(f"rank {rank}: survivors: MPI_Comm_shrink has not returned; this rank ends\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


_unfinished: list[object] = []  # MPI may still write there
