"""``comm.trace``: what the file has of every call, on every rank."""

import json
import threading
import time
from collections import defaultdict
from inspect import signature

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument
from mpidist.nn import Linear, Sequential
from mpidist.parallel import DDP
from mpidist.pipeline.schedules.trace import read as read_step
from mpidist.schedule.contract import COLLECTIVES
from mpidist.trace import read
from tests.support.pipeline_kits import mean

LATE, TRIES = 0.05, 40


@pytest.fixture
def path(comm, tmp_path):
    """One path for all ranks: that of rank 0."""
    return comm.broadcast_object(str(tmp_path / "trace.json"))


def events(comm, path, category=None, **facts):
    """Return the events of the file, the same on every rank; of one category, with these facts."""
    every = comm.broadcast_object(read(path) if comm.rank == 0 else None)
    return [
        event
        for event in every
        if event["ph"] in "Xb"
        and (category is None or event["cat"] == category)
        and all(event["args"].get(name) == fact for name, fact in facts.items())
    ]


def come_last(comm):
    """Stay away until all other ranks have begun the next collective, and for a time beyond."""
    until, board = time.monotonic() + 90, comm.backend.board
    following = board.reached(comm.rank) + 1
    while board.missing(following) != (comm.rank,):
        assert time.monotonic() < until, f"{following} not reached by {board.missing(following)}"
        time.sleep(0.001)
    time.sleep(LATE)


def test_collectives(comm, path):
    x = np.ones(1000)
    with comm.trace(path):
        for _ in range(4):  # the later ones as repeated calls
            comm.allreduce(x, out=x)
        comm.allreduce(x, algorithm="ring")
        comm.allgather(np.ones(3, "i4"), algorithm="native")
        for _ in range(4):  # found by the likeness of their arrays
            comm.allreduce(np.ones(5), "max")
    comm.allreduce(x, out=x)  # not recorded
    for rank in range(comm.size):
        mine = [e for e in events(comm, path, "collective") if e["pid"] == rank]
        assert [e["name"] for e in mine] == ["allreduce"] * 5 + ["allgather"] + ["allreduce"] * 4
        assert [e["args"]["call"] for e in mine] == [*range(1, 11)]
        assert all(e["args"]["site"].startswith(f"{__file__}:") for e in mine)
        assert len({e["args"]["site"] for e in mine}) == 4
        assert [e["args"]["bytes"] for e in mine] == [8000] * 5 + [12 * comm.size] + [40] * 4
        assert len({e["args"]["executor"] for e in mine[6:]}) == 1
        assert {e["args"]["op"] for e in mine[6:]} == {"max"}
        assert {e["args"]["op"] for e in mine[:5]} == {"sum"}
        assert len({e["args"]["executor"] for e in mine[:4]}) == 1
        assert (mine[4]["args"]["executor"], mine[4]["args"]["algorithm"]) == ("messages", "ring")
        assert mine[5]["args"]["executor"] == "native" and "algorithm" not in mine[5]["args"]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(mine, mine[1:]))


@pytest.mark.mpi(min_size=2)
def test_the_wait_for_a_late_rank(comm, path):
    late = comm.size - 1
    with comm.trace(path):
        comm.barrier()
        if comm.rank == late:
            come_last(comm)
        comm.barrier()
    barriers = events(comm, path, "collective", call=2)
    assert len(barriers) == comm.size and {e["args"]["last_rank"] for e in barriers} == {late}
    for event in barriers:
        wait = event["args"]["wait_us"]
        if event["pid"] == late:
            assert wait == 0
        else:
            assert 0.9e6 * LATE < wait <= event["dur"]


