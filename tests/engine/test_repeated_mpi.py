"""Calls that are made again with the same arrays, which compiled code runs through in one go."""

import gc
import time
import weakref
from functools import partial
from operator import itemgetter

import numpy as np
import pytest

import mpidist
from mpidist.backends.mpi import MpiBackend
from mpidist.communicator.communicator import Communicator
from mpidist.engine.reach import Noted
from mpidist.errors import CollectiveMismatch, InvalidRank
from mpidist.selection.config import CollectiveConfig
from mpidist.shared_memory import compiled
from tests.support.messages import done, stay_away

pytestmark = pytest.mark.one_node
SIZES = (1, 1009, 70_001)  # one shot and two; no multiple of anything
WAYS = ("symmetric", "staged")
BODIES = (
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(not compiled.runs_steps(), reason="needs a C compiler"),
    ),
    "step by step",
)


@pytest.fixture(params=BODIES)
def body(request, monkeypatch):
    """Have repeated calls run one way or the other."""
    monkeypatch.setattr(compiled, "runs_steps", lambda: request.param == "compiled")
    return request.param


@pytest.fixture
def own(comm):
    """A communicator that a test may break."""
    made = Communicator(MpiBackend(comm.backend.comm), CollectiveConfig(timeout=90.0))
    yield made


def data(rank, n, turn, dtype="float32"):
    return ((np.arange(n) * 7 + rank * 3 + turn * 5) % 11).astype(dtype)


def make(comm, n, way, dtype="float32"):
    return comm.empty(n, dtype) if way == "symmetric" else np.empty(n, dtype)


def turns(comm, x, right, call, *args, **options):
    """Make a call again and again with new data; what it gives must be right each time."""
    for turn in range(5):
        x[:] = data(comm.rank, x.size, turn, x.dtype)
        got = call(x, *args, **options)
        if got is not None:
            assert (got == right([data(r, x.size, turn, x.dtype) for r in range(comm.size)])).all()


def skip_unless_reached(comm):
    """Skip where the machine does not let the ranks read each other's memory."""
    try:
        comm.allreduce(np.ones(1), algorithm="single_copy")
    except mpidist.Unsupported as error:
        pytest.skip(str(error)[str(error).index("the ranks cannot read each other's memory") :])


