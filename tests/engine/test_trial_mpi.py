"""Ways to serve a call, tried out by real ranks: once, alike on all, and with errors as usual."""

from contextlib import suppress
from functools import partial

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import CollectiveMismatch, CollectiveTimeout, CommunicatorBroken
from mpidist.engine import service
from mpidist.selection.estimates import TRIED_TO

pytestmark = pytest.mark.mpi(min_size=2)
COUNT = 8 << 10  # of float64: 64 KiB


@pytest.fixture
def made():
    """Makes communicators of the world, as if each rank had a core; they are freed afterwards."""
    kept = []

    def make(**options):
        comm = mpidist.init(comm=MPI.COMM_WORLD, **options)
        comm._service.chooser._crowded = False
        kept.append(comm)
        return comm

    yield make
    for comm in kept:
        with suppress(CommunicatorBroken):
            comm.free()


CALLS = {
    "allreduce": lambda comm, x: (comm.allreduce(x), comm.size),
    "reduce": lambda comm, x: (comm.reduce(x, root=1), comm.size),
    "broadcast": lambda comm, x: (comm.broadcast(x * comm.rank, root=1), 1),
    "allgather": lambda comm, x: (comm.allgather(x), 1),
    "reduce_scatter": lambda comm, x: (comm.reduce_scatter(x), comm.size),
    "alltoall": lambda comm, x: (comm.alltoall(x), 1),
    "gather": lambda comm, x: (comm.gather(x), 1),
}


@pytest.mark.parametrize("collective", CALLS)
def test_first_calls_choose_alike_and_are_right(comm, made, collective):
    tried = made()
    sequence = tried._service.sequencer
    x, numbers = np.ones(COUNT * comm.size), []
    for _ in range(3):
        before = sequence.sequence
        result, expected = CALLS[collective](tried, x)
        numbers.append(sequence.sequence - before)
        assert result is None or (result == expected).all()
    assert numbers[0] > 6 and max(numbers[1:]) < 4, numbers
    nbytes = x.nbytes * (comm.size if collective in ("allgather", "gather") else 1)
    found, every = tried.explain(collective, nbytes)
    assert found.why.startswith("measured, in this job: ")
    assert tried.allgather_object(found.name) == [found.name] * comm.size
    times = {one.name: one.seconds for one in every if one.basis == "measured, in this job"}
    assert found.seconds == times[found.name] and "native" in times and len(times) > 1


@pytest.mark.parametrize(
    "dtype", ["V8", "S8", "bool", "M8[s]", [("a", "i4"), ("b", "f8")]], ids=str
)
def test_every_dtype_is_tried(comm, made, dtype):
    tried, x = made(), np.zeros(4 * COUNT, dtype)
    found = tried.broadcast(x if comm.rank == 0 else np.empty_like(x))
    assert found.tobytes() == x.tobytes() and tried._service.chooser.estimates.trials


@pytest.mark.parametrize("own", ["all", "root", "none"])
def test_short_gathers_of_symmetric_arrays_try_private_ones(comm, made, own):
    tried, each = made(), (20 << 10) // 8 // comm.size
    whole = {"all": (True, True), "root": (comm.rank == 0, comm.rank == 0), "none": (False, True)}
    symmetric = tried.empty(each), tried.empty(each * comm.size)
    x, out = (
        mine if is_own else np.empty_like(mine) for mine, is_own in zip(symmetric, whole[own])
    )
    for _ in range(3):
        x[...], out[...] = comm.rank, -1
        tried.gather(x, out=out if comm.rank == 0 else None)
        assert comm.rank or (out == np.repeat(range(comm.size), each)).all()


