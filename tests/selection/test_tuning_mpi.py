"""The tuning table under MPI: one decision for all ranks, and for two runs; the calibration."""

import logging
import os
from time import perf_counter

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import ConfigError
from mpidist.backends import process_memory
from mpidist.communicator.layers import calibrate
from mpidist.engine import calibration
from mpidist.selection.estimates import CROWDED
from mpidist.selection.rules import Rule
from mpidist.selection.tuning import Key, TuningEntry, TuningTable, rules_of

SIZES = (8, 512, 1 << 16, 1 << 20)
LIMIT = 0.05  # seconds that a calibration may take
LOADED = 10  # a machine with other work may take so much longer
ATTEMPTS = 20  # while other work holds it up


def library():
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def table(comm, *candidates):
    """Take one candidate after the other, from 8 bytes on by factors of 64."""
    nodes = tuple(map(len, comm.topology.groups))
    choose = tuple((0 if k == 0 else 8 * 64**k, name) for k, name in enumerate(candidates))
    times = {8: {name: (k + 1) * 1e-6 for k, name in enumerate(candidates)}}
    keys = [
        Key(library(), nodes, "float", "allreduce", memory) for memory in ("private", "symmetric")
    ]
    return TuningTable([TuningEntry(key, rules_of(choose), times) for key in keys])


def names(comm, memory="private"):
    return [comm.explain("allreduce", nbytes, memory=memory)[0].name for nbytes in SIZES]


@pytest.fixture
def made():
    """Makes communicators of the world, which are freed afterwards."""
    kept = []

    def make(**options):
        kept.append(mpidist.init(comm=MPI.COMM_WORLD, **options))
        return kept[-1]

    yield make
    for comm in kept:
        comm.free()


def test_only_rank_0_has_the_file(comm, made, tmp_path):
    path = tmp_path / "t.json"
    if comm.rank == 0:
        table(comm, "ring", "tree:4", "linear").save(path)
    else:
        path = "there/is/no/such/file"
    tuned = made(tuning=path)
    found = tuned.allgather_object(names(tuned))
    assert found == [["ring", "tree:4", "linear", "linear"]] * comm.size
    total = tuned.allreduce(np.ones(200, "float32"))
    assert (total == comm.size).all()


def test_ranks_have_different_files(comm, made, tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    table(comm, "ring" if comm.rank == 0 else "linear").save(path)
    monkeypatch.setenv("MPIDIST_TUNING", str(path))
    tuned = made()
    assert tuned.allgather_object(names(tuned)) == [["ring"] * len(SIZES)] * comm.size
    monkeypatch.setenv("MPIDIST_TUNING", "none")
    assert names(made(tuning=path))[0] != "ring"


def test_two_runs_decide_alike(comm, made, tmp_path):
    path = tmp_path / "t.json"
    table(comm, "ring", "recursive_doubling", "native").save(path)
    first, second = names(made(tuning=path)), names(made(tuning=path))
    assert first == second == ["ring", "recursive_doubling", "native", "native"]


def test_table_of_other_ranks(comm, made, caplog):
    other = table(comm, "linear")
    entries = [
        TuningEntry(
            Key(library(), (99,), *[getattr(k, n) for n in ("kind", "collective", "memory")]),
            e.rules,
            e.times,
        )
        for k, e in other.entries.items()
    ]
    with caplog.at_level(logging.WARNING, "mpidist"):
        tuned = made(tuning=TuningTable(entries, source="t.json"), calibrate=False)
        tuned.split(0).free()
    assert names(tuned) == names(made(calibrate=False))
    assert "it is for" in tuned.explain("allreduce", 8)[0].why
    assert len(caplog.records) == (comm.rank == 0)


def test_bad_table_raises_on_all_ranks(comm, made, tmp_path):
    path = tmp_path / "t.json"
    if comm.rank == 0:
        path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="tuning: .*t.json is not a tuning table"):
        made(tuning=path)
    with pytest.raises(ConfigError, match="tuning=3: expected a path or a TuningTable"):
        made(tuning=3)
    assert mpidist.get_communicator() is mpidist.init()
    assert (made().allreduce(np.ones(3)) == comm.size).all()


@pytest.mark.parametrize(
    "other",
    [
        {"config": mpidist.CollectiveConfig()},
        {"timeout": None},
        {"segment_bytes": 1024},
        {"window": 3},
        {"debug": False},
        {"tuning": "t.json"},
        {"calibrate": True},
    ],
    ids=str,
)
def test_init_again_with_other_settings_is_refused(comm, other):
    with pytest.raises(mpidist.InvalidArgument, match="is started already"):
        mpidist.init(**other)
    assert mpidist.init() is mpidist.get_communicator()


def test_symmetric_memory_and_background(comm, made):
    tuned = made(tuning=table(comm, "symmetric"))
    assert names(tuned)[0] != "symmetric"
    if comm.topology.num_nodes == 1:
        assert "but out was not allocated by comm.empty()" in tuned.explain("allreduce", 8)[0].why
        assert names(tuned, "symmetric") == ["symmetric"] * len(SIZES)
        x = tuned.empty(5, "float32")
        x[:] = 1
        assert (tuned.allreduce(x, out=x) == comm.size).all()
    assert (tuned.iallreduce(np.ones(5, "float32")).wait() == comm.size).all()


