"""The tuning table: the candidate measured fastest, by call and bytes."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..calls.call import Call
from ..errors import ConfigError, MpidistError
from ..foreign import all_shown, read_file, read_json
from ..measure import counted
from ..operations import kind_of
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import find, reserved
from .calibration import Calibration
from .rules import Rule

PRIVATE, SYMMETRIC = "private", "symmetric"
MEMORIES = (PRIVATE, SYMMETRIC)
KINDS = ("any", "float", "half", "int", "bool", "complex")
"""Kinds of dtypes: "any" for collectives that combine nothing, "half" for floats of ≤ 2 bytes."""

AUTO = "auto"
"""In a table: what the shipped rules or the first call's trial choose."""

Times = Mapping[int, Mapping[str, float]]


def kind_for(call: Call) -> str:
    """Return the kind of dtype that a call's time depends on, one of :data:`KINDS`."""
    if call.op is None:
        return "any"
    kind = kind_of(call.dtype)
    return "half" if kind == "float" and call.dtype.itemsize <= 2 else kind


@dataclass(frozen=True, order=True)
class Key:
    """The key of an entry: the communicator and the kind of call that it was measured for."""

    library: str  # the MPI library and its version
    ranks_per_node: tuple[int, ...]
    kind: str  # of dtype, one of KINDS
    collective: str
    memory: str  # of the arrays, one of MEMORIES


@dataclass(frozen=True)
class TuningEntry:
    """The fastest candidates for one key by number of bytes, with measured times."""

    key: Key
    rules: tuple[Rule, ...]  # ascending from 0 bytes, without gaps
    times: Times  # times[nbytes][name] in seconds; much slower candidates may be missing

    @classmethod
    def from_points(cls, key: Key, chosen: Mapping[int, str], times: Times) -> TuningEntry:
        """Return an entry; ``chosen[nbytes]`` names the candidate for a measured size.

        Between two sizes with different candidates, the bound is where the two times,
        interpolated on logarithmic axes, cross; it is the geometric mean of the sizes if the times
        do not cross, or if a candidate was not measured at both.
        """
        sizes = sorted(chosen)
        choose = [(0, chosen[sizes[0]])]
        for low, high in zip(sizes, sizes[1:]):
            before, after = chosen[low], chosen[high]
            if before != after:
                choose.append((_crossing(low, high, before, after, times), after))
        return cls(key, rules_of(choose), times)

    def at(self, nbytes: int) -> Rule:
        """Return the rule for `nbytes`; beyond the measured sizes it is that of the nearest one."""
        return next(rule for rule in self.rules if nbytes < rule.below)

    def seconds(self, candidate: str, nbytes: int) -> float | None:
        """Return the time of a candidate, interpolated on logarithmic axes; None beyond them."""
        known = sorted(
            (size, times[candidate]) for size, times in self.times.items() if candidate in times
        )
        for size, seconds in known:
            if size == nbytes:
                return seconds
        for (low, first), (high, second) in zip(known, known[1:]):
            if low < nbytes < high:
                part = math.log(nbytes / max(low, 1)) / math.log(high / max(low, 1))
                return first * (second / first) ** part
        return None


def rules_of(chosen: Sequence[tuple[int, str]]) -> tuple[Rule, ...]:
    """Return the rules of pairs (bytes from which it is chosen, name), ascending from 0 bytes."""
    ends = [first for first, _ in chosen[1:]]
    return tuple(Rule(name, at, end) for (at, name), end in zip(chosen, [*ends, math.inf]))


def _crossing(low: int, high: int, before: str, after: str, times: Times) -> int:
    # On logarithmic axes the times are straight lines, which cross where the gains at both ends
    # say; in the middle if they do not.
    part, first, second = 0.5, times.get(low, {}), times.get(high, {})
    if all(candidate in at for candidate in (before, after) for at in (first, second)):
        ahead = math.log(first[after] / first[before])  # gain of `before` at the lower size
        behind = math.log(second[before] / second[after])
        if ahead >= 0 and behind >= 0 and ahead + behind > 0:
            part = ahead / (ahead + behind)
    edge = max(low, 1) * (high / max(low, 1)) ** part
    return min(max(math.ceil(edge), low + 1), high)  # measured sizes keep their candidates


