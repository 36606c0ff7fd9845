"""Results of measurements: rows, their JSON form, and tables of them."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..errors import InvalidArgument
from ..measure import round_size
from ..selection.tuning import PRIVATE, SYMMETRIC
from ..shared_memory import compiled
from .cases import BARE

if TYPE_CHECKING:
    from ..communicator.communicator import Communicator


def bound_us(nbytes: int, ranks: int, gbs: float) -> float:
    """Give the microseconds that 2·p·S bytes take at the speed of memory.

    An allreduce of S bytes has p inputs to read and p results to write, if every rank needs its
    own copy.
    """
    return 2 * ranks * nbytes / gbs / 1e3


def bound_percent(row: Row, header: Mapping[str, Any]) -> float | None:
    """Give the share of the bound that an allreduce in symmetric memory reached, in percent.

    None for other rows, and where the speed of memory was not measured.  Above 100 is possible
    where the data stay in the cache.
    """
    stream = header.get("stream")
    if not stream or row.collective != "allreduce" or row.memory != SYMMETRIC or not row.bytes:
        return None
    return 100 * bound_us(row.bytes, row.ranks, stream["gbs"]) / row.time_us


BOUND_NOTE = "% of bound: the time of 2·p·S bytes at the speed of memory over the time measured"
_KNOBS = re.compile(
    r"(MPIDIST|OMPI_MCA|PRTE_MCA|PMIX_MCA|MPIR_CVAR|UCX|FI|I_MPI|MALLOC|OMP|OPENBLAS|MKL)_[A-Z]"
)
_NOT_KNOBS = (
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "OMPI_MCA_PREFIXES",
    "PMIX_MCA_mca_base",
    "MPIDIST_TERMINAL",
)


def knobs(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Give the variables of the environment that steer us, MPI, its transports and threads."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if _KNOBS.match(name) and not name.startswith(_NOT_KNOBS)
    }


def versions() -> dict[str, str]:
    """Give the versions of what is at work."""
    import mpi4py
    import numpy

    from .. import __version__

    return {
        "mpidist": __version__,
        "mpi4py": mpi4py.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


@dataclass
class Row:
    """One algorithm at one size.

    Attributes
    ----------
    time_us : float
        Median over the iterations of the slowest rank's time, in microseconds.
    algbw_gbs, busbw_gbs : float
        Bandwidths in 10⁹ bytes a second, as in nccl-tests; `bytes` is the whole buffer.
    vs_native : float or None
        Time of the bare mpi4py call in the same run over this one's: above 1 is faster than it.
    correct : bool
        Whether the result of every call was right, on every rank.
    memory : str
        Where the arrays were: ``"private"``, or ``"symmetric"``: from ``comm.empty``.
    spread : float or None
        Half of the range in which the middle half of the iterations lies, as a part of the median.
    """

    collective: str
    algorithm: str
    backend: str
    ranks: int
    bytes: int
    dtype: str
    op: str | None
    in_place: bool
    time_us: float
    algbw_gbs: float
    busbw_gbs: float
    vs_native: float | None
    correct: bool
    memory: str = PRIVATE
    spread: float | None = None

    @property
    def label(self) -> str:
        """The algorithm, and the memory where the name alone does not tell it."""
        if self.memory == PRIVATE or self.algorithm == self.memory:
            return self.algorithm
        return f"{self.algorithm} in {self.memory}"


@dataclass
class Refusal:
    """An algorithm that cannot serve, or took too long, and why."""

    collective: str
    algorithm: str
    bytes: int
    reason: str
    memory: str = PRIVATE


@dataclass
class Results:
    """Everything of one run.

    ``identical`` tells, where it was looked at, whether an algorithm gave all ranks the same bits;
    ``iterations`` how many were timed, by collective and bytes.
    """

    header: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    unsupported: list[Refusal] = field(default_factory=list)
    identical: dict[str, bool] = field(default_factory=dict)
    iterations: dict[str, int] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """Whether every result was right."""
        return all(row.correct for row in self.rows)

    def to_json(self) -> str:
        """Write as a JSON object with "header", "rows" and "unsupported"."""
        content = {
            "header": self.header,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "unsupported": [dataclasses.asdict(refusal) for refusal in self.unsupported],
        }
        return json.dumps(content, indent=1)

    def save(self, path: str) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read what :meth:`to_json` wrote; InvalidArgument for anything else."""
        try:
            content = json.loads(text)
            rows = [Row(**row) for row in content["rows"]]
            refusals = [Refusal(**refusal) for refusal in content.get("unsupported", ())]
            return cls(content["header"], rows, refusals)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgument(f"not a result file of `mpidist bench`: {error}") from None