@pytest.mark.one_node
def test_table_with_slots_at_every_size(comm, made):
    """Also for the messages by which the ranks make the memory that the slots are in."""
    nodes, times = tuple(map(len, comm.topology.groups)), {8: {"staged": 1e-6}}
    entries = [
        TuningEntry(Key(library(), nodes, "any", name, "private"), (Rule("staged"),), times)
        for name in ("broadcast", "allgather", "gather", "scatter")
    ]
    tuned = made(tuning=TuningTable(entries))
    assert tuned.explain("broadcast", 8)[0].name == "staged"
    assert (tuned.broadcast(np.full(3, tuned.rank), root=tuned.size - 1) == tuned.size - 1).all()
    assert tuned.allgather_object(tuned.rank) == list(range(tuned.size))


def test_calibration_is_short_and_the_same_everywhere(comm, made):
    tuned = made()
    tuned.barrier()
    slowest = []
    while not slowest or (min(slowest) > LIMIT and len(slowest) < ATTEMPTS):
        tuned.barrier()
        begun = perf_counter()
        found = calibrate(tuned)
        slowest.append(max(comm.allgather_object(perf_counter() - begun)))
    print(f"calibrated {comm.size} ranks in {min(slowest) * 1e3:.1f} ms: {found}")
    assert min(slowest) < LIMIT * LOADED, slowest
    assert comm.allgather_object(found) == [found] * comm.size
    if comm.size > 1:
        line, combine = found.messages.one_way, found.messages.combine
        assert 0 < line.at(0) < 1e-2 and 0 <= line.slope < 1e-6 and 0 < combine.slope < 1e-6
        every = [one for one in tuned.explain("allreduce", 1 << 20)[1] if one.choice]
        assert any(one.seconds for one in every) is not tuned.backend.crowded
        assert any(one.basis == CROWDED for one in every) is tuned.backend.crowded


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_calibration_of_shared_memory(comm, made, monkeypatch):
    """Its constants are those of all ranks together, and what cannot be measured has none."""
    tuned = made()
    found = calibrate(tuned)
    assert comm.allgather_object(found) == [found] * comm.size
    for sharing in (found.mapped, found.published or found.mapped):
        assert 0 < sharing.meeting < 1e-1 and sharing.cache > 1 << 16
        assert 0 < sharing.read.slope <= sharing.fold.slope < 1e-6
        assert 0 < sharing.store.slope < 1e-6 and sharing.beyond.read.slope > 0

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "SECONDS", 0.0)  # all ranks stop at the same pass
        hurried = calibrate(tuned)
    assert comm.allgather_object(hurried) == [hurried] * comm.size
    assert 0 < hurried.mapped.read.slope < 1e-6 and hurried.mapped.meeting > 0

    def refused(*_):
        raise mpidist.Unsupported("not today")

    monkeypatch.setattr(process_memory, "connect", refused)
    less = calibrate(tuned)
    assert less.mapped is not None and less.published is None
    monkeypatch.setattr(tuned._service.heap, "empty", lambda *_: refuse_memory())
    least = calibrate(tuned)
    assert least.mapped is least.published is None and least.messages.one_way.at(0) > 0


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_explain_has_times_in_shared_memory(comm, made):
    """And lists the schedules that a call on symmetric arrays can name: such a call runs them."""
    tuned = made()
    calibrate(tuned)
    crowded = tuned.backend.crowded  # then there are none
    for collective in ("allreduce", "reduce", "broadcast"):
        chosen, every = tuned.explain(collective, 1 << 16, memory="symmetric")
        rows = {one.name: one for one in every}
        assert chosen.executor == "symmetric" and chosen.seconds == rows["symmetric"].seconds
        assert crowded or rows["staged"].seconds > rows["symmetric"].seconds / 20 > 0
        assert (rows["ring"] if collective == "allreduce" else rows["tree"]).executor == "messages"
        named = [one for one in every if one.choice and one.executor == "symmetric"]
        assert rows["in_place"] in named
        assert all(one.seconds is None if crowded else one.seconds > 0 for one in named)
        for one in named:
            x = tuned.empty(1000, "float32")
            out = tuned.empty(1000, "float32")
            x[:] = 1
            arguments = {"root": 0} if collective != "allreduce" else {}
            result = getattr(tuned, collective)(x, out=out, algorithm=one.name, **arguments)
            if result is not None:
                assert (result == (1 if collective == "broadcast" else comm.size)).all()
        private = {one.name for one in tuned.explain(collective, 1 << 16)[1]}
        assert not private & {one.name for one in named}


def refuse_memory():
    raise MemoryError


@pytest.mark.mpi(min_size=2)
def test_first_use_calibrates_once_unless_turned_off(comm, made, monkeypatch):
    """Without MPI's own collective the choice needs constants."""
    for options, expected in (({}, 1), ({"calibrate": False}, 0)):
        tuned = made(**options)
        monkeypatch.setattr(tuned.backend.native, "why_not", lambda call: "not today")
        calls, calibrate = [], tuned._service.calibrate
        monkeypatch.setattr(
            tuned._service, "calibrate", lambda what, c=calls, f=calibrate: c.append(1) or f(what)
        )
        for _ in range(3):
            assert (tuned.allreduce(np.ones(1000)) == comm.size).all()
            assert (tuned.allreduce(np.ones(100_000)) == comm.size).all()
        assert len(calls) == expected
        why = tuned.explain("allreduce", 1 << 20)[0].why
        assert why.startswith("cost model" if expected else "shipped rule")
        assert comm.allgather_object(why) == [why] * comm.size


def test_the_variable_turns_it_off(comm, made, monkeypatch):
    if comm.rank == 0:
        monkeypatch.setitem(os.environ, "MPIDIST_CALIBRATE", "0")
    tuned = made(calibrate=True)
    assert not tuned._service.chooser.estimates.uncalibrated
