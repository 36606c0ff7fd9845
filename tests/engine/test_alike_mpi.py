"""Short calls on new arrays, which are found by the likeness of their arrays."""

import gc
import weakref

import numpy as np
import pytest

from mpidist.backends.mpi import MpiBackend
from mpidist.communicator.communicator import Communicator
from mpidist.errors import CollectiveMismatch, InvalidArgument, InvalidRank

pytestmark = pytest.mark.one_node
TURNS = 6
CALLS = (
    *("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"),
    *("gather", "scatter", "alltoall", "scan", "exscan"),
)


@pytest.fixture
def own(comm):
    """A communicator that has served nothing, and that a test may break."""
    yield Communicator(MpiBackend(comm.backend.comm))


def parts(collective, size, turn, shape, dtype):
    """The inputs of all ranks: small whole numbers."""
    rows = shape[0] * (size if collective in ("reduce_scatter", "scatter", "alltoall") else 1)
    n = int(np.prod((rows, *shape[1:])))
    base = np.arange(n).reshape(rows, *shape[1:])
    return [((base + 3 * r + turn) % 5).astype(dtype) for r in range(size)]


def expected(collective, rank, size, inputs):
    """The result of a rank, None where it has none."""
    root = size - 1
    mine = slice(rank * len(inputs[0]) // size, (rank + 1) * len(inputs[0]) // size)
    return {
        "allreduce": lambda: sum(inputs),
        "reduce": lambda: sum(inputs) if rank == root else None,
        "broadcast": lambda: inputs[root],
        "allgather": lambda: np.concatenate(inputs),
        "reduce_scatter": lambda: sum(inputs)[mine],
        "gather": lambda: np.concatenate(inputs) if rank == root else None,
        "scatter": lambda: inputs[root][mine],
        "alltoall": lambda: np.concatenate([x[mine] for x in inputs]),
        "scan": lambda: sum(inputs[: rank + 1]),
        "exscan": lambda: sum(inputs[:rank]) if rank else None,
    }[collective]()


@pytest.mark.parametrize("form", ["contiguous", "transposed", "view"])
@pytest.mark.parametrize(
    "collective, given",
    [(collective, given) for collective in CALLS for given in ("new result", "out")]
    + [(collective, "in place") for collective in ("allreduce", "broadcast", "scan")],
)
def test_new_arrays_each_time(own, collective, given, form):
    comm = own
    rooted = collective in ("reduce", "broadcast", "gather", "scatter")
    root = {"root": comm.size - 1} if rooted else {}
    for turn in range(TURNS):
        for shape, dtype in (((4, 6), "f4"), ((4, 6), "i8"), ((2, 3, 4), "f4"), ((24,), "f4")):
            inputs = parts(collective, comm.size, turn, shape, dtype)
            x = inputs[comm.rank].copy()
            if form == "transposed":
                x = np.asfortranarray(x)
            elif form == "view":
                x = np.repeat(x, 2, axis=-1)[..., ::2]
            right = expected(collective, comm.rank, comm.size, [part.copy() for part in inputs])
            out = None
            if given == "in place":
                out = x
            elif given == "out":  # ignored where there is no result
                out = np.empty(shape if right is None else right.shape, dtype)
            got = getattr(comm, collective)(x, out=out, **root)
            if right is None:
                assert got is None
                continue
            assert (got == right).all() and got.dtype == dtype and got.shape == right.shape
            assert out is None or got is out
            if given == "new result" and collective != "broadcast":
                assert got is not x and (x == inputs[comm.rank]).all()


def warm(comm, call):
    for _ in range(TURNS):
        call(np.ones((2, 3), "f4"))


def test_results_are_not_shared(own):
    results = [own.allreduce(np.full(3, turn, "f4")) for turn in range(TURNS)]
    for turn, result in enumerate(results):
        assert (result == turn * own.size).all()
        assert result.flags.owndata and result.flags.writeable


@pytest.mark.parametrize("op", ["max", "mean", np.add])
def test_other_arguments_are_other_calls(own, op):
    combine = {"max": max, "mean": np.mean, np.add: sum}[op]
    for turn in range(TURNS):
        terms = range(turn, turn + own.size)
        assert (own.allreduce(np.full(5, terms[own.rank], "f4")) == sum(terms)).all()
        assert np.allclose(own.allreduce(np.full(5, terms[own.rank], "f4"), op), combine(terms))


def test_what_is_refused_is_refused_after_like_calls(own):
    for _ in range(TURNS):
        own.allreduce(np.ones(4, "f4"), out=np.empty(4, "f4"))
    locked = np.empty(4, "f4")
    locked.flags.writeable = False
    both = np.ones(6, "f4")
    wrong = (
        ("dtype", np.ones(4, "f4"), np.empty(4, "f8")),
        ("shape", np.ones(4, "f4"), np.empty((2, 2), "f4")),
        ("read-only", np.ones(4, "f4"), locked),
        ("overlaps", both[:4], both[2:]),
        ("masked", np.ma.ones(4, "f4"), np.empty(4, "f4")),
    )
    for word, x, out in wrong:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=word):
                own.allreduce(x, out=out)
    with pytest.raises(InvalidRank, match="root"):
        own.reduce(np.ones(4, "f4"), root=True)
    assert (own.allreduce(np.ones(4, "f4")) == own.size).all()


