"""The flight records of a job: where each rank is, and which one diverged first, at what.

Only what the records say is compared: entries that were overwritten, records that are missing or of
another version are named.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path

from ..backends.flight import (
    ENDED_WELL,
    ENTRIES,
    FAILED,
    FlightRecord,
    Operation,
    Track,
    folder,
    read,
    records_in,
    remove,
)
from ..errors import InvalidArgument
from ..trace import Event, RankEvents
from .failures import ranks_listed
from .processes import working_folder

FEW = 6  # lines of a report by ``mpidist run``


@dataclass(frozen=True)
class Member:
    """A rank of a communicator: what its record says."""

    record: FlightRecord
    track: Track

    @cached_property
    def operations(self) -> dict[int, Operation]:
        """Operations on the communicator that are left in the ring, by their number."""
        return self.record.of(self.track)

    @property
    def begun(self) -> int:
        """Number of the last operation begun."""
        return max(self.track.begun, max(self.operations, default=0))

    @property
    def moves(self) -> bool:
        """Whether it has begun more since its record was read, which may be before others were."""
        if not self.record.alive:
            return False
        try:
            record = read(self.record.path)
        except ValueError:  # it has just ended
            return True
        now = (Member(record, t).begun for t in record.tracks if t.serial == self.track.serial)
        return all(begun > self.begun for begun in now)


@dataclass(frozen=True)
class Divergence:
    """The first operation that not all ranks of a communicator have begun, or begun alike."""

    time: int  # when the first rank began it, in ns; 0 if that was overwritten
    text: str


class Job:
    """The flight records of a job's ranks, as far as they are in one folder.

    `ended` tells how ranks ended, where that is known better than by their records; `hosts` has the
    hosts of ranks.  Nothing is said of the ranks `without`.
    """

    def __init__(
        self,
        path: Path,
        ended: Mapping[int, str] | None = None,
        hosts: Mapping[int, str] | None = None,
        without: Set[int] = frozenset(),
    ):
        self.path, self._ended, self._hosts = path, ended, hosts or {}
        self.records: list[FlightRecord] = []
        self.refused: list[str] = []
        try:
            files = records_in(path)
        except OSError as error:
            raise InvalidArgument(
                f"{path}: {error.strerror}: expected a folder of flight records"
            ) from None
        if not files:
            raise InvalidArgument(f"{path} has no flight records: expected a folder of them")
        known = set()
        for file in files:
            rank = int(file.name.partition("-")[2].partition(".")[0])
            known.add(rank)
            if rank in without:
                continue
            try:
                self.records.append(read(file))
            except ValueError as error:
                self.refused.append(str(error))
        self.records.sort(key=lambda record: (record.rank, record.path))
        self.ranks = max((record.size for record in self.records), default=0)
        self.absent = sorted(set(range(self.ranks)) - known - without)

    def crashed(self, rank: int | None = None) -> bool:
        """Return whether the process of a rank, or of any, is gone not as a Python program ends."""
        return any(record.crashed for record in self.records if rank in (None, record.rank))

    def communicators(self) -> Iterator[tuple[str, list[Member]]]:
        """Yield each communicator: its name, and the ranks whose records have it."""
        found: dict[tuple[str, int, int], list[Member]] = defaultdict(list)
        for record in self.records:
            for track in record.tracks:
                found[track.key].append(Member(record, track))
        for (name, _, _), members in found.items():
            yield name, members

    def divergences(self) -> list[str]:
        """Return a line for each communicator whose ranks are not alike, the first one first."""
        found = [diverged(name, members) for name, members in self.communicators()]
        known = [each for each in found if each is not None]
        return [each.text for each in sorted(known, key=lambda each: (not each.time, each.time))]

    def places(self) -> list[str]:
        """Return where the ranks are, those alike in one line: the lost first, then the fewest."""
        alike: dict[tuple[str, str, str], list[tuple[int, str]]] = defaultdict(list)
        for record in self.records:
            where, moment, site = place(record)
            since = clock(record, moment) if moment else ""
            alike[self._end(record), where, site].append((record.rank, since))
        lines = []
        lost = self._ended or {}  # told first, since only a few lines are printed

        def order(group: list[tuple[int, str]]) -> tuple[bool, int, list[tuple[int, str]]]:
            return not any(rank in lost for rank, _ in group), len(group), group

        for (end, where, site), group in sorted(alike.items(), key=lambda each: order(each[1])):
            first = min(moment for _, moment in group)
            since = f", waiting since {first} in {site}" if site else first and f", begun {first}"
            ranks = ranks_listed([rank for rank, _ in group])
            lines.append(f"{ranks}: {end and f'{end}; '}{where}{since}")
        return lines

    def _end(self, record: FlightRecord) -> str:
        """Return how the process of a record ended; "" if that is not to be said."""
        if self._ended is not None:
            return self._ended.get(record.rank, "")
        if record.state == ENDED_WELL:
            return "ended"
        if record.state == FAILED:
            return "ended by an exception"
        if record.elsewhere:
            return f"on {record.host}"
        return "killed or crashed" if record.crashed else "running"

    def events(self) -> list[RankEvents]:
        """Return the operations as events of a trace, one for each rank.

        Ends are not recorded: an operation's event lasts until the process begins its next one, a
        phase's until the next phase.
        """
        ranks: dict[int, RankEvents] = {}
        for record in self.records:  # of a rank that was started again there are several
            ahead = record.wall - record.clock
            names = {track.serial: track.name for track in record.tracks}
            rank = ranks.setdefault(record.rank, RankEvents(record.rank, record.host, 0, False, []))
            if record.count > len(record.operations):
                ranks[record.rank] = rank = rank._replace(full=True)
            now = time.monotonic_ns() if record.alive else 0
            phases = [each for each in record.operations if not each.sequence]
            calls = [each for each in record.operations if each.sequence]
            pairs = (zip_longest(row, row[1:]) for row in (calls, phases))
            for each, later in chain.from_iterable(pairs):
                end = max(later.time if later else now, each.time)
                details = {"what": each.described, "number": each.sequence or None}
                if later is None and not now:
                    details["then"] = self._end(record)
                seconds = [(ahead + moment) / 1e9 for moment in (each.time, end)]
                name = (each.text.split() or ["?"])[0] if each.sequence else each.text
                track = names.get(each.serial, "communicators that are gone")
                details = {key: value for key, value in details.items() if value}
                rank.events.append(Event(name, "flight", seconds[0], seconds[1], track, details))
        return list(ranks.values())

    def gaps(self) -> list[str]:
        """Return what the records do not tell."""
        lines = list(self.refused)
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank in self.absent:
            hosts[self._hosts.get(rank, "")].append(rank)
        for host, ranks in hosts.items():
            where = f"here; on {host}, mpidist flight {self._command} there"
            if not host:
                where = "here: on another node, which has its own, or without room for one"
            elif host == socket.gethostname():
                where = "of this job: without room for one, or not yet started"
            lines.append(f"{ranks_listed(ranks)}: no record {where}")
        for record in self.records:
            if record.torn and not record.alive:
                entries = "an entry is" if record.torn == 1 else f"{record.torn} entries are"
                lines.append(
                    f"rank {record.rank}: {entries} left out: written at its end, or by two "
                    "threads at once"
                )
            if record.unrecorded:
                lines.append(
                    f"rank {record.rank}: {record.unrecorded} communicators had no room in the "
                    "record"
                )
        return lines

    def lines(self) -> list[str]:
        """Return the report: who diverged, where each rank is, and what is not known."""
        return [*self.divergences(), *self.places(), *self.gaps()]

    def few_lines(self, without_places: bool = False) -> list[str]:
        """Return the report for the end of a job, cut to a few lines.

        Without the places of the ranks, and who diverged, after a roll call that has told them.
        """
        lines = self.gaps() if without_places else self.lines()
        if len(lines) > FEW:
            lines[FEW - 1 :] = [f"… {len(lines) - FEW + 1} lines more"]
        return [*lines, f"more: mpidist flight --last 20 {self._command}"]

    @property
    def _command(self) -> str:
        """The argument of ``mpidist flight`` for this job."""
        return self.path.name if self.path.parent == folder() else str(self.path)


def diverged(name: str, members: Sequence[Member]) -> Divergence | None:
    """Return the first operation in which the ranks of a communicator are not alike.

    Not one at which all ranks went on: if all wait for each other before any work, each of them
    raised CollectiveMismatch, which the program has caught.
    """
    lowest, highest = min(m.begun for m in members), max(m.begun for m in members)
    behind = [m for m in members if m.begun == lowest < highest and not m.moves]
    unknown = 0  # numbers up to this one could not be compared between all ranks
    for number in range(max(1, highest - ENTRIES), min(lowest + 1, highest) + 1):
        begun = [m for m in members if m.begun >= number]
        entries = [(m, m.operations[number]) for m in begun if number in m.operations]
        if len(entries) < len(begun):
            unknown = number
        kinds: dict[int, list[tuple[Member, Operation]]] = defaultdict(list)
        for member, operation in entries:
            kinds[operation.fingerprint].append((member, operation))
        caught = number < lowest and all(fingerprint % 2 for fingerprint in kinds)
        if len(kinds) > 1 and not caught:
            late = behind if number > lowest else []
            return _unlike(name, number, list(kinds.values()), late, unknown)
    if not behind:
        return None
    ahead = [m for m in members if m.begun > lowest]
    number = lowest + 1
    first = next((m.operations[number] for m in ahead if number in m.operations), None)
    what = f"#{number} (overwritten)" if first is None else str(first)
    there = "is there" if len(ahead) == 1 else "are there"
    text = f"{name}: {_not_begun(behind)} {what}; {_named(ahead)} {there}"
    if highest > number:
        text += f", up to #{highest}"
    return Divergence(0 if first is None else first.time, text)


def _unlike(
    name: str,
    number: int,
    kinds: list[list[tuple[Member, Operation]]],
    behind: Sequence[Member],
    unknown: int,
) -> Divergence:
    """Return the divergence of ranks that began different operations as the same number.

    Those `behind` have not begun any of that number.
    """
    kinds.sort(key=len)
    texts = [f"{_named([m for m, _ in kind])}: {kind[0][1].described}" for kind in kinds]
    odd = kinds[:-1]
    if len(kinds[-1]) > len(kinds[-2]):
        ranks = _named([m for kind in odd for m, _ in kind])
        text = f"{name}: {ranks} diverged first, at #{number}: {'; '.join(texts)}"
    else:
        text = f"{name}: the ranks diverged first at #{number}: {'; '.join(texts)}"
    if behind:
        text += f"; {_not_begun(behind)} it"
    if unknown:
        text += f" (up to #{unknown} some entries are overwritten, and were not compared)"
    times = [operation.time for kind in kinds for _, operation in kind]
    return Divergence(min(times), text)


def _named(members: Sequence[Member]) -> str:
    return ranks_listed([m.record.rank for m in members])


def _not_begun(members: Sequence[Member]) -> str:
    return f"{_named(members)} {'has' if len(members) == 1 else 'have'} not begun"


def place(record: FlightRecord) -> tuple[str, int, str]:
    """Return where a process is, by its last operation; since when; what line waits, for what.

    The time is as in the record, 0 for none; without a line, it is that of the operation.
    """
    last = record.operations[-1] if record.operations else None
    track = next((t for t in record.tracks if last and t.serial == last.serial), None)
    if last is None:
        return "no operation begun", 0, ""
    what = f"{track.name if track else 'a communicator that is gone'} {last}"
    if track is None:
        where = f"last begun: {what}"
    elif track.ended >= last.sequence:
        where = f"after {what}"
    elif last.background:
        where = f"after the start of {what}"
    elif track.arrived >= last.sequence:
        where = f"in {what}, where all ranks are"
    else:
        where = f"in {what}"
    waiting = max((t for t in record.tracks if t.site), key=lambda t: t.since, default=None)
    if waiting is None:
        return where, last.time, ""
    site = _brief(waiting.site)
    if waiting.awaited:
        site += f" for {waiting.awaited}"
    if waiting.awaited or waiting is not track:  # of another thread, or after a missed deadline
        site += f" ({waiting.name})"
    return where, waiting.since, site


def _brief(site: str) -> str:
    """Return FILE:LINE, relative to this folder for a file below it."""
    return site.removeprefix(working_folder())


def clock(record: FlightRecord, moment: int) -> str:
    """Return a time of a record as the time of day, with hundredths: entries are 4 ms apart."""
    seconds, rest = divmod(record.wall + moment - record.clock, 1_000_000_000)
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest // 10_000_000:02d}"


def jobs() -> list[Path]:
    """Return the folders of this user's jobs whose records are left, the newest first."""
    found = []
    with suppress(OSError):
        for each in folder().iterdir():
            with suppress(OSError):  # a file, or a folder that may not be read
                if records_in(each):
                    found.append((each.stat().st_mtime, each))
    return [each for _, each in sorted(found, reverse=True)]


def discard(path: Path) -> None:
    """Remove the records of a job that has ended well."""
    if path.parent == folder():
        remove(path)


def find(wanted: str | None) -> Path:
    """Return the folder of a job's records, by its path or name; by default the newest."""
    known = jobs()
    if wanted is None:
        if not known:
            raise InvalidArgument(
                f"no flight records in {folder()}: a job leaves none if all its ranks end well"
            )
        return known[0]
    if os.path.isdir(wanted):
        return Path(wanted)
    named = next((path for path in known if path.name == wanted), None)
    if named is None:
        names = ", ".join(path.name for path in known) or "none"
        raise InvalidArgument(
            f"{wanted!r}: expected a folder of flight records, or a job in {folder()}: {names}"
        )
    return named