LONGEST = 16 << 20  # bytes of a table
FORMAT = 1
"""Version of the JSON document; other versions are refused."""


class TuningTable:
    """Measured choices for ``algorithm="auto"``, and calibrations to predict others by, as JSON.

    ``mpidist tune`` writes the former, ``mpidist calibrate`` the latter.

    Parameters
    ----------
    entries : iterable of TuningEntry
        The entries; of several with one key the last counts.
    about : mapping, optional
        Facts about the measurement, which are stored but not used.
    source : str
        Name of the table in messages, for example the file's name.
    calibrations : iterable of Calibration
        Full calibrations, by which the cost model chooses where no entry does.
    """

    def __init__(
        self,
        entries: Iterable[TuningEntry] = (),
        about: Mapping[str, Any] | None = None,
        source: str = "given to the communicator",
        calibrations: Iterable[Calibration] = (),
    ):
        self.calibrations = {(one.library, one.ranks_per_node): one for one in calibrations}
        self.entries = {entry.key: entry for entry in entries}
        self.about, self.source = dict(about or {}), source
        self.checked = False  # whether a communicator has checked, and logged, that it applies

    def find(self, key: Key) -> TuningEntry | None:
        """Return the entry of a key, or None."""
        return self.entries.get(key)

    def calibration(self, library: str, ranks_per_node: tuple[int, ...]) -> Calibration | None:
        """Return the calibration of a communicator, or None."""
        return self.calibrations.get((library, ranks_per_node))

    def tunes(self, library: str, ranks_per_node: tuple[int, ...]) -> bool:
        """Return whether there are entries for a communicator."""
        where = library, ranks_per_node
        return any((key.library, key.ranks_per_node) == where for key in self.entries)

    def why_not(self, library: str, ranks_per_node: tuple[int, ...]) -> str | None:
        """Return why the table does not apply to a communicator, or None if it does."""
        known = {(key.library, key.ranks_per_node) for key in self.entries} | {*self.calibrations}
        if (library, ranks_per_node) in known:
            return None
        made = "; ".join(f"{name}, {_ranks(nodes)}" for name, nodes in sorted(known)) or "nothing"
        here = f"{library}, {_ranks(ranks_per_node)}"
        return f"the tuning table {self.source} does not apply: it is for {made}; this is {here}"

    def merged(self, newer: TuningTable) -> TuningTable:
        """Return a table with all of both; for equal keys what `newer` has."""
        entries = [*self.entries.values(), *newer.entries.values()]
        known = [*self.calibrations.values(), *newer.calibrations.values()]
        return TuningTable(entries, self.about | newer.about, self.source, known)

    # -- as a document --------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the table as a JSON object: entries in microseconds, calibrations in seconds."""
        lines = [json.dumps(_write(self.entries[key])) for key in sorted(self.entries)]
        known = [json.dumps(asdict(self.calibrations[key])) for key in sorted(self.calibrations)]
        head = json.dumps({"mpidist_tuning": FORMAT, "about": self.about})[:-1]
        calibrated = ', "calibrations": [\n' + ",\n".join(known) + "\n]" if known else ""
        return head + calibrated + ', "entries": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, source: str = "a tuning table") -> TuningTable:
        """Return the table of a text written by :meth:`to_json`.

        Raises
        ------
        ConfigError
            If the text is not JSON, not a table, has another version, or has a wrong entry, such as
            one with an unknown algorithm; the message names `source` and the entry.
        """
        content = all_shown(read_json(text, source, error=ConfigError, longest=LONGEST))
        if not isinstance(content, dict) or "mpidist_tuning" not in content:
            raise ConfigError(f"{source} is not a tuning table: it has no 'mpidist_tuning'")
        if content["mpidist_tuning"] != FORMAT:
            version = content["mpidist_tuning"]
            raise ConfigError(f"{source}: version {version!r:.60} of the table: expected {FORMAT}")
        entries = content.get("entries")
        if not isinstance(entries, list):
            raise ConfigError(f"{source}: 'entries' is {entries!r:.60}: expected a list")
        read = [_read(entry, f"{source}: entry {i}") for i, entry in enumerate(entries)]
        about, parts = content.get("about"), content.get("calibrations", [])
        if not isinstance(parts, list):
            raise ConfigError(f"{source}: 'calibrations' is {parts!r:.60}: expected a list")
        known = [
            Calibration.from_json(part, f"{source}: calibration {i}")
            for i, part in enumerate(parts)
        ]
        return cls(read, about if isinstance(about, dict) else {}, source, known)

    @classmethod
    def load(cls, path: str | os.PathLike) -> TuningTable:
        """Return the table of a file; ConfigError, with path and reason, if it cannot be read."""
        try:
            text = read_file(path, longest=LONGEST).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror or error) if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{os.fspath(path)}: {why}") from None
        return cls.from_json(text, os.fspath(path))

    def save(self, path: str | os.PathLike) -> None:
        """Write the table to a file, which is replaced atomically."""
        handle, beside = tempfile.mkstemp(".new", dir=Path(path).parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(file.fileno(), 0o666 & ~mask)  # mkstemp's is for its owner only
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)


