"""The flight records of a job: of processes of this test, and of jobs that were really killed."""

import os
import random
import re
import socket
import struct
import sys
import time
from pathlib import Path

import pytest

from mpidist.backends import flight as records
from mpidist.backends.recorder import Recorder
from mpidist.errors import InvalidArgument
from mpidist.launcher import flight
from mpidist.launcher.flight import Job
from tests.support import processes
from tests.support.jobs import each_mpi

OPERATIONS = [
    f"{name} {count} x float32" for name in ("allreduce", "allgather") for count in (1, 9)
]


class Rank:
    """A rank whose operations are recorded as by its process."""

    def __init__(self, job, rank, size):
        self.recorder = Recorder(job, rank, size)
        self.recorder.words[records.HEADER["here"]] = size
        self.tracks = {}

    def group(self, members, name="world"):
        track = self.recorder.track(members, 0)
        track.name(name)
        self.tracks[name] = (track, [0])

    def begin(self, text, name="world", ends=True, meets=True):
        track, number = self.tracks[name]
        number[0] += 1
        mark = records.fingerprint_of(text, meets)
        self.recorder.describe(mark, text)
        track.begin(number[0], mark)
        if ends:
            track.state[records.ARRIVED] = track.state[records.ENDED] = number[0]


def job_of(tmp_path, size, absent=()):
    ranks = [Rank(tmp_path / "flights" / "job", k, size) for k in range(size) if k not in absent]
    for each in ranks:
        each.group(range(size))
    return tmp_path / "flights" / "job", ranks


def report(path, **how):
    return Job(path, **how).lines()


def test_rank_that_is_behind(tmp_path):
    path, ranks = job_of(tmp_path, 4)
    for k, rank in enumerate(ranks):
        rank.begin("barrier")
        if k != 2:
            rank.begin("allreduce op=sum 8 x float64 by ring", ends=False)
            rank.tracks["world"][0].wait(f"{os.getcwd()}/train.py:41")
    first, behind, others = report(path, ended={2: "was killed by signal 9 (SIGKILL)"})
    assert first == (
        "world: rank 2 has not begun #2 allreduce op=sum 8 x float64 by ring (64 B); "
        "ranks 0-1, 3 are there"
    )
    assert behind.startswith("rank 2: was killed by signal 9 (SIGKILL); after world #1 barrier, ")
    assert re.fullmatch(
        r"ranks 0-1, 3: in world #2 allreduce op=sum 8 x float64 by ring \(64 B\), "
        r"waiting since \d\d:\d\d:\d\d\.\d\d in train.py:41",
        others,
    )


def test_rank_that_went_on_while_the_others_were_read_is_not_behind(tmp_path):
    path, ranks = job_of(tmp_path, 3)
    for rank in ranks:
        rank.begin("barrier")
    for rank in ranks[1:]:
        rank.begin("split")
    job = Job(path)
    assert job.divergences() == ["world: rank 0 has not begun #2 split; ranks 1-2 are there"]
    ranks[0].begin("split")
    assert job.divergences() == []


def test_states_of_an_operation(tmp_path):
    path, ranks = job_of(tmp_path, 4)
    for rank in ranks[1:]:
        rank.begin("barrier", ends=rank is ranks[1])
    ranks[3].tracks["world"][0].state[records.ARRIVED] = 1
    ranks[0].begin("barrier in the background", ends=False)
    found = "\n".join(report(path, ended={}))
    assert "rank 0: after the start of world #1 barrier in the background, begun" in found
    assert "rank 1: after world #1 barrier, begun" in found
    assert "rank 2: in world #1 barrier, begun" in found
    assert "rank 3: in world #1 barrier, where all ranks are, begun" in found


