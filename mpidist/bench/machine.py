"""The machine that is measured: its description, who else uses it, how far apart its cores are.

A virtual machine's cores may be hyperthreads of one core now, and share no cache a minute later.
Then the round trip of a cache line between ranks 0 and 1 changes by a factor of 3 to 6, and with it
the times of most calls.  So it is measured before, between and after, in a millisecond.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..communicator.layers import round_trip
from ..measure import counted, parse_size
from ..shared_memory import compiled
from .results import Results

# -- the description of a run --------------------------------------------------------------------

_KNOBS = re.compile(
    r"(MPIDIST|OMPI_MCA|PRTE_MCA|PMIX_MCA|MPIR_CVAR|UCX|FI|I_MPI|MALLOC|OMP|OPENBLAS|MKL)_[A-Z]"
)
_NOT_KNOBS = (
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "OMPI_MCA_PREFIXES",
    "PMIX_MCA_mca_base",
    "MPIDIST_TERMINAL",
    "MPIDIST_RUN_NOTES",  # these two have another value in each job
    "MPIDIST_RUN_SECRET",
    # Intel's and MPICH's launchers tell their ranks these.
    "I_MPI_INFO_",
    "I_MPI_PIN_INFO",
    "I_MPI_PIN_MAPPING",
    "I_MPI_HYDRA_",
    "I_MPI_INTERNAL_",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
)


def knobs(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return by name the variables of `environ` that configure mpidist, MPI, UCX, threads, …."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if _KNOBS.match(name) and not name.startswith(_NOT_KNOBS)
    }


def versions() -> dict[str, str]:
    """Return the versions of mpidist, mpi4py, numpy and Python."""
    import mpi4py
    import numpy

    from .. import __version__

    return {
        "mpidist": __version__,
        "mpi4py": mpi4py.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def cores_here(comm: Communicator) -> set[int]:
    """Return the numbers of the cores that the ranks on rank 0's node may use; collective."""
    mine = comm.allgather_object(sorted(os.sched_getaffinity(0)))
    return {core for rank in comm.topology.groups[0] for core in mine[rank]}


BUSY = 0.15  # of a node's cores, from which measurements are disturbed
WATCHED = 0.2  # seconds


def busy_cores(comm: Communicator) -> list[tuple[str, int, float]]:
    """Return (host, cores, cores used by other processes) of each busy node; collective.

    Busy is a node whose other processes use more than 15 % of its cores.  The ranks sleep
    meanwhile, so that ``/proc/stat`` counts other processes only.
    """
    comm.barrier()
    before = _ticks()
    time.sleep(WATCHED)
    spent = [after - first for after, first in zip(_ticks(), before)]
    cores = os.cpu_count() or 1
    used = cores * (1 - (spent[3] + spent[4]) / max(sum(spent), 1))  # idle, and waiting for a disk
    every = comm.allgather_object((socket.gethostname(), cores, used))
    firsts = [every[group[0]] for group in comm.topology.groups]
    return [(host, cores, used) for host, cores, used in firsts if used > BUSY * cores]


def load_text(host: str, cores: int, used: float) -> str:
    """Return what :func:`busy_cores` found on a node as text."""
    return f"other processes use {used:.1f} of the {cores} cores of {host}"


def busy_text(host: str, cores: int, used: float) -> str:
    """Return the warning of a busy node that :func:`busy_cores` found."""
    load = load_text(host, cores, used)
    return f"warning: {load}: times will scatter, compare only those of one run"


def _ticks() -> list[int]:
    """Return the ticks of all cores since boot in /proc/stat: user, nice, system, idle, disk, …."""
    with open("/proc/stat", encoding="ascii") as file:
        return [int(word) for word in file.readline().split()[1:9]]


