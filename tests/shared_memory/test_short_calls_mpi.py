"""Short private arrays that are used once: they go through arrays that are bound for their kind."""

import gc
import weakref

import numpy as np
import pytest

import mpidist
from mpidist.backends.mpi import MpiBackend
from mpidist.communicator.communicator import Communicator
from mpidist.engine.staged import Staged
from mpidist.selection.config import CollectiveConfig

pytestmark = pytest.mark.one_node
STAGED = {"algorithm": "staged"}


@pytest.fixture
def own(comm):
    """A communicator that a test may break, whose slots are made."""
    made = Communicator(MpiBackend(comm.backend.comm), CollectiveConfig(timeout=90.0))
    made.allreduce(np.ones(1), **STAGED)
    yield made


@pytest.fixture
def bound(monkeypatch):
    """The calls that were bound, each for both slots or for one."""
    calls, plain = [], Staged.binding
    monkeypatch.setattr(
        Staged,
        "binding",
        lambda self, plan, call, *how: calls.append(call) or plain(self, plan, call, *how),
    )
    return calls


def test_numbers(own, bound):
    for turn in range(20):
        assert own.allreduce(own.rank + turn, **STAGED) == sum(range(own.size)) + own.size * turn
        assert own.allreduce(float(turn), "max") == turn
    assert len(bound) <= 2 * (1 + 2)  # each for one call, and then for both slots


def test_first_call_is_not_bound(own, bound):
    for n in range(2, 401):
        assert (own.allreduce(np.full(n, 1.0), **STAGED) == own.size).all()
        assert own.allreduce(own.rank, **STAGED) == sum(range(own.size))
    assert len(bound) <= 399 + 1 + 2  # each for the slot whose turn it is; the number for both


def test_results_are_the_callers_own(own):
    first = own.allreduce(np.full(9, 1.0), **STAGED)
    second = own.allreduce(np.full(9, 2.0), **STAGED)
    assert (first == own.size).all() and (second == 2 * own.size).all()
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None


def test_in_place_and_not_on_different_ranks(own, bound):
    """All ranks meet in the same slots, whatever each of them has bound."""
    kept, result = np.empty(100), np.empty(100)
    for turn in range(6):
        x = kept if own.rank == 0 else np.empty(100)
        x[:] = own.rank + turn
        out = x if own.rank % 2 else result
        got = own.allreduce(x, out=out, **STAGED)
        assert got is out and (got == sum(range(own.size)) + own.size * turn).all()


def test_roots_and_parts(own):
    p, r = own.size, own.rank
    counts = [rank % 3 for rank in range(p)]
    mine, everyone = np.full(counts[r], float(r)), np.repeat(np.arange(p), counts)
    for turn in range(3):
        for root in range(p):
            x = np.full(5, r + turn, "int16")
            got = own.reduce(x, root=root, **STAGED)
            right = sum(range(p)) + p * turn
            assert (got == right).all() if r == root else got is None
            got = own.gather(mine.copy(), root=root, counts=counts, **STAGED)
            assert (got == everyone).all() if r == root else got is None
            data = everyone.astype("float64") if r == root else None
            out = np.empty(counts[r])
            assert (own.scatter(data, root, out=out, counts=counts, **STAGED) == mine).all()
        assert (own.allgather(mine.copy(), counts=counts, **STAGED) == everyone).all()
        rows = np.arange(2.0 * p) + r
        got = own.alltoall(rows, **STAGED)
        assert (got == np.concatenate([np.arange(2 * r, 2 * r + 2) + s for s in range(p)])).all()


def test_a_root_that_must_not_be_written(own):
    for turn in range(3):
        x = np.full(10, float(turn))
        x.flags.writeable = own.rank != 0
        if own.rank:
            x[:] = -1
        assert (own.broadcast(x, 0, **STAGED) == turn).all()


def test_more_kinds_than_are_kept(own):
    own._service.programs.limit = 16 << 20
    for n in (n for n in range(90_000, 90_040) for _ in range(2)):  # more than all may be
        assert (own.allreduce(np.full(n, 1.0), **STAGED) == own.size).all()
    kinds = own._service.programs.entries.values()
    own_bytes = sum(kind.x.nbytes + kind.out.nbytes for kind in kinds)
    assert 8 << 20 < own_bytes <= 16 << 20 and len(kinds) < 40
    for turn in range(2):
        for n in range(1, 100):
            assert (own.allreduce(np.full(n, n + turn), **STAGED) == own.size * (n + turn)).all()


def test_loop_over_too_many_kinds(own, bound):
    """Those that fit stay bound, and the others are served without being bound for a next time."""
    own._service.programs.limit = 16 << 20
    sizes = range(90_000, 90_040)
    for _ in range(3):
        for n in sizes:
            own.allreduce(np.full(n, 1.0), **STAGED)
    bound.clear()
    for n in sizes:
        assert (own.allreduce(np.full(n, 1.0), **STAGED) == own.size).all()
    kept = len(own._service.programs.entries)
    assert kept > 5 and len(bound) == len(sizes) - kept  # each for the one slot whose turn it is


@pytest.mark.mpi(min_size=2)
def test_another_operation(own):
    for _ in range(2):
        own.allreduce(np.ones(10), **STAGED)
        own.allreduce(np.ones(10), "max", **STAGED)
    with pytest.raises(mpidist.CollectiveMismatch, match="allreduce"):
        own.allreduce(np.ones(10), "max" if own.rank else "sum", **STAGED)
    own.free()
    with pytest.raises(mpidist.CommunicatorBroken, match="freed"):
        own.allreduce(np.ones(10), **STAGED)
