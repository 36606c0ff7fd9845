"""Traces: the recorder of one rank's events, and the file of all ranks for Perfetto and Chrome."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from .errors import InvalidArgument
from .foreign import read_file, read_json, typed

LIMIT = 200_000  # events of a rank that are kept, the last ones: about 80 MB, and 40 MB of the file
FORMAT = "mpidist trace 1"
OVERLAPPING = ("background", "bucket")  # categories whose events may overlap on one track
CALLS = "calls"


class Event(NamedTuple):
    """One event of a rank; recorded as a plain tuple of these fields, which is faster.

    Attributes
    ----------
    name : str
        Name on the screen.
    category : str
        Kind of the event, such as "collective", "message", "bucket" or "pipeline".
    begin, end : float
        Seconds of ``time.perf_counter``; in a file's events, of the clock of rank 0.
    track : int or str
        Number of the thread, or name of another track (a row in the viewer).
    details : dict
        Facts that are shown when the event is selected.
    """

    name: str
    category: str
    begin: float
    end: float
    track: int | str
    details: dict[str, Any]


class Served(NamedTuple):
    """How a collective call was performed: by which executor and algorithm, and on what data.

    `algorithm` is None for executors that run none; `nbytes` are those of the whole buffer, the
    larger one of input and result; `op` is None for a collective that does not reduce.
    """

    executor: str
    algorithm: str | None
    nbytes: int
    dtype: Any
    op: Any


class Recorder:
    """The events of this rank, in the order of their ends: the last `limit` passed to `add`."""

    def __init__(self, limit: int = LIMIT):
        self.events: deque[Any] = deque(maxlen=limit)
        self.add = self.events.append

    @property
    def full(self) -> bool:
        """Whether the list of events is full, so that earlier ones may have been dropped."""
        return len(self.events) == self.events.maxlen


_NOTHING = nullcontext()
NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ  # set by Nsight Systems for its programs


class NvtxRange:
    """A context manager that marks a range by NVTX, which Nsight Systems shows."""

    __slots__ = ("name", "push", "pop")

    def __init__(self, name: str, push: Callable[[str], Any], pop: Callable[[], Any]):
        self.name, self.push, self.pop = name, push, pop

    def __enter__(self) -> None:
        self.push(self.name)

    def __exit__(self, *_: object) -> None:
        self.pop()


def profiled(name: str) -> AbstractContextManager:
    """Return a context manager that shows `name` as a range in a running profile.

    It is for PyTorch's profiler, or for Nsight Systems by the NVTX functions of PyTorch, cupy or
    the package nvtx, none of which is imported for it; without a profiler it does nothing.
    """
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is not None and profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return _nvtx_range(name) if NSIGHT else _NOTHING


def _nvtx_range(name: str) -> AbstractContextManager:
    loaded = sys.modules.get
    torch, cupy, nvtx = loaded("torch"), loaded("cupy"), loaded("nvtx")
    if torch is not None and torch.version.cuda is not None:  # without CUDA its functions raise
        return NvtxRange(name, torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    if cupy is not None:
        return NvtxRange(name, cupy.cuda.nvtx.RangePush, cupy.cuda.nvtx.RangePop)
    return _NOTHING if nvtx is None else NvtxRange(name, nvtx.push_range, nvtx.pop_range)


# -- the events of all ranks ----------------------------------------------------------------------


class RankEvents(NamedTuple):
    """The events of one rank, in seconds of the clock of rank 0.

    Attributes
    ----------
    rank : int
        The rank.
    host : str
        Host of the rank.
    error : float
        Largest error, in seconds, of the conversion to the clock of rank 0.
    full : bool
        Whether earlier events may have been dropped.
    events : list of Event
        The events; `track` 0 is the thread that began the trace.
    """

    rank: int
    host: str
    error: float
    full: bool
    events: list[Event]


def add_waits(ranks: Sequence[RankEvents]) -> None:
    """Add to the details of collectives and receives how long they waited for others (`wait_us`).

    A collective waits from its own begin to the last begin on any rank, a receive from its own
    begin to that of the send.  A collective also gets the rank that began it last (`last_rank`).
    The send and the receive of one message get the same number as their detail `flow`, by which
    :func:`write` draws an arrow between them; the receive also gets the begin of the send (`sent`).
    """
    calls: dict[Any, list[tuple[int, Event]]] = {}
    sends: dict[Any, deque[Event]] = {}
    receives: dict[Any, deque[Event]] = {}
    for part in ranks:
        for event in part.events:
            details = event.details
            place = details.get("comm")
            if place is None:
                continue
            name, rank, size = place
            if "call" in details:
                calls.setdefault((name, details["call"], size), []).append((part.rank, event))
            elif "to" in details:
                key = name, rank, details["to"], details["tag"], details["kind"]
                sends.setdefault(key, deque()).append(event)
            elif "from" in details:
                key = name, details["from"], rank, details["tag"], details["kind"]
                receives.setdefault(key, deque()).append(event)
    for (_, _, size), found in calls.items():
        if len({rank for rank, _ in found}) == size:
            last, rank = max((event.begin, rank) for rank, event in found)
            for _, event in found:
                event.details["last_rank"] = rank
                _wait(event, last)
    if any(part.full for part in ranks):
        return  # messages are matched by their order
    flow = 0
    for key, coming in receives.items():
        for sent, event in zip(sends.get(key, ()), sorted(coming, key=lambda e: e.begin)):
            _wait(event, sent.begin)
            if event.end > sent.begin:
                flow += 1
                sent.details["flow"] = event.details["flow"] = flow
                event.details["sent"] = sent.begin


def _wait(event: Event, until: float) -> None:
    seconds = min(max(until - event.begin, 0.0), event.end - event.begin)
    event.details["wait_us"] = round(seconds * 1e6, 1)


def write(path: str | Path, ranks: Sequence[RankEvents]) -> None:
    """Write a file in the trace-event format, which ui.perfetto.dev and chrome://tracing open.

    In the file, each rank is a process, and each thread or other track is a thread.  Times are in
    microseconds from the first event.
    """
    begins = [event.begin for part in ranks for event in part.events]
    origin = min(begins, default=0.0)
    about = {
        "format": FORMAT,
        "clock_error_us": [round(part.error * 1e6, 1) for part in ranks],
        "dropped_events": [part.rank for part in ranks if part.full],
    }
    rows = (json.dumps(row) for part in ranks for row in _rows(part, origin, len(ranks)))
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(about)},\n')
        file.write('"traceEvents": [\n')
        for number, row in enumerate(rows):
            file.write((",\n" if number else "") + row)
        file.write("\n]}\n")


def _rows(part: RankEvents, origin: float, size: int) -> Iterator[dict[str, Any]]:
    """Yield one rank's rows of the file: titles of the tracks, events, ends of arrows.

    `origin` is the time of the first event of all ranks, which becomes 0.
    """
    pid, tracks = part.rank, _tracks(part.events)
    # Perfetto takes the threads 0 and `pid` of a process for one, its main thread.
    tids = {track: size + at if at else pid for at, track in enumerate(tracks)}
    clock = f"clock ± {part.error * 1e6:.1f} µs" if part.error else ""
    known = ", ".join(filter(None, (part.host, clock)))
    # Perfetto writes the number of the process, which is the rank again, behind its name.
    yield _about(pid, pid, "process_name", name=f"rank {pid} ({known})" if known else f"rank {pid}")
    yield _about(pid, pid, "process_sort_index", sort_index=pid)
    for at, (track, tid) in enumerate(tids.items()):
        yield _about(pid, tid, "thread_name", name=_title(track))
        yield _about(pid, tid, "thread_sort_index", sort_index=at)
    for number, event in enumerate(part.events):
        args = {k: v for k, v in event.details.items() if k not in ("flow", "sent")}
        if "comm" in args:
            args["comm"] = args["comm"][0]
        tid, begin = tids[event.track], _us(event.begin - origin)
        row = {"name": event.name, "cat": event.category, "pid": pid, "tid": tid}
        if event.category in OVERLAPPING:
            row["id2"] = {"local": f"{number}"}  # with "id", Perfetto shows it outside the process
            yield {**row, "ph": "b", "ts": begin, "args": args}
            yield {**row, "ph": "e", "ts": _us(event.end - origin)}
            continue
        end = _us(event.end - origin)
        yield {**row, "ph": "X", "ts": begin, "dur": round(end - begin, 3), "args": args}
        if "flow" not in event.details:
            continue
        arrow = {**row, "name": "message", "id": event.details["flow"]}
        if "to" in args:
            yield {**arrow, "ph": "s", "ts": begin}
            continue
        # Perfetto turns an arrow round that leads to an earlier event: it leads to this part of it.
        sent = _us(event.details["sent"] - origin)
        if sent > begin:
            row |= {"name": "transfer", "cat": "transfer"}
            yield {**row, "ph": "X", "ts": sent, "dur": round(end - sent, 3)}
        yield {**arrow, "ph": "f", "bp": "e", "ts": end}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _tracks(events: Iterable[Event]) -> list[int | str]:
    """Return the tracks: threads in ascending order, then named tracks by name."""
    found = {event.track for event in events}
    threads = sorted(track for track in found if isinstance(track, int))
    named = sorted(track for track in found if isinstance(track, str))
    return [*threads, *named]


def _title(track: int | str) -> str:
    if isinstance(track, str):
        return track
    return f"{CALLS} of thread {track}" if track else CALLS


def _about(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the "traceEvents" of a file that :func:`write` wrote: one dict for each row.

    Raises
    ------
    InvalidArgument
        If the file cannot be read, or is not a trace of mpidist.
    """
    try:
        data = read_json(read_file(path, longest=1 << 30), "it", longest=1 << 30)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"trace {path}: cannot be read: {error}") from error
    about = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InvalidArgument(
            f"trace {path}: its format is not {FORMAT!r}: expected a trace of mpidist"
        )
    try:
        return typed(data.get("traceEvents"), list[dict[str, Any]], "traceEvents")
    except TypeError as error:
        raise InvalidArgument(f"trace {path}: {error}") from None