def make_header(comm: Communicator, *libraries: str) -> dict[str, Any]:
    """Return the description of a run: versions, machine, date, command, environment; collective.

    The versions of further `libraries` are recorded too.
    """
    mpi: dict[str, Any] = {}
    if comm.backend.name == "mpi":
        from ..backends.mpi import describe_library

        mpi = describe_library()
    return {
        "versions": {**versions(), **{name: version(name) for name in libraries}},
        "mpi": mpi,
        "host": socket.gethostname(),
        "cores": len(cores_here(comm)),
        "ranks": comm.size,
        "ranks_per_node": [len(group) for group in comm.topology.groups],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "compiled": compiled.described(),
        "command": shlex.join(["mpidist", *sys.argv[1:]]),
        "environment": knobs(),
        "deadline_s": comm.timeout,
    }


# -- its state while it is measured --------------------------------------------------------------

CHANGED = 1.6  # ratio of two round trips from which the machine counts as another one


class Watch:
    """Looks at the round trip of a cache line during a measurement."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        # Nanoseconds, the same on all ranks; None where not measured.
        self.looks: list[float | None] = []
        self.busy: list[tuple[str, int, float]] = []  # found by busy_cores at begin() and again()

    def begin(self) -> Watch:
        """Look for other processes and at the round trip, before a command measures; collective."""
        self.busy = busy_cores(self.comm)
        self.look()
        return self

    def look(self) -> None:
        """Measure the round trip now; collective."""
        seconds = round_trip(self.comm)
        self.looks.append(None if seconds is None else 1e9 * seconds)

    @property
    def changed(self) -> bool:
        """Whether two of the round trips differ by more than a factor of 1.6."""
        known = [ns for ns in self.looks if ns is not None]
        return len(known) > 1 and max(known) > CHANGED * min(known)

    def figures(self) -> dict[str, Any]:
        """Return the figures of a row: least and largest round trip, and ``changed`` if it did."""
        known = [ns for ns in self.looks if ns is not None]
        if not known:
            return {}
        found = {"line_ns": min(known), "line_most_ns": max(known)}
        return {**found, "changed": True} if self.changed else found

    def again(self) -> list[str]:
        """Look for other processes and at the round trip again, after a measurement; collective.

        Return what speaks against the figures that were measured meanwhile.
        """
        self.look()
        self.busy = self.busy or busy_cores(self.comm)
        doubts = [load_text(*node) for node in self.busy]
        return [*doubts, *[self.described()] * self.changed]

    def end(self, results: Results) -> None:
        """Look for the last time; add what was found to header and notes of results; collective."""
        self.look()
        if self.busy:
            results.header["busy"] = self.busy
        if text := self.described():
            results.header["line_ns"] = self.before_and_after()
            results.notes.append(text)

    def before_and_after(self) -> dict[str, float | None]:
        """Return the first and the last round trip in nanoseconds."""
        return {"before": self.looks[0], "after": self.looks[-1]}

    def described(self) -> str:
        """Return a sentence on the first and the last round trip; empty if neither is known."""
        known = [f"{ns:.0f} ns {w}" for w, ns in self.before_and_after().items() if ns is not None]
        if not known:
            return ""
        text = f"round trip of a cache line between ranks 0 and 1: {', '.join(known)}"
        return f"{text}: the machine has changed meanwhile" if self.changed else text


# -- its memory bandwidth ------------------------------------------------------------------------

CACHES = 4  # size of STREAM's arrays, in last-level caches
_MIN_ARRAY_BYTES = 16 << 20  # bytes of an array, where the cache is small or of unknown size
_REPEAT = 12


@dataclass(frozen=True)
class StreamBandwidth:
    """The measured memory bandwidth."""

    gbs: float  # 10⁹ bytes per second, read and written by all ranks together, in the best copy
    array_bytes: int  # of each of the two arrays of a rank
    cache_bytes: int  # of the last-level cache; 0 if unknown
    # Arrays of all ranks of rank 0's node, one each, have at least CACHES times the cache's bytes.
    enough: bool

    def as_header(self) -> dict[str, Any]:
        """Return the fields as the dict that is ``header["stream"]`` of results."""
        return asdict(self)


def last_level_cache(root: str = "/sys/devices/system/cpu") -> int:
    """Return the bytes of the largest cache of the highest level; 0 if unknown.

    `root` is the folder of the processors, in the layout of Linux.
    """
    found = []
    for index in Path(root).glob("cpu[0-9]*/cache/index*"):
        try:
            kind, level, size = (
                (index / name).read_text().strip() for name in ("type", "level", "size")
            )
            if kind != "Instruction":
                found.append((int(level), parse_size(size)))
        except (OSError, ValueError):
            continue
    return max(found, default=(0, 0))[1]


def available_memory(path: str = "/proc/meminfo") -> int:
    """Return the bytes of memory that processes can still allocate; 0 if unknown."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    amounts = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return amounts[0] if amounts else 0


