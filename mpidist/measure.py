"""Measuring: sizes, bandwidths, medians, and the speed of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from .errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)
RANGE_FACTOR = 4

# -- sizes ----------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Return the bytes of a size: ``"8"``, ``"64K"``, ``"1.5M"``, ``"1GiB"``, in powers of 1024.

    Raises
    ------
    InvalidArgument
        If the text is not a size, not a whole number of bytes, or one of 2⁵³ and more, which a
        float does not hold.
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = float(match[1]) * UNITS[match[2].upper()] if match else 0.5
    if nbytes >= 1 << 53:
        raise InvalidArgument(f"{text!r} is too large a size: expected less than {1 << 53} bytes")
    if nbytes != int(nbytes):
        raise InvalidArgument(
            f"{text!r} is not a size: expected a whole number of bytes, with K, M or G for 1024, "
            "1024² or 1024³, such as 8, 64K or 1.5M"
        )
    return int(nbytes)


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of each size in a list: ``"8,64K,1M"``; ``"8-64M"`` is 8, 32, 128, … 64M."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not dash or not first.strip():  # a single size, perhaps a negative one
            sizes.append(parse_size(part))
            continue
        low, high = parse_size(first), parse_size(last)
        if not 0 < low <= high:
            raise InvalidArgument(
                f"{part!r} is not a range of sizes: expected FROM-TO with 0 < FROM <= TO"
            )
        while low < high:
            sizes.append(low)
            low *= RANGE_FACTOR
        sizes.append(high)
    return list(dict.fromkeys(sizes))


def format_size(nbytes: int) -> str:
    """Return a number of bytes as text that :func:`parse_size` reads: ``"64K"``, ``"1.5M"``."""
    for unit in ("G", "M", "K"):
        if nbytes >= UNITS[unit] and nbytes * 4 % UNITS[unit] == 0:
            return f"{nbytes / UNITS[unit]:.10g}{unit}"
    return str(nbytes)


def round_size(nbytes: int) -> str:
    """Return a number of bytes as text, rounded to three digits: ``"653K"``."""
    exact = format_size(nbytes)
    if not exact.isdecimal() or nbytes < UNITS["K"]:
        return exact
    # What would be 1000K, rounded, is written with the next unit.
    unit = next((u for u in ("G", "M") if nbytes >= 999.5 * UNITS[u] / 1024), "K")
    return f"{nbytes / UNITS[unit]:.3g}{unit}"


def significant(value: float, digits: int) -> str:
    """Return a number with this many significant digits and no exponent: ``"0.00383"``.

    All digits before the decimal point are shown, with commas: ``"22,437"``.
    """
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}" if value else "0"


def format_time(seconds: float) -> str:
    """Return a time as text, rounded to four digits: ``"12.30 µs"``, ``"48.20 ms"``."""
    unit, factor = ("µs", 1e6) if seconds < 1e-2 else ("ms", 1e3)
    return f"{significant(seconds * factor, 4)} {unit}"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return a noun for a number of things: ``"rank"`` for 1, else with `ending`: ``"ranks"``."""
    return noun if count == 1 else noun + ending


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return a number with its noun: ``"1 rank"``; with `ending` for others: ``"1,024 ranks"``."""
    return f"{count:,} {plural(count, noun, ending)}"


def numbers_of(record: Any) -> dict[str, float]:
    """Return the fields of a dataclass instance whose values are numbers, by name."""
    found = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


# -- bandwidths -----------------------------------------------------------------------------------

_BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "scan": lambda n: 1.0,
    "exscan": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}


def algbw(nbytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth in GB/s (10⁹ bytes): `nbytes` over the time.

    `nbytes` is the whole buffer of a collective: the larger one of input and result.
    """
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def busbw(collective: str, nbytes: int, seconds: float, size: int) -> float:
    """Return the bus bandwidth in GB/s: :func:`algbw` times what a link carries per byte of buffer.

    So it is comparable between numbers of ranks.  The formulas are those of nccl-tests
    (doc/PERFORMANCE.md), which lacks scans: they count as a reduce does.  `nbytes` is the whole
    buffer: the larger one of input and result (of a gather or scatter, the root's).
    """
    return algbw(nbytes, seconds) * _BUS_FACTOR[collective](size)


# -- times ----------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    """Return the median of numbers."""
    import statistics  # takes a tenth of `import mpidist`, for measurements alone

    return statistics.median(values)


def low(values: Sequence[float]) -> float:
    """Return the 20th percentile of numbers; of 5 or fewer the smallest.

    Of the times of a call it is what most calls take that nothing has interrupted.
    """
    return sorted(values)[(len(values) - 1) // 5]


def spread(values: Sequence[float]) -> float | None:
    """Return half the interquartile range over the median.

    None for less than 4 values, or if the median is not positive.
    """
    if len(values) < 4 or median(values) <= 0:
        return None
    import statistics

    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def time_call(call: Callable[[], Any], repeat: int = 5) -> float:
    """Return the median time in seconds of `repeat` calls, after one warm-up call."""
    call()
    times = [perf_counter()]
    for _ in range(repeat):
        call()
        times.append(perf_counter())
    return median([end - begin for begin, end in zip(times, times[1:])])


def add_cost(nbytes: int = 1 << 20, dtype: Any = "float32") -> float:
    """Return γ, the time of adding two arrays of `nbytes` each, in seconds per byte of one."""
    import numpy as np

    left = np.ones(max(nbytes // np.dtype(dtype).itemsize, 1), dtype)
    right = left.copy()
    return time_call(lambda: np.add(left, right, right)) / left.nbytes


class Messenger(Protocol):
    """The methods and attributes of a communicator that :func:`ping_pong` uses."""

    rank: int

    def send(self, x: Any, peer: int) -> None:
        """Send an array to rank `peer`."""

    def recv(self, out: np.ndarray, peer: int) -> np.ndarray:
        """Receive an array from rank `peer` into `out`, and return it."""

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""


def ping_pong(comm: Messenger, peer: int, nbytes: int, repeat: int, first: int = 0) -> float:
    """Return the one-way time in seconds of a message of `nbytes` between rank `first` and `peer`.

    It is the median of `repeat` trips there and back, halved.  All ranks call it; only the result
    on rank `first` counts.
    """
    import numpy as np

    data = np.zeros(nbytes, np.uint8)
    comm.barrier()
    if comm.rank not in (first, peer):
        return 0.0

    def there_and_back() -> None:
        if comm.rank == first:
            comm.send(data, peer)
            comm.recv(data, peer)
        else:
            comm.recv(data, first)
            comm.send(data, first)

    return time_call(there_and_back, repeat) / 2
