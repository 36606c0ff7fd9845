"""The speed of memory, as STREAM's copy by all ranks at once, and its bound to allreduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..measure import parse_size

CACHES = 4  # times the last-level cache: what STREAM asks of its arrays
_LEAST = 16 << 20  # bytes of an array, where the cache is small or not known
_REPEAT = 12


@dataclass(frozen=True)
class Stream:
    """What was measured.

    Attributes
    ----------
    gbs : float
        10⁹ bytes per second that all ranks together read and wrote: the best of several copies.
    array_bytes : int
        Of each of the two arrays of a rank.
    cache_bytes : int
        Of the last-level cache; 0 where the system does not tell.
    enough : bool
        Whether the arrays of all ranks together are `CACHES` times the cache or more.
    """

    gbs: float
    array_bytes: int
    cache_bytes: int
    enough: bool

    def as_header(self) -> dict[str, Any]:
        """Give what the header of the results holds."""
        return asdict(self)


def last_level_cache(root: str = "/sys/devices/system/cpu") -> int:
    """Give the bytes of the largest cache of the highest level; 0 where the system does not tell.

    Parameters
    ----------
    root : str
        Folder of the processors, as Linux has it.
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
    """Give the bytes of memory that are free to take; 0 where the system does not tell."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    amounts = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return amounts[0] if amounts else 0


def array_bytes(ranks: int, cache: int, available: int) -> int:
    """Give the length of a rank's array in bytes.

    All ranks' arrays together are four times the cache, but no more than a quarter of the memory
    that is free, for the two arrays of every rank.
    """
    wanted = max(-(-CACHES * cache // ranks), _LEAST)
    affordable = available // (4 * 2 * ranks) if available else 4 * _LEAST
    return max(min(wanted, affordable), 1 << 20) // 8 * 8


def measure_stream(comm: Any, nbytes: int | None = None) -> Stream:
    """Copy on all ranks at once; collective.

    Parameters
    ----------
    comm : Communicator
        Whose ranks copy.
    nbytes : int, optional
        Length of an array; by default by cache and memory of rank 0's node.

    Returns
    -------
    Stream
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
    return Stream(rate, source.nbytes, cache, source.nbytes * here >= CACHES * cache > 0)


def _copy_time(comm: Any, source: np.ndarray, target: np.ndarray) -> float:
    """Give the seconds from the first rank's begin to the last one's end.

    Where ranks share cores they copy one after another: the slowest rank's own time would be too
    short.  Clocks of several nodes cannot be compared; there it is the slowest rank's.
    """
    comm.barrier()
    begun = perf_counter()
    np.copyto(target, source)
    ended = perf_counter()
    told = comm.allreduce(np.array([ended, -begun, ended - begun]), "max")
    return float(told[0] + told[1] if comm.topology.num_nodes == 1 else told[2])


def describe_stream(header: Mapping[str, Any]) -> str:
    """Give the speed of memory in words; empty where it was not measured."""
    stream = header.get("stream")
    if not stream:
        return ""
    size = f"{stream['array_bytes'] / (1 << 20):.0f} MiB"
    cache = stream["cache_bytes"]
    known = f"{cache / (1 << 20):.0f} MiB" if cache else "of unknown size"
    less = "" if stream["enough"] else f"; less than {CACHES} times the cache"
    return (
        f"memory: {stream['gbs']:.1f} GB/s, read and written, by all {header.get('ranks')} ranks "
        f"at once (np.copyto, best of {_REPEAT}, arrays of {size} a rank, last-level cache {known}"
        f"{less})"
    )
