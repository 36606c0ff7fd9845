"""``comm.trace(path)``: every call of a communicator, and of those split from it, recorded."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from time import perf_counter
from types import CodeType
from typing import Any, Protocol

import numpy as np

from .. import trace
from ..engine.call_site import WITHIN, users_frame
from ..engine.service import Service
from ..engine.work import Work
from ..errors import InvalidArgument, MpidistError
from ..measure import Messenger
from ..schedule.contract import COLLECTIVES
from ..topology import Topology
from ..trace import Event, RankEvents, Recorder, Served, add_waits, profiled, write
from .agreement import Group, from_rank_0

log = logging.getLogger("mpidist")
_PROFILER = "torch.autograd.profiler"
_DETAILS = ("call", "comm", "served", "code", "instruction")  # of a collective
TRIPS = 20  # round trips to a node, of which the shortest counts

OBJECTS = (
    *("broadcast_object", "allgather_object", "gather_object", "scatter_object"),
    *("alltoall_object", "reduce_object", "allreduce_object"),
)
SENDS = {"send": "array", "isend": "array", "send_object": "object", "post_send": "posted"}
RECEIVES = {"recv": "array", "irecv": "array", "recv_object": "object", "post_recv": "posted"}
OTHERS = ("wait_all", "split", "empty")
METHODS = (
    *(*COLLECTIVES, *(f"i{name}" for name in COLLECTIVES)),
    *(*OBJECTS, *SENDS, *RECEIVES, *OTHERS),
)


class Traceable(Group, Messenger, Protocol):
    """The members of a communicator that a trace uses."""

    name: str
    size: int
    timeout: float | None
    traced: Traced | None
    _service: Service
    _find: Callable[..., Any]
    _alike: Callable[..., Any]

    @property
    def topology(self) -> Topology:
        """The ranks of each node."""

    @property
    def parts(self) -> Iterable[Traceable]:
        """The communicators split from this one."""

    @property
    def freed(self) -> bool:
        """Whether the communicator was freed."""

    def split(self, color: int) -> Traceable | None:
        """Return a communicator of the ranks with the same color."""

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the objects of all ranks on rank 0, None elsewhere."""

    def free(self) -> None:
        """Free the communicator."""


class Traced:
    """The recording of one communicator in a trace.

    `place` is the communicator's name, rank and size; `calls` counts its blocking collectives,
    which is the same on every rank; `served` is how the last call was served.
    """

    __slots__ = ("tracing", "recorder", "add", "place", "calls", "served")

    def __init__(self, tracing: Tracing, comm: Traceable):
        self.tracing, self.recorder, self.add = tracing, tracing.recorder, tracing.recorder.add
        self.place, self.calls = (comm.name, comm.rank, comm.size), 0
        self.served: Served | None = None


