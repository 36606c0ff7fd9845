"""The roll call of a job that hangs: where each rank is, those alike together, the odd one first.

Looking at a process changes nothing in it.  ``mpidist run`` asks the monitors, which look at their
ranks; without monitors, and for ``mpidist rollcall``, it looks at the processes of this host.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ..backends.flight import FlightRecord, read
from ..communicator.launcher_notes import OF_MPI, SPARE, launched_rank
from ..communicator.stack_signal import stack_file
from ..errors import InvalidArgument
from ..measure import counted
from .failures import ranks_listed
from .flight import Job, clock, find, jobs, place
from .processes import below, families, stat
from .ranks import Seen
from .stacks import stacks

SAMPLE = 0.2  # seconds over which the use of the processor is measured
BUSY = 10.0  # percent of a core from which a child of a rank is named
GROUPS = 16  # of ranks that are printed
_TICKS = os.sysconf("SC_CLK_TCK")


def look(ranks: Mapping[int, str]) -> list[Seen]:
    """Return where ranks are; `ranks` has the folder of flight records, or "", by process id.

    A process may be a shell around the program.
    """
    children = families()
    programs = {pid: program_of(below(pid, children)) for pid in ranks}
    families_of = {pid: below(pid, children) for pid in programs.values()}
    everybody = [pid for family in families_of.values() for pid in family]
    begun, before = time.monotonic(), {pid: _ticks(pid) for pid in everybody}
    states = {pid: _state(pid) for pid in everybody}
    seen = []
    for given, folder in ranks.items():
        pid = programs[given]
        call, since = _call(Path(folder), pid) if folder else ("", "")
        seen.append(Seen(pid, states[pid], 0, _memory(pid), call, since))
    found = stacks(list(programs.values()))
    time.sleep(max(0.0, begun + SAMPLE - time.monotonic()))
    share = 100 / _TICKS / (time.monotonic() - begun)
    cpu = {pid: max(0, _ticks(pid) - before[pid]) * share for pid in everybody}
    for one in seen:
        one.cpu, one.frames, one.why = cpu[one.pid], list(found[one.pid].frames), found[one.pid].why
        busy = (p for p in families_of[one.pid][1:] if cpu[p] >= BUSY or states[p] == "R")
        texts = (f"{p} ({_name(p)}): state {states[p]}, {cpu[p]:.0f} % CPU" for p in busy)
        one.workers = list(islice(texts, 8))
    return seen


def program_of(pids: Sequence[int]) -> int:
    """Return the process of a rank's program, among those from the first one down.

    It is the first that can be asked for its stack, else the first that runs Python.
    """
    python = [pid for pid in pids if os.path.basename(_link(f"/proc/{pid}/exe"))[:6] == "python"]
    return next((pid for pid in python if stack_file(pid)), (python or pids)[0])


def ranks_below(pid: int) -> dict[int, int]:
    """Return the first process of each rank below a launcher, by the variables of its launch."""
    found: dict[int, int] = {}
    for each in below(pid, families())[1:]:
        with suppress(OSError):
            text = Path(f"/proc/{each}/environ").read_bytes().decode(errors="replace")
            environ = dict(pair.partition("=")[::2] for pair in text.split("\0"))
            rank = launched_rank(environ, OF_MPI)
            if rank is not None:
                found.setdefault(rank, each)
    return found


def called(wanted: str | None) -> list[str]:
    """Return where the ranks of a job are whose processes run on this host, by their records.

    `wanted` is its name or folder, None for the newest that runs; InvalidArgument if none does.
    """
    found = [find(wanted)] if wanted is not None else jobs()
    for path in found:
        try:
            job = Job(path)
        except InvalidArgument:
            if wanted is not None:
                raise
            continue  # it has just ended
        if any(each.alive for each in job.records):
            break
    else:
        where = f"no process of {found[0].name}" if wanted is not None else "no job with records"
        raise InvalidArgument(
            f"{where} runs here as this user: expected a running job of mpidist flight --list; for "
            "other programs, send SIGQUIT to mpidist run"
        )
    alive = {each.rank: each.pid for each in job.records if each.alive}
    seen = dict(zip(alive, look(dict.fromkeys(alive.values(), str(job.path)))))
    absent = [each for each in range(job.ranks) if each not in alive]
    head = f"job {job.path.name}: roll call of {counted(job.ranks, 'rank')}"
    last = [f"{ranks_listed(absent)}: no process here"] if absent else []
    return [head, *job.divergences(), *lines(seen, {}), *last]


def lines(seen: Mapping[int, Seen], hosts: Mapping[int, str]) -> list[str]:
    """Return where ranks are: two lines for each group of ranks in one call with one stack.

    Those that wait for others come last, spares behind them, else the smallest group first.
    `hosts` has the hosts of ranks that are to be named.
    """
    Stacks = dict[tuple[str, ...], list[int]]
    by_call: dict[tuple[bool, str], Stacks] = defaultdict(lambda: defaultdict(list))
    for rank, one in seen.items():
        by_call[one.stopped, one.call][tuple(one.frames)].append(rank)
    groups = []
    for of_call in by_call.values():
        # A rank without a stack, which has raised an exception, is in the same call as the others.
        bare = of_call.pop((), [])
        others = list(of_call.values())
        if others:
            max(others, key=len).extend(bare)
        groups += others or [bare]

    def order(group: list[int]) -> tuple[bool, bool, int, bool, int]:
        waits, call = any(seen[rank].waits for rank in group), seen[group[0]].call
        return SPARE in call, waits, len(group), call.startswith("in "), min(group)

    groups.sort(key=order)
    found = []
    for group in groups[:GROUPS]:
        found += _described(sorted(group), seen, hosts)
    if len(groups) > GROUPS:
        left = sorted(rank for group in groups[GROUPS:] for rank in group)
        found.append(f"{ranks_listed(left)}: in {len(groups) - GROUPS} more groups")
    return found


def _described(group: list[int], seen: Mapping[int, Seen], hosts: Mapping[int, str]) -> list[str]:
    """Return the lines of one group."""
    all_of = [seen[rank] for rank in group]
    first = max(all_of, key=lambda one: (len(one.frames), one.since.startswith("waiting")))
    states = sorted({one.state for one in all_of})
    low, high = min(one.cpu for one in all_of), max(one.cpu for one in all_of)
    cpu = f"{low:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f} to {high:.0f}"
    small, large = (f(one.memory for one in all_of) >> 20 for f in (min, max))
    memory = f"{small}" if small == large else f"{small} to {large}"
    told = [f"{first.call}{first.since and f', {first.since}'}"] if first.call else []
    told.append(f"state {', '.join(states[:3])}, {cpu} % CPU, {memory} MiB")
    if len(group) == 1:
        host = hosts.get(group[0], "")
        told.append(f"pid {first.pid}{host and f' on {host}'}")
    found = [f"{ranks_listed(group)}: {'; '.join(told)}"]
    if first.frames:
        found.append(f"    {' < '.join(first.frames)}")
    elif first.why:
        found.append(f"    no stack: {first.why}")
    return found + [f"    child {text}" for one in all_of[:4] for text in one.workers]


def _call(folder: Path, pid: int) -> tuple[str, str]:
    """Return where a process is by its flight record, and since when."""
    for path in folder.glob(f"rank-*.{pid}"):
        try:
            return _since(read(path))
        except ValueError as error:
            return str(error), ""
    return "", ""


def _since(record: FlightRecord) -> tuple[str, str]:
    """Return where a process of this host is by its record, and since when, with the seconds."""
    where, moment, site = place(record)
    if not moment:
        return where, ""
    ago = max(0.0, (time.monotonic_ns() - moment) / 1e9)
    what, line = ("waiting since", f" in {site}") if site else ("begun", "")
    return where, f"{what} {clock(record, moment)} ({ago:.0f} s ago){line}"


def _state(pid: int) -> str:
    """Return the state of a process, and what it waits for in the kernel."""
    state = next(iter(stat(pid)), "has ended")
    with suppress(OSError):
        if state == "R":
            return state
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
        return f"{state} ({where})" if where not in ("", "0") else state
    return state


def _ticks(pid: int) -> int:
    fields = stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _memory(pid: int) -> int:
    fields = stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "?"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