def cut_out(n, rank, combine=np.concatenate):
    """Give what cuts a rank's block out of what all have together."""
    return lambda parts: combine(parts)[n * rank : n * (rank + 1)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("way", (*WAYS, "single_copy"))
def test_reductions(comm, body, way, op, n):
    if way == "single_copy":
        skip_unless_reached(comm)
    right = partial(getattr(np, op), axis=0)
    x, out, whole = make(comm, n, way), make(comm, n, way), make(comm, n * comm.size, way)
    turns(comm, x, right, comm.allreduce, op, out=out, algorithm=way)
    turns(comm, x, right, comm.allreduce, op, out=x, algorithm=way)
    for root in range(comm.size):
        turns(comm, x, right, comm.reduce, op, root, out, way)
    turns(
        comm, whole, cut_out(n, comm.rank, right), comm.reduce_scatter, op, out=out, algorithm=way
    )


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_movements(comm, body, way, n):
    p, r = comm.size, comm.rank
    x, out, long, other = (make(comm, length, way) for length in (n, n, n * p, n * p))
    turns(comm, x, np.concatenate, comm.allgather, out=long, algorithm=way)

    def transposed(parts):
        return np.concatenate([part[r * n : (r + 1) * n] for part in parts])

    turns(comm, long, transposed, comm.alltoall, out=other, algorithm=way)
    for root in range(p):
        mine = cut_out(n, r, itemgetter(root))
        turns(comm, x, itemgetter(root), comm.broadcast, root, algorithm=way)
        turns(comm, x, np.concatenate, comm.gather, root, out=long, algorithm=way)
        turns(comm, long, mine, comm.scatter, root, out=out, algorithm=way)


@pytest.mark.parametrize("way", WAYS)
def test_late_before_and_within(comm, body, way):
    """Python goes on waiting: for who comes late, and for who takes long between two meetings."""
    n = 50_000
    x, out = make(comm, n, way), make(comm, n, way)
    slow = 0

    def add(a, b):
        if slow == comm.rank + 1:
            time.sleep(0.02)
        return a + b

    for turn in range(4):
        x[:] = data(comm.rank, n, turn)
        slow = turn % comm.size + 1
        if slow == comm.rank + 1:
            time.sleep(0.02)
        comm.allreduce(x, add, out=out, algorithm=way, commute=True)
        assert (out == sum(data(r, n, turn) for r in range(comm.size))).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
def test_another_operation(own, body, way):
    x, out = make(own, 1000, way), make(own, 1000, way)
    x[:] = 1
    for _ in range(3):
        own.allreduce(x, out=out, algorithm=way)
        own.allreduce(x, "max", out=out, algorithm=way)
    op = "max" if own.rank == own.size - 1 else "sum"
    with pytest.raises(mpidist.CollectiveMismatch, match=r"allreduce"):
        own.allreduce(x, op, out=out, algorithm=way)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
def test_one_does_not_come(comm, own, body, way):
    x, out = make(own, 1000, way), make(own, 1000, way)
    x[:] = 1
    for _ in range(3):
        own.allreduce(x, out=out, algorithm=way)
    own.timeout = 0.3
    if own.rank == 0:
        stay_away(comm, range(1, own.size))
        return
    with pytest.raises(mpidist.CollectiveTimeout, match=r"ranks? 0\b.* not arrived") as caught:
        own.allreduce(x, out=out, algorithm=way)
    # Others that wait may have been held up for longer than the deadline.
    assert caught.value.missing[0] == 0 and own.rank not in caught.value.missing
    done(comm, 0)


@pytest.mark.parametrize("collective", ["reduce", "gather", "scatter"])
def test_the_roots_array_is_another(comm, body, collective):
    """Where it lies is found anew; who has dropped an array, or never had it, leaves the work."""
    n, root = 70_001, comm.size - 1
    here, long = comm.rank == root, n if collective == "reduce" else n * comm.size
    mine = comm.empty(n, "float32")  # what every rank brings, or gets
    arrays = [comm.empty(long, "float32"), np.empty(long, "float32"), comm.empty(long, "float32")]
    for turn, way in enumerate(("symmetric", "symmetric", "auto") * 4):  # each a call of its own
        if turn == 9 and comm.rank != root:
            arrays[0] = arrays[2] = None  # the last on them: they are given back
        theirs = arrays[turn // 2 % 3] if here else None
        parts = [data(r, n, turn) for r in range(comm.size)]
        mine[:] = parts[comm.rank]
        if collective == "scatter":
            if here:
                theirs[:] = np.concatenate(parts)
            mine[:] = -1
            comm.scatter(theirs, root, out=mine, algorithm=way)
            assert (mine == parts[comm.rank]).all()
            continue
        call = partial(getattr(comm, collective), mine, root=root, algorithm=way)
        got = call(out=theirs)
        if here:
            right = sum(parts) if collective == "reduce" else np.concatenate(parts)
            assert got is theirs and (got == right).all()


@pytest.mark.mpi(min_size=2)
def test_nothing_is_looked_for_again(comm, body, monkeypatch):
    """Repeated on the same arrays, compiled code sees that all lies where it lay."""
    x, out = comm.empty(70_001, "float32"), comm.empty(70_001 * comm.size, "float32")
    first, looks = out[: x.size], []
    plain = Noted.find
    monkeypatch.setattr(Noted, "find", lambda self, tags: looks.append(1) or plain(self, tags))
    for turn in range(8):
        x[:] = data(comm.rank, x.size, turn)
        comm.gather(x, out=out, algorithm="symmetric")
        comm.reduce(x, out=first, algorithm="symmetric")
    if comm.rank:
        assert len(looks) < 8 if body == "compiled" else len(looks) == 16


@pytest.mark.parametrize("way", ("auto", "native", *WAYS))
@pytest.mark.parametrize("times", (1, 3))
def test_no_array_is_kept_alive(comm, way, times):
    """Neither by what was bound to it nor by a closure: each rank's memory goes with its names."""
    p, root = comm.size, comm.size - 1
    for collective in ("allreduce", "reduce", "reduce_scatter", "allgather", "broadcast", "gather",
                       "scatter", "alltoall"):  # fmt: skip
        short, long = (make(comm, n, way) for n in (70_001, 70_001 * p))
        x = long if collective in ("reduce_scatter", "scatter", "alltoall") else short
        given = {"allgather": long, "gather": long, "reduce_scatter": short, "scatter": short}
        out = given.get(collective, make(comm, x.size, way))
        x[:] = out[:] = comm.rank
        where = {"root": root} if collective in ("reduce", "broadcast", "gather", "scatter") else {}
        for _ in range(times):
            getattr(comm, collective)(x, **where, out=out, algorithm=way)
        alive = [weakref.ref(array) for array in (x, out, short, long)]
        del x, out, short, long, given
        gc.collect()
        assert not any(array() is not None for array in alive), collective


@pytest.mark.parametrize("wrong", (bool, float))
@pytest.mark.parametrize("collective", ("broadcast", "reduce", "gather", "scatter"))
def test_a_wrong_root_is_refused_after_an_equal_right_one(comm, collective, wrong):
    """As in a first call, though True == 1 == 1.0."""
    p, root = comm.size, min(1, comm.size - 1)
    x, out = np.ones(5 * p if collective == "scatter" else 5), np.empty(5)
    out = np.empty(5 * p) if collective == "gather" else out
    more = {} if collective == "broadcast" else {"out": out}
    call = partial(getattr(comm, collective), x, **more)
    for _ in range(4):
        call(root=root)
    with pytest.raises(InvalidRank, match=f"rank {comm.rank}: root={wrong(root)} is not a rank"):
        call(root=wrong(root))
    call(root=root)


@pytest.mark.parametrize("way", ("native", "staged", "symmetric"))
@pytest.mark.parametrize("form", ("same memory", "new memory"))
def test_shapes_are_compared_in_repeated_calls(comm, way, form):
    """Views made anew of memory that was bound, and arrays of a kind that was."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    x = [make(comm, 24, way, float) for _ in range(5 if form == "new memory" else 1)]
    for k in range(4):
        x[k % len(x)][:] = comm.rank
        view = x[k % len(x)].reshape(4, 6)
        assert (comm.allreduce(view, "max", view, way) == comm.size - 1).all()
    other = x[-1].reshape(6, 4) if comm.rank == 0 else x[-1].reshape(4, 6)
    with pytest.raises(CollectiveMismatch, match=r"shape=\(6, 4\)"):
        comm.allreduce(other, "max", other, way)
    assert comm.allreduce(1) == comm.size
