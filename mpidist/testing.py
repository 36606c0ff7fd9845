"""A conformance check for backends: it tests a backend against the interface of `Backend`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .backends.base import SHORT_BYTES, Backend, Native, RoundMessage, complete
from .communicator.communicator import Communicator
from .errors import CollectiveMismatch, DeadlockError
from .schedule import algorithms

_PATIENCE = 20.0  # seconds
_MEMBERS = {*Backend.__annotations__, *(n for n in vars(Backend) if not n.startswith("_"))}
_NATIVE_MEMBERS = {n for n in vars(Native) if not n.startswith("_")}


def check_backend(make_group: Callable[[], Sequence[Backend]], timeout: float = 60.0) -> list[str]:
    """Check that a backend fulfils the interface :class:`~mpidist.backends.base.Backend`.

    Parameters
    ----------
    make_group : callable
        Returns the backends of the ranks in this process: of all ranks if ranks are threads (each
        backend is then run in a thread), one backend if every process is a rank.  It is called
        once; every process must call this function.
    timeout : float
        Limit in seconds for all checks together, where the ranks are threads.

    Returns
    -------
    list of str
        The names of the checks.

    Raises
    ------
    AssertionError
        If a check fails; the message begins with the check and the rank.
    """
    backends = [complete(backend) for backend in make_group()]
    assert backends, "make_group() returned no backend"
    if len(backends) == 1:
        _check_rank(backends[0])
    else:
        _in_threads(backends, timeout)
    return [check.__name__.strip("_") for check in _CHECKS]


def _in_threads(backends: Sequence[Backend], timeout: float) -> None:
    errors: list[BaseException] = []

    def body(backend: Backend) -> None:
        try:
            _check_rank(backend)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(b,), daemon=True) for b in backends]
    until = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors and time.monotonic() < until:
            thread.join(0.05)
    if errors:
        raise errors[0]
    assert not any(t.is_alive() for t in threads), f"the checks did not end within {timeout} s"


def _check_rank(backend: Backend) -> None:
    for check in _CHECKS:
        try:
            check(backend)
        except Exception as error:
            where = f"{check.__name__.strip('_')}, rank {backend.rank}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


def _wait(backend: Backend, *requests: Any) -> None:
    deadline = time.monotonic() + _PATIENCE

    def test() -> bool:
        complete = [request.test() for request in requests]  # test all: each makes progress
        return all(complete)

    assert backend.wait(test, deadline), f"messages are not complete within {_PATIENCE} s"


def _neighbours(backend: Backend) -> tuple[int, int]:
    return (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size


def _attributes(backend: Backend) -> None:
    missing = sorted(_MEMBERS.difference(dir(backend)))
    assert not missing, f"members of mpidist.backends.base.Backend missing: {', '.join(missing)}"
    assert 0 <= backend.rank < backend.size
    assert len(backend.hosts) == backend.size, "hosts: expected one key for each rank"
    assert backend.tag_limit >= 32767, f"tag_limit={backend.tag_limit}: expected >= 32767"
    assert backend.name and isinstance(backend.name, str)


def _data_arrive(backend: Backend) -> None:
    """Data of any length and dtype arrive, both ways at once; sends do not wait for receives."""
    if backend.size == 1:
        return
    right, left = _neighbours(backend)
    for n in (0, 1, 7, 300_000):
        for dtype in ("u1", "f8", ">i4", "S3"):
            data = np.full(n, backend.rank).astype(dtype)
            sent = backend.isend(data, right, 5)
            got = np.empty(n, dtype)
            _wait(backend, backend.irecv(got, left, 5), sent)
            assert (got == np.full(n, left).astype(dtype)).all(), f"{n} x {dtype}"


def _short_messages(backend: Backend) -> None:
    """Short messages of 0 … `SHORT_BYTES` bytes arrive; the receiver does not know the length."""
    if backend.size == 1:
        return
    right, left = _neighbours(backend)
    early = backend.irecv_short(left, 7)
    for n in (SHORT_BYTES, 0, 1, 100):
        content = bytes([backend.rank + 1]) * n
        sent = backend.isend_short(content, right, 7)
        received = early if n == SHORT_BYTES else backend.irecv_short(left, 7)
        _wait(backend, received, sent)
        assert received.content[:n] == bytes([left + 1]) * n, f"{n} bytes"
        received.release()


def _order_and_tags(backend: Backend) -> None:
    """Messages of one tag keep their order, whatever messages of other tags come between."""
    if backend.size == 1:
        return
    right, left = _neighbours(backend)
    tags = (0, 1, 1000, backend.tag_limit - 1)
    boxes = {tag: [np.empty(1, int) for _ in range(3)] for tag in tags}
    early = [backend.irecv(box, left, 1) for box in boxes[1]]  # posted before they are sent
    data = [np.array([10 * tag + k]) for k in range(3) for tag in tags]
    sent = [backend.isend(d, right, tag) for d, tag in zip(data, tags * 3)]
    late = [backend.irecv(box, left, tag) for tag in tags[::-1] if tag != 1 for box in boxes[tag]]
    _wait(backend, *early[::-1], *late, *sent)
    for tag in tags:
        assert [int(box[0]) for box in boxes[tag]] == [10 * tag + k for k in range(3)], f"tag {tag}"


def _bound_rounds(backend: Backend) -> None:
    """A transfer of ``bind``, if it returns one, sends what the memory has at each start."""
    right, left = _neighbours(backend)
    data, got = np.empty(50), np.empty(50)
    transfer = None
    if backend.size > 1:
        transfer = backend.bind(
            [RoundMessage(True, left, got, 9), RoundMessage(False, right, data, 9)]
        )
    if transfer is None:
        return
    for turn in range(3):
        data[:], got[:] = 100 * turn + backend.rank, -1
        transfer.start()
        _wait(backend, transfer)
        assert (got == 100 * turn + left).all(), f"start number {turn + 1}"


def _waits_end(backend: Backend) -> None:
    """Waits call `progress`; they end at the deadline, or by DeadlockError if all would wait."""
    alone = backend.split(backend.rank, 0)
    assert alone is not None and alone.size == 1
    assert alone.wait(lambda: True, None)
    looks, called = [0], [0]

    def later() -> bool:
        looks[0] += 1
        return looks[0] > 400

    def progress() -> None:
        called[0] += 1

    begin = time.monotonic()
    try:
        assert alone.wait(later, begin + _PATIENCE, progress)
        assert called[0], "progress was never called"
        begin = time.monotonic()
        assert not alone.wait(lambda: False, begin + 0.05)
        assert 0.04 < time.monotonic() - begin < 5, "the deadline was not kept"
    except DeadlockError:
        pass  # the backend knows that no rank will send anything


def _in_step(backend: Backend, sequence: int) -> None:
    backend.board.announce(sequence, 1)
    deadline = time.monotonic() + _PATIENCE
    assert backend.arrive(sequence, deadline), "arrive: a rank is missing on the board"


def _arrivals(backend: Backend) -> None:
    """A rank that has announced an operation has arrived at it and at all earlier ones."""
    for sequence in range(1, 8):
        _in_step(backend, sequence)
        assert backend.missing(sequence) == ()
        assert backend.board.all_reached(sequence)


def _splits(backend: Backend) -> None:
    """`split` groups the ranks of one color by key; the groups' messages do not mix."""
    sub = backend.split(backend.rank % 2, -backend.rank)
    assert sub is not None
    mine = range(backend.rank % 2, backend.size, 2)
    assert (sub.size, sub.rank) == (len(mine), len(mine) - 1 - mine.index(backend.rank))
    none = backend.split(None if backend.rank == 0 else 1, 0)
    assert (none is None) == (backend.rank == 0), "split(None) must return None"
    if sub.size > 1:
        right, left = _neighbours(sub)
        got = np.empty(1, int)
        sent = sub.isend(np.array([backend.rank]), right, 5)
        _wait(sub, sub.irecv(got, left, 5), sent)
        assert got[0] == mine[::-1][left]