@pytest.mark.parametrize("seed", range(100))
def test_random_mismatch(tmp_path, seed):
    """The first of two, on one of several communicators, also where the ring has gone round."""
    dice = random.Random(seed)
    size = dice.randint(3, 5)
    odd = dice.randrange(size)
    path, ranks = job_of(tmp_path, size)
    for rank in ranks:
        rank.group(range(size), "world.1:0")
    names = [dice.choice(["world", "world.1:0"]) for _ in range(dice.choice([20, 1500]))]
    texts = [dice.choice(OPERATIONS) for _ in names]
    at = dice.randrange(len(names) - 15, len(names) - 5)
    numbers = {name: names[: at + 1].count(name) for name in ("world", "world.1:0")}
    for k, rank in enumerate(ranks):
        for step, (name, text) in enumerate(zip(names, texts)):
            other = k == odd and (step == at or step == at + 4)
            rank.begin("broadcast root=1 3 x int8" if other else text, name, meets=False)
    first = report(path)[0]
    name = names[at]
    assert first.startswith(f"{name}: rank {odd} diverged first, at #{numbers[name]}: "), first
    assert f"rank {odd}: broadcast root=1 3 x int8 (3 B); " in first and texts[at] in first


def test_two_ranks_differ(tmp_path):
    path, ranks = job_of(tmp_path, 2)
    for rank, text in zip(ranks, ("barrier", "split")):
        rank.begin(text)
    first = report(path)[0]
    assert first == "world: the ranks diverged first at #1: rank 0: barrier; rank 1: split"


def test_what_is_overwritten_is_not_compared(tmp_path):
    """Rank 1 has done so much on its own that what it did in world is gone from its ring."""
    path, ranks = job_of(tmp_path, 2)
    ranks[1].group([1], "world.1:1")
    for rank in ranks:
        for _ in range(3):
            rank.begin("barrier")
    ranks[0].begin("split")
    for _ in range(1100):
        ranks[1].begin("barrier", "world.1:1")
    first, *_ = report(path)
    assert first == "world: rank 1 has not begun #4 split; rank 0 is there"
    ranks[1].begin("barrier")
    first, *_ = report(path)
    assert first == (
        "world: the ranks diverged first at #4: rank 0: split; rank 1: barrier (up to #3 some "
        "entries are overwritten, and were not compared)"
    )


def test_ranks_that_are_there_differ(tmp_path):
    """Not all ranks have begun it, but those that have began different calls."""
    path, ranks = job_of(tmp_path, 5)
    for rank, text in zip(ranks, ("scan", "barrier", None, "barrier", None)):
        rank.begin("split")
        if text:
            rank.begin(text)
    first = report(path)[0]
    assert first == (
        "world: rank 0 diverged first, at #2: rank 0: scan; ranks 1, 3: barrier; "
        "ranks 2, 4 have not begun it"
    )


def test_a_mismatch_that_was_caught_is_none(tmp_path):
    """All ranks waited for each other, raised, and went on: the next one counts."""
    path, ranks = job_of(tmp_path, 3)
    for rank, text in zip(ranks, ("split", "barrier", "barrier")):
        rank.begin(text)
    assert report(path)[0].startswith("world: rank 0 diverged first, at #1: ")
    for rank in ranks:
        rank.begin("barrier")
    assert "diverged" not in "".join(report(path))
    ranks[0].begin("split")
    assert report(path)[0] == "world: ranks 1-2 have not begun #3 split; rank 0 is there"
    for text in ("barrier", "barrier"):
        ranks[2].begin(text)
    ranks[1].begin("barrier")
    assert report(path)[0].startswith("world: rank 0 diverged first, at #3: ")


def test_wait_for_a_message(tmp_path):
    path, (rank,) = job_of(tmp_path, 1)
    rank.begin("barrier")
    track = rank.tracks["world"][0]
    track.awaited = "post_recv of 8 bytes from rank {} with tag 7".format, 3
    track.wait("/a/train.py:41")
    (line,) = report(path)
    assert line.startswith("rank 0: running; after world #1 barrier, waiting since ")
    assert line.endswith(
        " in /a/train.py:41 for post_recv of 8 bytes from rank 3 with tag 7 (world)"
    )