@pytest.mark.parametrize("collective", [name for name in CALLS if name != "allreduce"])
def test_calls_of_symmetric_arrays_try_slots(comm, made, collective):
    """The choice changes no bits; what the trial allocates is gone afterwards."""
    tried, count = made(), (1 << 20) // 8 // comm.size * comm.size
    each = collective in ("allgather", "gather")
    x, out = (tried.empty(n) for n in (count // comm.size if each else count, count))
    if collective == "reduce_scatter":
        out = out[: count // comm.size]
    rooted = {"root": 1} if collective in ("reduce", "broadcast", "gather") else {}
    before, found = len(tried._service.heap._allocations), []
    for algorithm in ("auto", "auto", "symmetric", "staged"):
        x[:] = np.random.default_rng(comm.rank).random(x.size)
        if collective == "broadcast":
            tried.broadcast(x, algorithm=algorithm, **rooted)
            found.append(x.copy())
        else:
            getattr(tried, collective)(x, out=out, algorithm=algorithm, **rooted)
            found.append(out.copy() if comm.rank == 1 or not rooted else x.copy())
    assert all((one == found[0]).all() for one in found)
    (times,) = tried._service.chooser.estimates.trials.values()
    assert times.keys() == {"symmetric", "staged"}
    assert len(tried._service.heap._allocations) == before


@pytest.mark.parametrize("collective", ["allreduce", "scan"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_two_symmetric_arrays_try_slots(comm, made, collective, dtype, op):
    """The choice changes no bits; in place, and of a private array, nothing is tried."""
    if (collective, op) == ("scan", "mean"):
        op = "prod"
    tried, count = made(), (128 << 10) // np.dtype(dtype).itemsize + 3
    x, out = tried.empty(count, dtype), tried.empty(count, dtype)
    x[:] = np.random.default_rng(comm.rank).random(count) - 0.5
    call, trials = getattr(tried, collective), tried._service.chooser.estimates.trials
    bits = []
    for source in (x.copy(), out):
        out[:] = x
        bits.append(call(source, op, out=out).tobytes())
    assert not trials
    for algorithm in ("auto", "auto", "symmetric", "staged"):
        bits.append(call(x, op, out=out, algorithm=algorithm).tobytes())
    assert len(set(bits)) == 1
    (times,) = trials.values()
    assert times.keys() == {"symmetric", "staged"}
    assert tried.explain(collective, x.nbytes, memory="symmetric")[0].why.startswith("shipped")


@pytest.mark.parametrize("name", ["symmetric", "staged"])
def test_the_faster_of_both_serves_two_symmetric_arrays(comm, made, name):
    """And in place, what has been chosen for them stands back."""
    tried = made()
    x, out = tried.empty(COUNT), tried.empty(COUNT)
    estimates, served = tried._service.chooser.estimates, []
    learn = estimates.learn_trial

    def forced(call, memory, times):
        learn(call, memory, dict.fromkeys(times, 1.0) | {name: 0.1})

    estimates.learn_trial = forced
    tried._service.note = served.append
    for turn in range(3):
        for source in (x, out):
            source[:] = turn + comm.rank
            tried.allreduce(source, out=out)
            assert (out == turn * comm.size + sum(range(comm.size))).all()
    found = [one.executor for one in served]
    assert found[-2:] == [name, "symmetric"], found


def test_symmetric_calls_are_served_where_there_is_no_memory_to_try(comm, made, monkeypatch):
    tried = made()
    x = tried.empty(COUNT)

    def fail(*_):
        raise MemoryError("/dev/shm is full")

    monkeypatch.setattr(tried._service.heap, "empty", fail)
    for k in range(3):
        x[:] = k + comm.rank
        tried.broadcast(x, root=1)
        assert (x == k + 1).all()
    assert not tried._service.chooser.estimates.trials


def test_long_uneven_calls_are_tried_on_short_arrays(comm, made, monkeypatch):
    tried, seen = made(), []
    real = service.times_of
    spy = lambda call, *more: seen.append(call.nbytes) or real(call, *more)  # noqa: E731
    monkeypatch.setattr(service, "times_of", spy)
    counts = [0, 3 << 20, *(1 << 18 for _ in range(2, comm.size))]
    for _ in range(2):
        found = tried.allgather(np.full(counts[comm.rank], comm.rank), counts=counts)
        assert (found == np.repeat(range(comm.size), counts)).all()
    assert len(seen) <= 2 and len(set(seen)) == 1 and 0 < seen[0] <= TRIED_TO


def test_slots_are_tried_by_the_first_call_that_fits(made):
    tried, x = made(), np.ones(20 << 17)
    tried.broadcast(x)
    (times,) = tried._service.chooser.estimates.trials.values()
    assert "staged" not in times
    tried.broadcast(x[: 5 << 17])
    (more,) = tried._service.chooser.estimates.trials.values()
    assert more.keys() - times.keys() == {"staged"} and more.items() >= times.items()


def test_calls_that_are_compared_first_are_tried_too(made):
    tried = made()
    tried._debug = True
    tried.allreduce(np.ones(COUNT))
    assert tried.explain("allreduce", 8 * COUNT)[0].why.startswith("measured, in this job: ")


def test_an_interrupt_between_turns_ends_the_communicator(comm, made, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    tried = made()
    monkeypatch.setattr(service, "times_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tried.allreduce(np.ones(COUNT))
    with pytest.raises(CommunicatorBroken, match="broken since allreduce.* tried out"):
        tried.allreduce(np.ones(COUNT))
    comm.barrier()


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
@pytest.mark.parametrize("missing", ["single_copy", "staged", "staged single_copy"])
def test_a_way_that_cannot_be_made_ready_is_left_out(made, monkeypatch, collective, missing):
    def fail(executor):
        executor.ready, executor._reason = True, "not here"

    tried = made()
    for executor in tried._service.executors:
        if executor.name in missing:
            monkeypatch.setattr(executor, "make_ready", partial(fail, executor))
    for _ in range(3):
        result, expected = CALLS[collective](tried, np.ones(COUNT))
        assert (result == expected).all()
    (times,) = tried._service.chooser.estimates.trials.values()
    copies = "single_copy" if collective == "allreduce" else "published"
    left = {"staged": "staged", "single_copy": copies}
    assert times.keys() == {"native", *(left[name] for name in left if name not in missing)}


def test_explain_says_what_will_be_tried(made):
    tried = made()
    found, _ = tried.explain("allreduce", 1 << 16)
    assert found.why.endswith("; the first call will try out staged, native, single_copy")


def test_neither_short_calls_nor_those_in_the_background_try(made):
    tried = made()
    tried.allreduce(np.ones(100))
    tried.iallreduce(np.ones(COUNT)).wait()
    x = tried.empty(COUNT)
    tried.allreduce(x, out=x)  # in place on this rank at least
    tried.ibroadcast(x).wait()
    tried.broadcast(x[:100])
    assert not tried._service.chooser.estimates.trials


def test_nothing_is_tried_if_calibration_is_turned_off(made):
    fixed = made(calibrate=False)
    fixed.allreduce(np.ones(COUNT))
    assert fixed.explain("allreduce", 8 * COUNT)[0].why.startswith("shipped rule")


def test_ranks_that_call_something_else_mismatch(comm, made):
    tried = made()
    with pytest.raises(CollectiveMismatch, match="is all.* here and all.* on rank"):
        if comm.rank:
            tried.allreduce(np.ones(COUNT))
        else:
            tried.allgather(np.ones(COUNT))


def test_ranks_that_do_not_come_are_named(comm, made):
    tried = made()
    tried.timeout = 1.0  # not of what makes it
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match="allreduce.*ranks? .*1"):
            tried.allreduce(np.ones(COUNT))
    comm.barrier()