@pytest.mark.mpi(min_size=2)
def test_messages(comm, path):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    data, got = np.arange(100.0), np.empty(100)
    for _ in range(TRIES):
        with comm.trace(path):
            work = comm.isend(data, right, 7)
            if comm.rank == 0:
                time.sleep(LATE)
            comm.recv(got, peer=left, tag=7)
            work.wait()
            comm.wait_all([comm.post_recv(got, left, 3), comm.post_send(data, right, 3)], "a pair")
            comm.barrier()
            if comm.rank == 0:
                time.sleep(LATE)
                comm.send_object("x" * 20, 1)
            elif comm.rank == 1:
                comm.recv_object(0)
        (late,) = (e for e in events(comm, path, "message") if e["name"] == "recv_object")
        if late["args"]["wait_us"] > 0.9e6 * LATE:
            break  # else the receiver was held up
    else:
        pytest.fail(f"the receiver has not waited for {LATE} s: {late}")
    every = comm.broadcast_object(read(path) if comm.rank == 0 else None)
    for rank in range(comm.size):
        (sent,) = (e for e in events(comm, path, "message", to=(rank + 1) % comm.size, tag=7))
        (received,) = (
            e
            for e in events(comm, path, "message", tag=7)
            if e["name"] == "recv" and e["pid"] == rank
        )
        assert sent["args"]["bytes"] == received["args"]["bytes"] == 800
        assert received["args"]["from"] == (rank - 1) % comm.size
        (ended,) = (e for e in events(comm, path, "background") if e["pid"] == rank)
        assert ended["name"] == "isend"
        (waited,) = (e for e in events(comm, path, "call", what="a pair") if e["pid"] == rank)
        assert waited["name"] == "wait_all"
    arrows = {ph: {e["id"] for e in every if e["ph"] == ph} for ph in "sf"}
    assert len(arrows["s"]) >= comm.size + 1 and arrows["s"] == arrows["f"]


def test_background(comm, path):
    x = np.ones(50_000)
    with comm.trace(path):
        work = comm.iallreduce(x)
        time.sleep(0.01)
        work.wait()
    for rank in range(comm.size):
        of = {e["cat"]: e for e in events(comm, path) if e["pid"] == rank}
        begun, whole, wait = of["begin"], of["background"], of["wait"]
        assert begun["name"] == whole["name"] == "iallreduce"
        assert wait["name"] == "wait for iallreduce"
        assert whole["args"]["bytes"] == 400_000 and whole["args"]["executor"]
        assert begun["ts"] == whole["ts"] and wait["ts"] > whole["ts"] + 9_000


def test_parts(comm, path):
    """Communicators that were split before, and those that are split while it is recorded."""
    before = comm.split(comm.rank % 2)
    with comm.trace(path):
        during = comm.split(0)
        during.barrier()
        before.barrier()
        during.free()
    before.free()
    names = [e["args"]["comm"] for e in events(comm, path, "collective")]
    assert len(names) == 2 * comm.size and names.count(during.name) == comm.size
    assert {name.partition(":")[2] for name in names if name != during.name} == (
        {"0", "1"} if comm.size > 1 else {"0"}
    )
    assert before.traced is None and during.traced is None and comm.traced is None


def test_without_a_trace_the_methods_are_the_plain_ones(comm, path):
    kind = type(comm)
    plain = {name: vars(kind)[name] for name in ("allreduce", "iallreduce", "send", "split")}
    parameters = {name: list(signature(vars(kind)[name]).parameters) for name in COLLECTIVES}
    trace = comm.trace(path)
    assert all(vars(kind)[name] is not method for name, method in plain.items())
    for name, expected in parameters.items():
        assert list(signature(vars(kind)[name], follow_wrapped=False).parameters) == expected
    with pytest.raises(TypeError, match=r"allreduce\(\) got an unexpected keyword argument 'otu'"):
        comm.allreduce(np.ones(2), otu=None)
    trace.stop()
    trace.stop()  # nothing more
    assert all(vars(kind)[name] is method for name, method in plain.items())
    assert not {"allreduce", "free"} & set(vars(comm))


