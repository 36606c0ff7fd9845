"""What was measured, as rows, and as the JSON that is kept."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from ..shared_memory import compiled

PRIVATE, SYMMETRIC = "private", "symmetric"  # kinds of memory


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
            raise InvalidArgument(f"these are no results of mpidist bench: {error}") from None


def cores_here(comm: Any) -> set[int]:
    """Give the cores that the ranks on rank 0's node may use together; collective."""
    mine = comm.allgather_object(sorted(os.sched_getaffinity(0)))
    return {core for rank in comm.topology.groups[0] for core in mine[rank]}


def make_header(comm: Any, versions: Mapping[str, str], knobs: Mapping[str, str]) -> dict[str, Any]:
    """Describe the run: versions, machine, date, command, environment; collective.

    Parameters
    ----------
    comm : Communicator
        On which it runs.
    versions, knobs : mapping
        Of the software; variables that steer it.
    """
    mpi: dict[str, Any] = {}
    if comm.backend.name == "mpi":
        from ..backends.mpi import describe_library

        mpi = describe_library()
    return {
        "versions": dict(versions),
        "mpi": mpi,
        "host": socket.gethostname(),
        "cores": len(cores_here(comm)),
        "ranks": comm.size,
        "ranks_per_node": [len(group) for group in comm.topology.groups],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "compiled": compiled.described(),
        "command": shlex.join(["mpidist", *sys.argv[1:]]),
        "environment": dict(knobs),
        "deadline_s": comm.timeout,
    }