def _wrong_lengths(backend: Backend) -> None:
    """A message longer or shorter than its receive raises CollectiveMismatch."""
    if backend.size == 1 or backend.rank > 1:
        return
    for tag, n in ((20, 5), (21, 3)):
        if backend.rank == 0:
            _wait(backend, backend.isend(np.ones(n), 1, tag))
            continue
        try:
            _wait(backend, backend.irecv(np.empty(4), 0, tag))
        except Exception as error:
            raised = backend.translate(error)
            assert isinstance(raised, CollectiveMismatch), f"{raised!r}: not a CollectiveMismatch"
        else:
            raise AssertionError(f"{n} numbers were received into an array of 4 without an error")


def _native(backend: Backend) -> None:
    if backend.native is not None:
        missing = sorted(_NATIVE_MEMBERS.difference(dir(backend.native)))
        assert not missing, f"members of native missing: {', '.join(missing)}"


def _collectives(backend: Backend) -> None:
    """All algorithms of every collective return right results; those of barrier return."""
    sub = backend.split(0, backend.rank)
    assert sub is not None
    comm, p = Communicator(sub), backend.size
    each, total = np.arange(4.0 * p), np.arange(4.0 * p) * p + p * (p - 1) / 2
    x, mine = each + comm.rank, slice(4 * comm.rank, 4 * comm.rank + 4)
    joined = np.concatenate([each + r for r in range(p)])
    sums = [r * each + r * (r - 1) / 2 for r in range(p + 1)]  # of ranks 0 … r - 1
    expected = {
        "scan": sums[comm.rank + 1],
        "exscan": sums[comm.rank] if comm.rank else None,
        "allreduce": total,
        "reduce": total if comm.rank == 0 else None,
        "reduce_scatter": total[mine],
        "allgather": joined,
        "gather": joined if comm.rank == 0 else None,
        "broadcast": each,
        "scatter": each[mine],
        "alltoall": np.concatenate([each[mine] + r for r in range(p)]),
    }
    for algorithm in algorithms():
        if algorithm.unsupported(p, groups=comm.topology.groups) is not None:
            continue
        if algorithm.collective in expected:
            got = getattr(comm, algorithm.collective)(x.copy(), algorithm=algorithm.name)
            want = expected[algorithm.collective]
            assert got is None if want is None else np.array_equal(got, want), algorithm.label
        elif algorithm.collective == "barrier":
            comm.barrier(algorithm=algorithm.name)


_CHECKS = (
    _attributes,
    _data_arrive,
    _short_messages,
    _order_and_tags,
    _bound_rounds,
    _waits_end,
    _arrivals,
    _splits,
    _wrong_lengths,
    _native,
    _collectives,
)