class Tracing:
    """A trace that is being recorded, until :meth:`stop` or the end of its ``with`` block.

    Attributes
    ----------
    path : str
        The file that rank 0 writes.
    recorder : Recorder
        The events of this rank.
    """

    def __init__(self, comm: Traceable, path: Any):
        self.path, self.recorder, self._comm = str(path), Recorder(), comm
        self._thread, self._clock = threading.get_ident(), clock_offset(comm)
        self._began = perf_counter()
        self._traced: list[Traceable] = []
        _check_path(comm, self.path)
        _METHODS.replace(type(comm))
        self.attach(comm)

    def __enter__(self) -> Tracing:
        """Return this trace."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the file, unless the block raised: ranks that did not raise would not take part.

        The exception passes on unchanged.
        """
        if kind is None:
            self.stop()
        else:
            self.detach()
            log.warning("%s: no trace is written: %s", self.path, kind.__name__)

    def attach(self, comm: Traceable) -> None:
        """Record the calls of a communicator, and of those split from it."""
        self._traced.append(comm)
        _observe(comm, Traced(self, comm))
        for part in comm.parts:
            if not part.freed:
                self.attach(part)

    def detach(self) -> None:
        """Stop recording the calls of all communicators, without communication."""
        if self._traced:
            _METHODS.restore(type(self._comm))
        for comm in self._traced:
            _observe(comm, None)
        self._traced = []

    def end_with(self, comm: Traceable) -> None:
        """Stop and write the file if `comm`, about to be freed, is the one that began the trace."""
        if comm is self._comm:
            self.stop()

    # -- the file ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the recording, and write the events of all ranks on rank 0; collective.

        A second call does nothing.

        Raises
        ------
        InvalidArgument
            On every rank, if the file cannot be written.
        """
        comm = self._comm
        if not self._traced:
            return
        self.detach()
        recorded, ended = self.recorder.events, perf_counter()
        offset, error = clock_offset(comm)
        first, error = self._clock[0], max(error, self._clock[1])
        # Clocks of two nodes drift apart: the offset is taken as a line through both comparisons.
        drift = (offset - first) / max(ended - self._began, 1e-9)
        events = []
        for name, category, begin, end, track, *details in recorded:
            begin -= first + drift * (begin - self._began)
            end -= first + drift * (end - self._began)
            events.append(Event(name, category, begin, end, track, _plain(details)))
        events = _numbered_threads(events, self._thread)
        mine = RankEvents(comm.rank, socket.gethostname(), error, self.recorder.full, events)
        recorded.clear()
        ranks = comm.gather_object(mine) or []

        def save() -> None:
            add_waits(ranks)
            with writing(self.path):
                write(self.path, ranks)
            worst = max(part.error for part in ranks) * 1e6
            log.info(
                "trace of %d ranks: %s; clocks agree within %.1f µs", comm.size, self.path, worst
            )

        from_rank_0(comm, save, "trace()")


def clock_offset(comm: Traceable) -> tuple[float, float]:
    """Return this rank's clock minus that of rank 0, and the largest possible error; collective.

    Both are in seconds.  The ranks of a node share one clock, so one rank of each node answers
    messages of rank 0 with its time.  Of several round trips the shortest counts: its answer is
    taken to be from the middle of the trip, so the error is at most half of the trip.
    """
    groups = comm.topology.groups
    if len(groups) == 1:
        return 0.0, 0.0
    own = comm.split(0)  # no message of the user's is taken for one of these
    assert own is not None
    leaders = [group[0] for group in groups if 0 not in group]
    found, time = {0: (0.0, 0.0)}, np.zeros(1)
    for leader in leaders:
        shortest = float("inf")
        for _ in range(TRIPS if own.rank in (0, leader) else 0):
            if own.rank:
                own.recv(time, 0)
                own.send(np.array([perf_counter()]), 0)
                continue
            begin = perf_counter()
            own.send(time, leader)
            own.recv(time, leader)
            trip = perf_counter() - begin
            if trip < shortest:
                shortest, found[leader] = trip, (float(time[0]) - begin - trip / 2, trip / 2)
    found = own.broadcast_object(found)
    own.free()
    mine = next(group for group in groups if comm.rank in group)
    return found[0 if 0 in mine else mine[0]]


def _check_path(comm: Traceable, path: str) -> None:
    """Raise InvalidArgument on every rank if rank 0 cannot write the file."""

    def check() -> None:
        with writing(path), open(path, "a", encoding="utf-8"):
            pass

    from_rank_0(comm, check, "trace()")


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Return a context in which an OSError of rank 0 becomes InvalidArgument, with the path."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"rank 0: trace({str(path)!r}) cannot be written: {error}") from error


# -- recording -------------------------------------------------------------------------------------


def _observe(comm: Traceable, traced: Traced | None) -> None:
    """Let `traced` record how each further call is served; None ends the recording."""
    service, find, alike = comm._service, comm._service.programs.find, comm._service.programs.alike
    comm.traced, comm._find, comm._alike, service.note = traced, find, alike, None
    if traced is None:
        return

    def note(served: Served) -> None:
        traced.served = served

    def finding(key: Any, x: Any, out: Any) -> Any:
        bound = find(key, x, out)
        if bound is not None:
            traced.served = bound.served
        return bound

    def finding_alike(key: Any, x: Any, out: Any) -> Any:
        found = alike(key, x, out)
        if found is not None:
            traced.served = found.bound.served
        return found

    comm._find, comm._alike, service.note = finding, finding_alike, note


class _Methods:
    """The communicator's methods, replaced by recording ones while a trace runs in this process.

    So a call without a trace takes no extra time.  The methods are replaced in the class: set
    on each object they would make it hold more than 30 attributes, after which Python finds every
    attribute of the object more slowly, 0.2 µs a call.
    """

    def __init__(self) -> None:
        self._lock, self._traces = threading.Lock(), 0
        self._plain: dict[str, Callable[..., Any]] = {}

    def replace(self, kind: type) -> None:
        """Replace the methods of the class `kind` by recording ones, once for all traces."""
        with self._lock:
            self._traces += 1
            if self._traces == 1:
                self._plain = {name: vars(kind)[name] for name in METHODS}
                for name, method in self._plain.items():
                    setattr(kind, name, _recorder_of(name, method))

    def restore(self, kind: type) -> None:
        """Restore the plain methods of the class `kind` when the last trace has ended."""
        with self._lock:
            self._traces -= 1
            if not self._traces:
                for name, method in self._plain.items():
                    setattr(kind, name, method)


_METHODS = _Methods()


def _recorder_of(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name in SENDS:
        return _recording(name, "message", method, _endpoints("to", SENDS[name], 0))
    if name in RECEIVES:
        at = -1 if name == "recv_object" else 0
        return _recording(name, "message", method, _endpoints("from", RECEIVES[name], at))
    if name in OTHERS:
        return _recording(name, "call", method, _description)
    if name in COLLECTIVES:
        return _recording_collective(name, method)
    return _recording(name, "object" if name in OBJECTS else "begin", method, None)


_COLLECTIVE = """
def call({parameters}):
    traced = self.traced
    if traced is None:
        return method({arguments})
    traced.served = None
    traced.calls = number = traced.calls + 1
    begin = now()
    try:
        profiler = modules.get(PROFILER)
        if not NSIGHT and (profiler is None or not profiler._is_profiler_enabled):
            return method({arguments})
        with profiled(profile):
            return method({arguments})
    finally:
        record(traced, name, begin, now(), number)