def test_refused(comm, path):
    with pytest.raises(InvalidArgument, match=r"rank 0: trace\('/none/a.json'\)"):
        comm.trace("/none/a.json")
    with comm.trace(path):
        with pytest.raises(InvalidArgument, match="a trace is running, into '.*trace.json'"):
            comm.trace("other.json")
    with pytest.raises(ZeroDivisionError), comm.trace(path):
        raise ZeroDivisionError
    assert comm.traced is None and comm.allreduce(1) == comm.size


def test_free_writes(comm, path):
    own = comm.split(0)
    own.trace(path)
    own.barrier()
    own.free()
    assert [e["args"]["comm"] for e in events(comm, path)] == [own.name] * comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", ["none", "polls", "thread"])
def test_ddp(comm, path, overlap):
    if overlap == "thread" and not comm.backend.threads:
        pytest.skip("needs MPI with thread level 'multiple'")
    layers = Sequential(*(Linear(32, 32, dtype=np.float64) for _ in range(3)))
    model = DDP(layers, comm, bucket_bytes=9000, first_bucket_bytes=9000, overlap=overlap)
    x = np.ones((4, 32))

    def step():
        model.backward(np.ones_like(model(x)))
        model.sync_gradients()

    step()
    with comm.trace(path):
        step()
        step()
    buckets = len(model.buckets)
    model.close()
    for rank in range(comm.size):
        mine = [e for e in events(comm, path) if e["pid"] == rank]
        assert [e["name"] for e in mine if e["cat"] == "ddp"] == ["compute", "sync_gradients"] * 2
        sent = [e for e in mine if e["cat"] == "bucket"]
        assert buckets > 1 and sorted(e["name"] for e in sent) == sorted(
            [f"bucket {k}" for k in range(buckets)] * 2
        )
        assert all(e["args"]["bytes"] > 0 and e["args"]["names"] for e in sent)
        syncs = [e for e in mine if e["name"] == "sync_gradients"]
        assert [e["args"]["step"] for e in syncs] == [1, 2]
        assert all(e["args"]["exposed_us"] > 0 for e in syncs)
        if overlap == "polls":  # begun during backward
            assert any(e["ts"] < syncs[0]["ts"] for e in sent)


@mean
def squares(y, target):
    return float((y * y).sum()), 2 * y


@pytest.mark.mpi(min_size=2)
def test_pipeline(comm, path, tmp_path):
    """One form of file: a trace of the job has the steps that Pipeline.trace writes."""
    other = comm.broadcast_object(str(tmp_path / "step.json"))
    pipe = mpidist.Pipeline(Linear(8, 8, dtype=np.float64), comm, 4)
    x = np.ones((4, 8))
    with comm.trace(path):
        for _ in range(2):
            pipe.step(x, x, squares)
    written = pipe.trace(other)
    for file in (path, other):
        found = comm.broadcast_object(read_step(file) if comm.rank == 0 else None)
        assert found.peak == written.peak and found.measured.name == written.measured.name
        for part, same in zip(found.measured.spans, written.measured.spans, strict=True):
            assert [s.action for s in part] == [s.action for s in same]
            assert [s.end - s.begin for s in part] == pytest.approx(
                [s.end - s.begin for s in same], abs=5e-9
            )
    posted = [e for e in events(comm, path, "message") if e["name"] == "post_send"]
    assert posted and all(e["args"]["bytes"] > 0 for e in posted)
    texts = {e["args"].get("what", "") for e in events(comm, path, "call")}
    assert any("activation of microbatch 0" in text for text in texts)
    pipe.close()


def test_ranges_in_a_profile_of_torch(comm, path):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    model = DDP(torch.nn.Linear(2, 2), comm)
    with comm.trace(path), torch.profiler.profile() as profile:
        comm.allreduce(np.ones(2))
        model(torch.ones(1, 2)).sum().backward()
        model.sync_gradients()
    model.close()
    names = {event.name for event in profile.events()}
    assert {"mpidist.allreduce", "mpidist.sync_gradients"} <= names
    with torch.profiler.profile() as profile:  # without a trace the steps only
        comm.allreduce(np.ones(2))
    assert not any("mpidist" in event.name for event in profile.events())