def cores_here(comm: Any) -> set[int]:
    """Give the cores that the ranks on rank 0's node may use together; collective."""
    mine = comm.allgather_object(sorted(os.sched_getaffinity(0)))
    return {core for rank in comm.topology.groups[0] for core in mine[rank]}


def make_header(comm: Communicator, *libraries: str) -> dict[str, Any]:
    """Return the description of a run: versions, machine, date, command, environment; collective.

    Parameters
    ----------
    comm : Communicator
        The ranks of the run.
    *libraries : str
        Further libraries whose versions are recorded.
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


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Write a JSON object to a file."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


MakeTable = Callable[..., Table]


def microseconds(time_us: float) -> str:
    """Write a time in microseconds to four digits."""
    return f"{time_us:.4g}" if time_us < 1000 else f"{time_us:,.0f}"


def percent(share: float | None) -> str:
    """Write a share in whole percent; nothing for None."""
    return "" if share is None else f"{share:.0f}"


def tabulate(
    results: Results, make: MakeTable, colours: bool, narrow: bool = False
) -> Iterable[tuple[str, Table]]:
    """Give a heading and a table for each collective.

    Parameters
    ----------
    results : Results
        What was measured.
    make : callable
        Gives an empty table of the columns whose names it gets; ``>`` sets one to the right.
    colours : bool
        Whether to set the fastest and the wrong off.
    narrow : bool
        Whether to do without algbw, which time and bytes tell as well.
    """
    everything: list[Row | Refusal] = [*results.rows, *results.unsupported]
    for collective in dict.fromkeys(one.collective for one in everything):
        measured = [row for row in results.rows if row.collective == collective]
        if measured:
            yield _heading(measured[0]), _table(results, measured, make, colours, narrow)
        refused = [r for r in results.unsupported if r.collective == collective]
        if refused:
            table = make("=not measured", "=memory", ">bytes", "why")
            for refusal in refused:
                table.add_row(
                    refusal.algorithm, refusal.memory, round_size(refusal.bytes), refusal.reason
                )
            yield "", table


def _heading(row: Row) -> str:
    words = [row.collective, f"{row.ranks} rank{'s' * (row.ranks > 1)}"]
    if row.collective != "barrier":
        words += [row.dtype, *([row.op] if row.op else []), *(["in place"] * row.in_place)]
    return ", ".join(words)


def _table(
    results: Results, rows: list[Row], make: MakeTable, colours: bool, narrow: bool
) -> Table:
    bits = len(results.identical) > 0
    memory = any(row.memory != PRIVATE for row in results.rows)
    algbw = [] if narrow else [">algbw\nGB/s"]
    speeds = (">time\nµs", *algbw, ">busbw\nGB/s", ">x\nmpi4py")
    bound = any(bound_percent(row, results.header) is not None for row in rows)
    where, same = ["=memory"] if memory else [], ["same\nbits"] if bits else []
    of_bound = [">% of\nbound"] if bound else []
    table = make(">bytes", "=algorithm", *where, *speeds, *of_bound, "right", *same)
    for nbytes, group in groupby(rows, lambda row: row.bytes):
        equals = list(group)
        fastest = min(equals, key=lambda row: row.time_us)
        for row in equals:
            cells: list[Any] = [
                round_size(nbytes) if row is equals[0] or not colours else "",
                Text(row.algorithm),
                *([row.memory] if memory else []),
                microseconds(row.time_us),
                *([] if narrow else [f"{row.algbw_gbs:.3g}"]),
                f"{row.busbw_gbs:.3g}",
                "" if row.vs_native is None else f"{row.vs_native:.2f}",
                *([percent(bound_percent(row, results.header))] if bound else []),
                "yes" if row.correct else "WRONG",
            ]
            if bits:
                cells.append("yes" if results.identical.get(row.algorithm) else "no")
            table.add_row(*cells, style=_style(row, fastest) if colours else None)
        if colours:
            table.add_section()
    return table


def _style(row: Row, fastest: Row) -> str | None:
    if not row.correct:
        return "bold red"
    if row is fastest:
        return "green"
    return "bold" if row.algorithm in (BARE, "native") else None