"""


def _recording_collective(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a blocking collective wrapped to record each call, which adds about 0.8 µs.

    The wrapper is compiled with the parameters of `method`: Python takes 0.4 µs to pass on
    ``*args, **options``.
    """
    names: dict[str, Any] = {
        **{"method": method, "name": name, "profile": f"mpidist.{name}", "record": _record},
        **{"modules": sys.modules, "now": perf_counter, "PROFILER": _PROFILER},
        **{"profiled": profiled, "NSIGHT": trace.NSIGHT},
    }
    parameters, arguments = [], []
    for each in signature(method).parameters.values():
        keyword = each.kind is each.KEYWORD_ONLY
        if keyword and "*" not in parameters:
            parameters.append("*")
        optional = each.default is not each.empty
        names[f"default_{each.name}"] = each.default
        parameters.append(f"{each.name}=default_{each.name}" if optional else each.name)
        arguments.append(f"{each.name}={each.name}" if keyword else each.name)
    source = _COLLECTIVE.format(parameters=", ".join(parameters), arguments=", ".join(arguments))
    exec(compile(source, __file__, "exec"), names)
    return wraps(method)(names["call"])


def _record(traced: Traced, name: str, begin: float, end: float, number: int) -> None:
    """Record a blocking collective, the communicator's `number`, for the wrapper that ran it."""
    frame = sys._getframe(2)
    if WITHIN[frame.f_code.co_filename]:
        frame = users_frame(frame)
    code = frame.f_code
    # The _DETAILS are part of the event: a dict, or a tuple of their own, would cost 0.4 µs more.
    thread, place, served = threading.get_ident(), traced.place, traced.served
    traced.add((name, "collective", begin, end, thread, number, place, served, code, frame.f_lasti))