def _ranks(ranks_per_node: tuple[int, ...]) -> str:
    total = sum(ranks_per_node)
    nodes = len(ranks_per_node)
    if nodes == 1:
        return f"{counted(total, 'rank')} on 1 node"
    return f"{total} ranks on {nodes} nodes ({'+'.join(map(str, ranks_per_node))})"


def _write(entry: TuningEntry) -> dict[str, Any]:
    key = entry.key
    return {
        "library": key.library,
        "ranks_per_node": list(key.ranks_per_node),
        "kind": key.kind,
        "collective": key.collective,
        "memory": key.memory,
        "choose": [{"from": rule.start, "algorithm": rule.choose} for rule in entry.rules],
        "times_us": {
            str(size): {
                candidate: float(f"{seconds * 1e6:.5g}") for candidate, seconds in times.items()
            }
            for size, times in sorted(entry.times.items())
        },
    }


def _read(entry: Any, where: str) -> TuningEntry:
    """Return an entry of a JSON table; ConfigError, which begins with `where`, if it is wrong."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r:.60}: expected an object")
    key = _read_key(entry, where)
    try:
        choose = tuple((int(part["from"]), str(part["algorithm"])) for part in entry["choose"])
        times = {
            int(size): {str(candidate): float(us) * 1e-6 for candidate, us in at.items()}
            for size, at in entry["times_us"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{where}: expected 'choose' to be a list of {{from, algorithm}}, and 'times_us' an "
            f"object of {{algorithm: µs}} by bytes ({type(error).__name__}: {error})"
        ) from None
    starts = [first for first, _ in choose]
    if not choose or starts[0] != 0 or starts != sorted(set(starts)):
        raise ConfigError(f"{where}: 'choose' has from={starts}: expected 0, then ascending sizes")
    if any(not 0 < us < math.inf for at in times.values() for us in at.values()):
        raise ConfigError(f"{where}: 'times_us': expected times > 0")
    if not all(0 <= size < 1 << 63 for size in (*starts, *times)):
        raise ConfigError(f"{where}: expected sizes of 0 bytes to less than 2**63")
    for _, candidate in choose:
        _check_name(key.collective, candidate, where)
    return TuningEntry(key, rules_of(choose), times)


def _read_key(entry: dict[str, Any], where: str) -> Key:
    allowed = {"kind": KINDS, "collective": tuple(COLLECTIVES), "memory": MEMORIES}
    for name, values in allowed.items():
        if entry.get(name) not in values:
            listed = ", ".join(values)
            raise ConfigError(f"{where}: {name}={entry.get(name)!r:.60}: expected one of {listed}")
    library, nodes = entry.get("library"), entry.get("ranks_per_node")
    if not isinstance(library, str):
        raise ConfigError(f"{where}: library={library!r:.60}: expected a name")
    if not (isinstance(nodes, list) and nodes and all(type(n) is int and n > 0 for n in nodes)):
        raise ConfigError(f"{where}: ranks_per_node={nodes!r:.60}: expected whole numbers > 0")
    return Key(library, tuple(nodes), entry["kind"], entry["collective"], entry["memory"])


def _check_name(collective: str, candidate: str, where: str) -> None:
    if candidate == AUTO or candidate in reserved():
        return
    try:
        find(collective, candidate)
    except MpidistError as error:
        advice = "register your own algorithms before the table is read"
        raise ConfigError(f"{where}: {error} ({advice})") from None