def test_calls_of_another_thread(comm, path):
    if not comm.backend.threads:
        pytest.skip("needs MPI with thread level 'multiple'")
    own = comm.split(0)
    with comm.trace(path):
        thread = threading.Thread(target=own.barrier)
        thread.start()
        thread.join()
        comm.barrier()
    own.free()
    for event in events(comm, path, "collective"):
        other = event["args"]["comm"] == own.name
        assert event["tid"] == (comm.size + 1 if other else event["pid"])


def test_the_file_has_the_trace_event_format(comm, path):
    """What Perfetto needs: keys, names of all tracks, pairs of arrows and of overlapping slices."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.trace(path):
        work = comm.iallreduce(np.ones(10))
        if comm.size > 1:
            pending = comm.isend(np.ones(2), right, 3)
            comm.recv(np.empty(2), left, 3)
            pending.wait()
        work.wait()
    rows = comm.broadcast_object(read(path) if comm.rank == 0 else None)
    titled = {(r["pid"], r["tid"]) for r in rows if r["ph"] == "M" and r["name"] == "thread_name"}
    pairs = defaultdict(list)
    for event in (row for row in rows if row["ph"] != "M"):
        assert {"name", "cat", "pid", "tid", "ts"} <= set(event) and event["ts"] >= 0
        assert (event["pid"], event["tid"]) in titled
        assert event["ph"] != "X" or event["dur"] >= 0
        if event["ph"] in "besf":
            arrow = event["ph"] in "sf"
            # Perfetto shows overlapping slices with their process only if their ids are local.
            number = event["id"] if arrow else (event["pid"], event["id2"]["local"])
            pairs[arrow, event["cat"], number].append(event)
    assert pairs
    for (arrow, *_), (first, second) in pairs.items():
        begin, end = sorted((first, second), key=lambda event: event["ph"] in "ef")
        assert (begin["ph"], end["ph"]) == (("s", "f") if arrow else ("b", "e"))
        assert begin["ts"] <= end["ts"] and (arrow or begin["pid"] == end["pid"])


def test_what_perfetto_makes_of_the_rows(comm, path):
    """It joins the threads 0 and `pid`, and turns arrows round whose end began before their start.

    The rank that receives, and so waits, is each in turn.
    """
    with comm.trace(path):
        comm.iallreduce(np.ones(10)).wait()
        for late in range(comm.size if comm.size > 1 else 0):
            if comm.rank == late:
                time.sleep(0.01)
                comm.send(np.ones(2), (late + 1) % comm.size)
            elif comm.rank == (late + 1) % comm.size:
                comm.recv(np.empty(2), late)
    rows = comm.broadcast_object(read(path) if comm.rank == 0 else None)
    titles = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    for (pid, tid), title in titles.items():
        assert (tid == pid) == (title == "calls"), (pid, tid, title)
        assert tid or not pid
    slices = [r for r in rows if r["ph"] == "X"]

    def innermost(arrow):
        return max(
            e["ts"]
            for e in slices
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] <= arrow["ts"] <= round(e["ts"] + e["dur"], 3)
        )

    starts = {r["id"]: innermost(r) for r in rows if r["ph"] == "s"}
    ends = {r["id"]: innermost(r) for r in rows if r["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(ends) == (comm.size if comm.size > 1 else 0)
    assert all(starts[number] <= ends[number] for number in ends)


def test_the_file_is_plain_json(comm, path):
    with comm.trace(path):
        comm.barrier()
    if comm.rank == 0:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        assert data["otherData"]["dropped_events"] == []
        assert len(data["otherData"]["clock_error_us"]) == comm.size
        names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"]
        assert [name.split(" (")[0] for name in names] == [f"rank {r}" for r in range(comm.size)]