def array_bytes(ranks: int, cache: int, available: int) -> int:
    """Return the length in bytes of each of the two arrays that a rank copies.

    One array of each of the node's `ranks`, together, are four times the `cache`, and an array is
    at least 16 MiB; but all arrays together take at most a quarter of the `available` bytes (if
    that is 0, unknown, an array takes at most 64 MiB).  In any case an array is at least 1 MiB.
    """
    wanted = max(-(-CACHES * cache // ranks), _MIN_ARRAY_BYTES)
    affordable = available // (4 * 2 * ranks) if available else 4 * _MIN_ARRAY_BYTES
    return max(min(wanted, affordable), 1 << 20) // 8 * 8


def measure_stream(comm: Communicator, nbytes: int | None = None) -> StreamBandwidth:
    """Measure the memory bandwidth of copies on all ranks at once; collective.

    The result is the same on every rank.  As in STREAM, a byte copied is one read and one written.
    By default rank 0's cache and memory decide the `nbytes` of each of a rank's two arrays.
    """
    here = len(comm.topology.groups[0])
    cache = last_level_cache()
    length = nbytes or array_bytes(here, cache, available_memory())
    cache, length = comm.broadcast(np.array([cache, length]), root=0).tolist()
    source = np.ones(length // 8)
    target = np.zeros_like(source)
    times = [_copy_time(comm, source, target) for _ in range(1 + _REPEAT)][1:]
    rate = 2 * source.nbytes * comm.size / min(times) / 1e9
    return StreamBandwidth(rate, source.nbytes, cache, source.nbytes * here >= CACHES * cache > 0)


def _copy_time(comm: Communicator, source: np.ndarray, target: np.ndarray) -> float:
    """Return the seconds of a copy, from the start of the first rank to the end of the last one.

    Ranks that share cores copy one after another: the slowest rank's own time would be too short.
    On several nodes, whose clocks cannot be compared, it is the slowest rank's own time.
    """
    comm.barrier()
    begun = perf_counter()
    np.copyto(target, source)
    ended = perf_counter()
    last, first, slowest = comm.allreduce(np.array([ended, -begun, ended - begun]), "max").tolist()
    return last + first if comm.topology.num_nodes == 1 else slowest


def describe_stream(header: Mapping[str, Any]) -> str:
    """Return ``header["stream"]`` of results as a sentence; empty if it was not measured."""
    stream = header.get("stream")
    if not stream:
        return ""
    size = f"{stream['array_bytes'] / (1 << 20):.0f} MiB"
    cache = stream["cache_bytes"]
    known = f"{cache / (1 << 20):.0f} MiB" if cache else "of unknown size"
    less = "" if stream["enough"] else f"; the arrays are less than {CACHES} times the cache"
    return (
        f"memory bandwidth: {stream['gbs']:.1f} GB/s, read and written, by all "
        f"{counted(header.get('ranks', 1), 'rank')} at once "
        f"(np.copyto, best of {_REPEAT}, arrays of {size} per rank, last-level cache {known}"
        f"{less})"
    )