def _recording(
    name: str,
    category: str,
    method: Callable[..., Any],
    facts: Callable[[tuple, dict], dict[str, Any]] | None,
) -> Callable[..., Any]:
    """Return `method` wrapped to record each call; `facts` reads details from the arguments."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        traced = self.traced
        if traced is None:
            return method(self, *args, **options)
        traced.served = None
        begin = perf_counter()
        details: dict[str, Any] = {} if facts is None else facts(args, options)
        try:
            with profiled(f"mpidist.{name}"):
                result = method(self, *args, **options)
        finally:
            frame = users_frame(sys._getframe(1))
            details |= {"comm": traced.place, "code": frame.f_code, "instruction": frame.f_lasti}
            if category == "begin":
                details["served"] = traced.served
            traced.add((name, category, begin, perf_counter(), threading.get_ident(), details))
        if type(result) is Work:
            _watch(traced, result, name, begin, details)
        return result

    return call


def _watch(traced: Traced, work: Work, name: str, begin: float, details: dict[str, Any]) -> None:
    """Register callbacks on `work` that record its end and each wait for it in a trace."""
    add = traced.add
    kept = ("served", "code", "instruction", "comm", "bytes")
    known = {k: v for k, v in details.items() if k in kept}

    def ended() -> None:
        add((name, "background", begin, perf_counter(), "background", known))

    def waited(since: float) -> None:
        add((f"wait for {name}", "wait", since, perf_counter(), threading.get_ident(), known))

    work.observe(ended, waited)


def _endpoints(direction: str, kind: str, at: int) -> Callable[[tuple, dict], dict[str, Any]]:
    """Return the function that reads peer, tag and bytes from the arguments of send, recv, ….

    `direction` names the peer in the details; the array is argument `at`, or none if that is -1.
    """

    def facts(args: tuple, options: dict) -> dict[str, Any]:
        given = len(args)
        x = args[at] if given > at >= 0 else None
        return {
            direction: args[at + 1] if given > at + 1 else options.get("peer"),
            "tag": args[at + 2] if given > at + 2 else options.get("tag", 0),
            "kind": kind,
            "bytes": getattr(x, "nbytes", None),
        }

    return facts


def _description(args: tuple, options: dict) -> dict[str, Any]:
    """Return a call's second argument, such as `what` of ``wait_all``, as an event's details."""
    what = args[1] if len(args) > 1 else options.get("what")
    return {"what": what}


# -- details in the file ---------------------------------------------------------------------------


def _plain(details: list[Any]) -> dict[str, Any]:
    """Return the details of an event as a dict of values that JSON can hold.

    `details` has a dict as its only item, or the values for the names in _DETAILS.
    """
    facts = details[0] if len(details) == 1 else dict(zip(_DETAILS, details))
    plain: dict[str, Any] = {}
    for key, value in facts.items():
        if key == "code":
            plain["site"] = _written(value, facts["instruction"])
        elif key == "served":
            if value is not None:
                plain |= {"bytes": value.nbytes, "dtype": str(value.dtype), "op": value.op}
                plain |= {"executor": value.executor, "algorithm": value.algorithm}
        elif value is not None and key != "instruction":
            plain[key] = _as_json(value() if callable(value) else value)
    return {key: value for key, value in plain.items() if value is not None}


def _as_json(value: Any) -> Any:
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _written(code: CodeType, instruction: int) -> str:
    """Return "FILE:LINE" of the bytecode instruction at an offset in `code`."""
    line = next((n for a, b, n in code.co_lines() if a <= instruction < b), None)
    return f"{code.co_filename}:{line or code.co_firstlineno}"


def _numbered_threads(events: list[Event], first: int) -> list[Event]:
    """Return the events with small numbers for thread ids: 0 for `first`, which began the trace."""
    numbers: dict[int | str, int | str] = {first: 0}
    for event in events:
        if isinstance(event.track, int):
            numbers.setdefault(event.track, len(numbers))
    return [event._replace(track=numbers.get(event.track, event.track)) for event in events]


def stop_at_exit(comm: Traceable) -> None:
    """Write a communicator's trace at the end of the program, without a deadline for slow ranks."""
    if comm.traced is None:
        return
    comm.timeout = None  # as MPI_Finalize, which comes next: a slow rank is no failure
    try:
        comm.traced.tracing.stop()
    except MpidistError as error:
        sys.stderr.write(f"{error}\n")
