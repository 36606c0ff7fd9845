"""The memory bandwidth of a node: STREAM's copy, by all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..measure import counted, parse_size

CACHES = 4  # size of STREAM's arrays, in last-level caches
_LEAST = 16 << 20  # bytes of an array, where the cache is small or of unknown size
_REPEAT = 12


@dataclass(frozen=True)
class StreamBandwidth:
    """The measured memory bandwidth.

    Attributes
    ----------
    gbs : float
        10⁹ bytes per second, read and written by all ranks together, in the best of several copies.
    array_bytes : int
        Bytes of each of the two arrays of a rank.
    cache_bytes : int
        Bytes of the last-level cache; 0 if unknown.
    enough : bool
        Whether one array of each rank of rank 0's node, together, have at least `CACHES` times the
        bytes of the cache; False if the cache is unknown.
    """

    gbs: float
    array_bytes: int
    cache_bytes: int
    enough: bool

    def as_header(self) -> dict[str, Any]:
        """Return the fields as the dict that is ``header["stream"]`` of results."""
        return asdict(self)


def last_level_cache(root: str = "/sys/devices/system/cpu") -> int:
    """Return the bytes of the largest cache of the highest level; 0 if unknown.

    Parameters
    ----------
    root : str
        Folder of the processors, in the layout of Linux.
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
    wanted = max(-(-CACHES * cache // ranks), _LEAST)
    affordable = available // (4 * 2 * ranks) if available else 4 * _LEAST
    return max(min(wanted, affordable), 1 << 20) // 8 * 8


def measure_stream(comm: Communicator, nbytes: int | None = None) -> StreamBandwidth:
    """Measure the memory bandwidth of copies on all ranks at once; collective.

    Parameters
    ----------
    comm : Communicator
        The ranks that copy.
    nbytes : int, optional
        Bytes of each of a rank's two arrays; by default chosen by rank 0's cache and memory.

    Returns
    -------
    StreamBandwidth
        The same on every rank.  As in STREAM, a byte copied is one read and one written.
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