def test_line_that_waits_in_another_thread(tmp_path):
    path, (rank,) = job_of(tmp_path, 1)
    rank.group([0], "world.1:0")
    rank.begin("split", ends=False)
    rank.tracks["world"][0].wait("/a/train.py:41")
    (line,) = report(path)
    assert line.startswith("rank 0: running; in world #1 split, waiting since ")
    assert line.endswith(" in /a/train.py:41")
    rank.begin("barrier", "world.1:0")
    (line,) = report(path)
    assert line.startswith("rank 0: running; after world.1:0 #1 barrier, waiting since ")
    assert line.endswith(" in /a/train.py:41 (world)")


def test_alike_ranks_have_no_divergence(tmp_path):
    path, ranks = job_of(tmp_path, 3)
    for rank in ranks:
        rank.begin("barrier")
    (line,) = report(path, ended={})
    assert line.startswith("ranks 0-2: after world #1 barrier, begun ")


def test_gaps_are_said(tmp_path):
    path, ranks = job_of(tmp_path, 6, absent=(3, 4, 5))
    with open(ranks[1].recorder.path, "r+b") as file:
        file.seek(8 * records.HEADER["version"])
        file.write(struct.pack("<q", 9))
    ranks[0].recorder.words[records.HEADER["unrecorded"]] = 2
    ranks[2].recorder.words[records.HEADER["pid"]] = 0
    ranks[2].begin("barrier")
    ranks[2].recorder.words[records.RING_AT // 8] = 0
    ranks[2].tracks["world"][0].state[records.LAST] = 0
    found = Job(path, hosts={3: "n2", 4: "n2", 5: "n2"}).lines()
    assert any("rank-1." in line and "has version 9" in line for line in found)
    assert f"ranks 3-5: no record here; on n2, mpidist flight {path} there" in found
    here = Job(path, hosts={3: socket.gethostname()}).lines()
    assert "rank 3: no record of this job: without room for one, or not yet started" in here
    assert (
        "ranks 4-5: no record here: on another node, which has its own, or without room for one"
        in here
    )
    assert "rank 0: 2 communicators had no room in the record" in found
    assert "rank 2: an entry is left out: written at its end, or by two threads at once" in found
    assert "rank 2: killed or crashed; no operation begun" in found
    job = Job(path)
    assert job.crashed(2) and job.crashed() and not job.crashed(0)


def test_few_lines(tmp_path):
    path, ranks = job_of(tmp_path, 9)
    for k, rank in enumerate(ranks):
        for _ in range(k):
            rank.begin("barrier")
    *lines, more, last = Job(path).few_lines()
    assert len(lines) == 5 and more == "… 5 lines more"
    assert last == f"more: mpidist flight --last 20 {path}"


def test_few_lines_begin_with_the_lost_rank(tmp_path):
    """On a loaded machine the others are in many places."""
    path, ranks = job_of(tmp_path, 9)
    for rank in ranks:
        rank.begin("barrier")
    for k, rank in enumerate(ranks[:8]):
        for _ in range(k % 7):
            rank.begin("barrier")
    lines = Job(path, {7: "ended with exit code 3"}).few_lines()
    assert lines[1].startswith("rank 7: ended with exit code 3; "), lines
    assert lines[-2].endswith(" lines more")


def test_ranks_that_were_lost_before_are_left_out(tmp_path):
    path, ranks = job_of(tmp_path, 4)
    for rank in ranks[1:]:
        rank.begin("barrier")
    assert "rank 0 has not begun #1 barrier" in report(path)[0]
    found = "\n".join(report(path, without={0}))
    assert "rank 0" not in found and "has not begun" not in found and "ranks 1-3: " in found


def test_events_of_a_trace(tmp_path):
    path, ranks = job_of(tmp_path, 2, absent=[1])
    ranks[0].begin("allreduce op=sum 8 x float64 by ring")
    ranks[0].recorder.phase("md.elastic", "forms the world")
    ranks[0].begin("barrier")
    ranks[0].recorder.phase("md.elastic", "trains")
    job = Job(path)
    (rank,) = job.events()
    first, last, phase, trains = rank.events
    assert (rank.rank, rank.host, rank.full) == (0, socket.gethostname(), False)
    assert [(e.name, e.track) for e in rank.events] == [
        ("allreduce", "world"),
        ("barrier", "world"),
        ("forms the world", "md.elastic"),
        ("trains", "md.elastic"),
    ]
    assert first.details == {"what": "allreduce op=sum 8 x float64 by ring (64 B)", "number": 1}
    assert phase.details == {"what": "forms the world"} and last.details["number"] == 2
    assert first.begin <= phase.begin <= first.end == last.begin <= phase.end == trains.begin
    assert abs(last.end - time.time()) < 60 and last.end == trains.end  # it runs: until now
    assert job.divergences() == []  # a phase has no counterpart on other ranks


def test_events_say_what_is_overwritten_and_how_a_process_ended(tmp_path):
    path, (rank, other) = job_of(tmp_path, 2)
    for _ in range(records.ENTRIES + 5):
        rank.begin("barrier")
    other.begin("barrier")
    other.recorder.end(records.FAILED)
    other.recorder.words[records.HEADER["started"]] += 1  # as of a process that is gone
    whole, gone = Job(path).events()
    assert whole.full and records.ENTRIES <= len(whole.events) <= records.ENTRIES + 1
    (event,) = gone.events
    assert event.details["then"] == "ended by an exception" and event.begin == event.end


def test_find(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_FLIGHT", str(tmp_path / "flights"))
    with pytest.raises(InvalidArgument, match="no flight records in"):
        flight.find(None)
    path, _ = job_of(tmp_path, 1)
    for other in ("logs", "empty"):  # newer ones, that are no jobs
        (tmp_path / "flights" / other).mkdir()
    (tmp_path / "flights" / "logs" / "rank-00000.log").write_text("")
    (tmp_path / "flights" / "file").write_text("")
    assert flight.find(None) == flight.find("job") == flight.find(str(path)) == path
    with pytest.raises(InvalidArgument, match=r"'no': expected a folder.*: job$"):
        flight.find("no")
    with pytest.raises(InvalidArgument, match="No such file"):
        Job(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="logs has no flight records: expected"):
        Job(tmp_path / "flights" / "logs")


PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
import mpidist
from mpidist.backends import flight
comm = mpidist.init()
# The launcher may be slow to end the others.
sys.modules["mpidist.communicator.launch"].LAUNCHER_ENDS_WITHIN = 20.0
x = comm.empty(100, np.float32)
part = comm.split(0)
for step in range(1200):
    comm.allreduce(x, out=x)
part.barrier()
if sys.argv[1] == "stay":
    comm.timeout = 3
y = np.ones(5)
if comm.rank == 1:
    how = sys.argv[1]
    if how == "kill":
        # After a millisecond the line that waits is in a record; the launcher kills the others too.
        records = list(Path(os.environ["MPIDIST_FLIGHT"]).glob("*/rank-*"))
        while sum(any(t.site for t in flight.read(path).tracks) for path in records) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    if how == "stay":
        time.sleep(600)
comm.allreduce(y, out=y)
if sys.argv[1] == "well":
    sys.exit(0)
if sys.argv[1] == "suddenly":
    from mpi4py import MPI
    MPI.Finalize()
    os._exit(0)
time.sleep(600)
"""
BEHIND = r"world: rank 1 has not begun #1\d+ allreduce op=sum 5 x float64 .*ranks 0, 2 are there"
KILLED = r"was killed by signal 9 \(SIGKILL\)|ended with exit code 9"
LINE = PROGRAM.splitlines().index("comm.allreduce(y, out=y)") + 1


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def environment(tmp_path):
    folder = str(tmp_path / "flights")
    return folder, processes.environment(MPIDIST_FLIGHT=folder)


@each_mpi
def test_killed_under_mpiexec(program, tmp_path, python):
    folder, environ = environment(tmp_path)
    command = processes.mpiexec(3, program, "kill", python=python)
    done = processes.run(command, 120, environ)
    assert done.status and not done.timed_out
    (job,) = os.listdir(folder)
    found = "\n".join(report(Path(folder) / job))
    assert re.search(BEHIND, found), found
    assert "rank 1: killed or crashed; after world.1:0 #1 barrier" in found
    # The launcher kills them before or after they know why they wait in vain.
    assert re.search(rf"program.py:{LINE}|ended by an exception", found) and "(40 B)" in found


@each_mpi
@pytest.mark.parametrize("watch", ["--watch", "--no-watch"])
def test_run_tells_where_the_ranks_are(program, tmp_path, python, watch):
    folder, environ = environment(tmp_path)
    command = [python, "-m", "mpidist", "run", watch, "-n", "3", program, "kill"]
    done = processes.run(command, 120, environ)
    lines = [line for line in done.output.splitlines() if line.startswith("mpidist run: ")]
    # Without monitors MPICH's launcher ends with 9.
    assert done.status in (137, 9) and 4 <= len(lines) <= 9, done.output
    assert re.search(BEHIND, lines[0]), lines
    (where,) = (line for line in lines if "run: rank 1: " in line)
    assert "after world.1:0 #1 barrier" in where
    # Without monitors nobody knows which of the ranks that Hydra has killed was the first to end.
    if watch == "--watch" or python == sys.executable:
        assert re.search(rf"({KILLED}); after world.1:0 #1 barrier", where)
        assert re.search(rf"rank 1 on \S+ ({KILLED})$", lines[-1])
    assert "more: mpidist flight --last 20 2" in lines[-2]


@each_mpi
@pytest.mark.parametrize("how", ["well", "suddenly"])
def test_nothing_is_left_of_a_job_that_ends_well(program, tmp_path, python, how):
    folder, environ = environment(tmp_path)
    # Hydra may kill the others if a process ends so that it knows only by its parent, a monitor.
    watch = "--no-watch" if how == "suddenly" else "--watch"
    command = [python, "-m", "mpidist", "run", watch, "-n", "2", program, how]
    done = processes.run(command, 120, environ)
    assert done.status == 0, done.output
    assert not os.path.exists(folder) and "flight" not in done.output


@pytest.mark.long
def test_a_rank_that_is_late(program, tmp_path):
    """Past the deadline of the others mpidist run tells it; nobody was killed."""
    _, environ = environment(tmp_path)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "3", program, "stay"]
    done = processes.run(command, 150, environ)
    assert done.status == 1 and "CollectiveTimeout" in done.output, done.output
    assert re.search(rf"ranks 0, 2: in .*waiting since .*program.py:{LINE}", done.output)
    assert "mpidist run: rank 1: after world.1:0 #1 barrier" in done.output


ENDS = """
import os, sys
import numpy as np
import mpidist
comm = mpidist.init()
y = np.ones(5)
for algorithm in sys.argv[1:]:
    for _ in range(4):
        comm.allreduce(y, algorithm=algorithm, out=y)
if comm.rank == 1:
    os.kill(os.getpid(), 9)
comm.allreduce(y, out=y)
"""


@each_mpi
@pytest.mark.parametrize(
    ("algorithm", "here"),  # ranks of a node
    [*((name, "3") for name in ("native", "ring", "staged")), ("native", "2"), ("auto", "2")],
)
def test_end_of_an_operation_is_recorded(tmp_path, python, algorithm, here):
    """However it is served: by a library, by messages, in shared memory, between nodes."""
    (tmp_path / "ends.py").write_text(ENDS)
    folder, environ = environment(tmp_path)
    command = processes.mpiexec(3, str(tmp_path / "ends.py"), algorithm, python=python)
    done = processes.run(command, 120, {**environ, "MPIDIST_RANKS_PER_NODE": here})
    assert done.status and not done.timed_out
    (job,) = os.listdir(folder)
    found = report(Path(folder) / job)
    (line,) = (line for line in found if line.startswith("rank 1: "))
    assert re.match(r"rank 1: killed or crashed; after world #\d+ allreduce op=sum 5 x", line), (
        found
    )
