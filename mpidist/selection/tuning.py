"""The tuning table: which way was measured to be the fastest, by communicator, call and bytes."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calls.call import Call
from ..errors import ConfigError, MpidistError
from ..operations import kind_of
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import RESERVED, find

PRIVATE, SYMMETRIC = "private", "symmetric"
MEMORIES = (PRIVATE, SYMMETRIC)
KINDS = ("any", "float", "half", "int", "bool", "complex")
"""Classes of dtypes: "any" where nothing is combined, "half" for floats of two bytes or less."""

Times = Mapping[int, Mapping[str, float]]


def kind_for(call: Call) -> str:
    """Give the class of dtypes that a call is tuned with."""
    if call.op is None:
        return "any"
    kind = kind_of(call.dtype)
    return "half" if kind == "float" and call.dtype.itemsize <= 2 else kind


@dataclass(frozen=True, order=True)
class Key:
    """What an entry was measured for.

    Attributes
    ----------
    library : str
        The MPI library and its version.
    ranks_per_node : tuple of int
        Ranks on each node.
    kind : str
        One of :data:`KINDS`.
    collective : str
        Which.
    memory : str
        Where the arrays are: one of :data:`MEMORIES`.
    """

    library: str
    ranks_per_node: tuple[int, ...]
    kind: str
    collective: str
    memory: str


@dataclass(frozen=True)
class Entry:
    """What to take for one key, and the times that say so.

    Attributes
    ----------
    choose : tuple of (int, str)
        The way from so many bytes on, ascending; the first from 0.
    times : mapping
        Seconds of each candidate, by bytes; those that were clearly slower may be missing.
    """

    key: Key
    choose: tuple[tuple[int, str], ...]
    times: Times

    @classmethod
    def from_points(cls, key: Key, chosen: Mapping[int, str], times: Times) -> Entry:
        """Make the entry of ways that were chosen at some sizes.

        Between two sizes it changes from one way to the other where their times, interpolated on
        logarithmic axes, cross; in the middle if one of them was not measured at both.
        """
        sizes = sorted(chosen)
        choose = [(0, chosen[sizes[0]])]
        for low, high in zip(sizes, sizes[1:]):
            before, after = chosen[low], chosen[high]
            if before != after:
                choose.append((_crossing(low, high, before, after, times), after))
        return cls(key, tuple(choose), times)

    def at(self, nbytes: int) -> tuple[str, int, float]:
        """Give the way for `nbytes`, and the bytes from which and below which it is taken.

        Below the smallest and above the largest size that was measured, the way is that of it.
        """
        index = bisect_right([first for first, _ in self.choose], nbytes) - 1
        above = self.choose[index + 1][0] if index + 1 < len(self.choose) else math.inf
        return self.choose[index][1], self.choose[index][0], above

    def seconds(self, way: str, nbytes: int) -> float | None:
        """Give the time of a way by interpolation on logarithmic axes; None if not measured.

        Below the smallest size it is that of the smallest, above the largest in proportion.
        """
        known = sorted((size, times[way]) for size, times in self.times.items() if way in times)
        if not known:
            return None
        if nbytes <= known[0][0]:
            return known[0][1]
        for (low, first), (high, second) in zip(known, known[1:]):
            if nbytes <= high:
                part = math.log(nbytes / max(low, 1)) / math.log(high / max(low, 1))
                return first * (second / first) ** part
        size, last = known[-1]
        return last * nbytes / max(size, 1)


def _crossing(low: int, high: int, before: str, after: str, times: Times) -> int:
    part, first, second = 0.5, times.get(low, {}), times.get(high, {})
    if all(way in at for way in (before, after) for at in (first, second)):
        ahead = math.log(first[after] / first[before])  # of `before`, at the lower size
        behind = math.log(second[before] / second[after])
        if ahead >= 0 and behind >= 0 and ahead + behind > 0:
            part = ahead / (ahead + behind)
    edge = max(low, 1) * (high / max(low, 1)) ** part
    return min(max(math.ceil(edge), low + 1), high)  # what was measured keeps its own way


FORMAT = 1
"""Version of the document; another one is refused."""


class TuningTable:
    """Measured choices of ``auto``; read and written as JSON, made by ``mpidist tune``.

    Parameters
    ----------
    entries : iterable of Entry
        One for each key; of equal keys the last counts.
    about : mapping, optional
        On what it was measured: kept, not used.
    source : str
        What it is called in messages, for example the file's name.
    """

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        about: Mapping[str, Any] | None = None,
        source: str = "given to the communicator",
    ):
        self.entries = {entry.key: entry for entry in entries}
        self.about, self.source = dict(about or {}), source
        self.told = False  # whether a communicator has said that it uses this, or cannot

    def find(self, key: Key) -> Entry | None:
        """Give the entry of a key, or None."""
        return self.entries.get(key)

    def why_not(self, library: str, ranks_per_node: tuple[int, ...]) -> str | None:
        """Say why the table says nothing about a communicator, or give None."""
        known = {(key.library, key.ranks_per_node) for key in self.entries}
        if (library, ranks_per_node) in known:
            return None
        made = "; ".join(f"{name}, {_ranks(nodes)}" for name, nodes in sorted(known)) or "nothing"
        here = f"{library}, {_ranks(ranks_per_node)}"
        return f"the tuning table {self.source} does not apply: it is for {made}; this is {here}"

    def merged(self, newer: TuningTable) -> TuningTable:
        """Give this table with the entries of `newer` over its own."""
        entries = [*self.entries.values(), *newer.entries.values()]
        return TuningTable(entries, newer.about, self.source)

    # -- as a document --------------------------------------------------------------------------

    def to_json(self) -> str:
        """Write as a JSON object; times in microseconds."""
        lines = [json.dumps(_write(self.entries[key])) for key in sorted(self.entries)]
        head = json.dumps({"mpidist_tuning": FORMAT, "about": self.about})[:-1]
        return head + ', "entries": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, source: str = "a tuning table") -> TuningTable:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ConfigError
            That names `source`, the place in it, and what is wrong: it is no JSON, no table, of
            another version, or names an algorithm that there is not.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from None
        if not isinstance(content, dict) or "mpidist_tuning" not in content:
            raise ConfigError(f"{source} is no tuning table: it has no 'mpidist_tuning'")
        if content["mpidist_tuning"] != FORMAT:
            version = content["mpidist_tuning"]
            raise ConfigError(f"{source} has version {version!r} of the table; known is {FORMAT}")
        entries = content.get("entries")
        if not isinstance(entries, list):
            raise ConfigError(f"{source}: 'entries' must be a list, not {entries!r:.60}")
        read = [_read(entry, f"{source}: entry {i}") for i, entry in enumerate(entries)]
        about = content.get("about")
        return cls(read, about if isinstance(about, dict) else {}, source)

    @classmethod
    def load(cls, path: str | os.PathLike) -> TuningTable:
        """Read a file; ConfigError, with the path and why, if it cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{os.fspath(path)}: {why}") from None
        return cls.from_json(text, os.fspath(path))

    def save(self, path: str | os.PathLike) -> None:
        """Write a file, whole or not at all."""
        beside = Path(f"{os.fspath(path)}.{os.getpid()}.new")
        try:
            beside.write_text(self.to_json(), encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def _ranks(ranks_per_node: tuple[int, ...]) -> str:
    total = sum(ranks_per_node)
    nodes = len(ranks_per_node)
    if nodes == 1:
        return f"{total} rank{'s' * (total != 1)} on 1 node"
    return f"{total} ranks on {nodes} nodes ({'+'.join(map(str, ranks_per_node))})"


def _write(entry: Entry) -> dict[str, Any]:
    key = entry.key
    return {
        "library": key.library,
        "ranks_per_node": list(key.ranks_per_node),
        "kind": key.kind,
        "collective": key.collective,
        "memory": key.memory,
        "choose": [{"from": first, "way": way} for first, way in entry.choose],
        "times_us": {
            str(size): {way: float(f"{seconds * 1e6:.5g}") for way, seconds in times.items()}
            for size, times in sorted(entry.times.items())
        },
    }


def _read(entry: Any, where: str) -> Entry:
    """Check one entry of the document."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object, not {entry!r:.60}")
    key = _read_key(entry, where)
    try:
        choose = tuple((int(part["from"]), str(part["way"])) for part in entry["choose"])
        times = {
            int(size): {str(way): float(us) * 1e-6 for way, us in at.items()}
            for size, at in entry["times_us"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: 'choose' must be a list of {{from, way}} and 'times_us' of objects "
            f"way: µs by bytes ({type(error).__name__}: {error})"
        ) from None
    starts = [first for first, _ in choose]
    if not choose or starts[0] != 0 or starts != sorted(set(starts)):
        raise ConfigError(f"{where}: 'choose' must begin from 0 and ascend, not {starts}")
    if any(size < 0 or not us > 0 for size, at in times.items() for us in at.values()):
        raise ConfigError(f"{where}: 'times_us' must be above 0, of sizes >= 0")
    for _, way in choose:
        _check_way(key.collective, way, where)
    return Entry(key, choose, times)


def _read_key(entry: dict[str, Any], where: str) -> Key:
    allowed = {"kind": KINDS, "collective": tuple(COLLECTIVES), "memory": MEMORIES}
    for name, values in allowed.items():
        if entry.get(name) not in values:
            listed = ", ".join(values)
            raise ConfigError(f"{where}: {name}={entry.get(name)!r}: allowed are {listed}")
    library, nodes = entry.get("library"), entry.get("ranks_per_node")
    if not isinstance(library, str):
        raise ConfigError(f"{where}: library={library!r}: must be a name")
    numbers = isinstance(nodes, list) and nodes and all(type(n) is int and n > 0 for n in nodes)
    if not numbers:
        raise ConfigError(f"{where}: ranks_per_node={nodes!r}: must be whole numbers > 0")
    assert isinstance(nodes, list)
    return Key(library, tuple(nodes), entry["kind"], entry["collective"], entry["memory"])


def _check_way(collective: str, way: str, where: str) -> None:
    if way in RESERVED and way != "auto":
        return
    try:
        find(collective, way)
    except MpidistError as error:
        advice = "register your own before the table is read"
        raise ConfigError(f"{where}: {error} ({advice})") from None