def test_an_unhashable_argument_is_refused(own):
    warm(own, own.allreduce)
    with pytest.raises(InvalidArgument, match="op"):
        own.allreduce(np.ones((2, 3), "f4"), ["sum"])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("collective", ["reduce", "gather", "broadcast"])
def test_views_of_private_and_symmetric_memory_are_not_alike(own, collective):
    """Only the root has a result: the others could not tell by it."""
    several = own.size if collective == "gather" else 1
    symmetric = own.empty(4, "f4"), own.empty(4 * several, "f4")
    for turn in range(TURNS):
        private = np.empty(8, "f4")[:4], np.empty(8 * several, "f4")[: 4 * several]
        for x, out in (private, symmetric):
            x[:] = turn + own.rank
            call = getattr(own, collective)
            got = call(x) if collective == "broadcast" else call(x, out=None if own.rank else out)
            first = {"reduce": sum(range(turn, turn + own.size))}.get(collective, turn)
            assert (got is None) == (own.rank > 0 and collective != "broadcast")
            assert got is None or got[0] == first


@pytest.mark.mpi(min_size=2)
def test_shapes_are_compared(own):
    warm(own, own.allreduce)
    warm(own, lambda x: own.allreduce(x.reshape(3, 2)))
    shape = (2, 3) if own.rank else (3, 2)
    with pytest.raises(CollectiveMismatch, match="shape"):
        own.allreduce(np.ones(shape, "f4"))


def test_a_result_may_be_read_only_at_a_broadcasts_root(own):
    for turn in range(TURNS):
        x = np.full(3, turn if own.rank == 0 else -1, "f4")
        x.flags.writeable = own.rank != 0
        assert own.broadcast(x) is x and (x == turn).all()


def test_arrays_that_come_back_are_bound(own):
    x, out = np.ones(4, "f4"), np.empty(4, "f4")
    for _ in range(TURNS):
        own.allreduce(np.ones(4, "f4"), out=np.empty(4, "f4"))
        own.allreduce(x, out=out)
    if own.size > 1 and own.backend.board is not None:
        kept = own._service.programs.entries.values()
        assert sum(not bound.shared for bound in kept) == 1
    x[:] = 2
    assert (own.allreduce(x, out=out) == 2 * own.size).all()


def test_no_array_is_kept_alive(own):
    refs = []
    for _ in range(TURNS):
        x, out = np.ones(4, "f4"), np.empty(4, "f4")
        own.allreduce(x, out=out)
        refs += [weakref.ref(x), weakref.ref(out)]
        del x, out
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
