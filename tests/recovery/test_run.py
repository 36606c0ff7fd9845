"""md.elastic in real jobs: ranks are killed, and training ends with the bits of a run without."""

import os
import random
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

import mpidist as md
from mpidist import trace
from mpidist.recovery.run import elastic
from tests.support import elastic_chaos, processes
from tests.support.how_long import takes_minutes
from tests.support.jobs import LIMIT, PYTHONS, ROOT, other_mpis, tolerant

STEPS = 40
STRESS = os.environ.get("MPIDIST_TEST_PROFILE") == "stress"
TORCH = ("ddp", "zero", "torch")
needs_ulfm = pytest.mark.skipif(not tolerant(), reason="needs Open MPI")
LONG = pytest.mark.long


def late(*values):
    """One of many cases, which `make test` leaves out."""
    return pytest.param(*values, marks=LONG)


def train(wrapper, kills="", ranks=3, spares=1, how="kill", steps=STEPS, **env):
    """Run a job; return what became of it, and what its ranks said at the end."""
    if wrapper in TORCH and find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    finished, _, done = elastic_chaos.train(
        wrapper, steps, ranks, spares, KILL=kills, HOW=how, MPIDIST_TIMEOUT="40", **env
    )
    assert not finished.timed_out, finished.output
    return finished, done


@pytest.fixture
def survives(undisturbed):
    """Return what runs a job with losses: its ranks must say at the end what they do without."""

    def survives(wrapper, kills, ranks=3, spares=1, how="kill"):
        finished, done = train(wrapper, kills, ranks, spares, how)
        assert finished.status == 0, finished.output
        assert set(done) == {undisturbed(wrapper, STEPS, ranks)}, finished.output
        return finished.output

    return survives


@needs_ulfm
@pytest.mark.parametrize("point", ["before", late("after"), "stepped", late("committed")])
def test_spare_takes_the_place(survives, point):
    output = survives("numpy", f"1:{point}:20")
    assert re.search(
        r"^rank 1 on .* was killed by signal 9 \(SIGKILL\): step 2[01] goes on with 3 ranks after ",
        output,
        re.MULTILINE,
    )
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(r"mpidist run: finished on 3 of 4 ranks: rank 1 on .* \(SIGKILL\)", last)


@pytest.mark.long
@needs_ulfm
@pytest.mark.parametrize(
    "kills, spares",
    [
        ("0:before:1", 1),  # rank 0, before there is a commit
        late("2:committed:40", 1),  # behind the last step
        ("0:before:5 2:before:5", 2),  # two at once
        late("1:before:5 3:before:3", 2),  # the first spare, later
        late("0:after:5 3:before:1", 2),  # the first spare, at once
        ("0:before:9 1:part:2", 2),  # while MPI makes the communicator of the next generation
        late("0:before:9 3:part:2", 3),  # the spare that is to take the place, there
        late("0:before:9 4:part:2", 2),  # one that is to wait
    ],
)
def test_any_rank_at_any_time(survives, kills, spares):
    survives("numpy", kills, spares=spares)


@pytest.fixture
def small_group():
    """Yield the folder of a control group of 300 MB."""
    root = Path("/sys/fs/cgroup")
    version = 1 if (root / "memory").is_dir() else 2
    folder = root / ("memory" if version == 1 else "") / f"mpidist-test-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs a memory control group of its own")
    try:
        if not limit.exists():  # a folder of another kind of file system
            pytest.skip("needs a memory control group of its own")
        limit.write_text("300000000")
        with suppress(OSError):  # without swap
            (folder / limit.name.replace("memory.limit", "memory.memsw.limit")).write_text(
                "300000000"
            )
            (folder / "memory.swap.max").write_text("0")
        yield str(folder)
    finally:
        until = time.monotonic() + 10
        while folder.is_dir():
            try:
                folder.rmdir()
            except OSError:  # until the kernel has freed the last process
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)


OOM = r"rank 1 on \S+ was killed by signal 9 \(SIGKILL\); as memory ran out, the kernel has killed "


@needs_ulfm
def test_memory_runs_out_on_a_rank_and_a_spare_takes_the_place(survives, small_group):
    last = survives("numpy", "1:before:20", how=small_group).strip().splitlines()[-1]
    assert re.search(f"^mpidist run: finished on 3 of 4 ranks: {OOM}", last), last


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())
def test_memory_runs_out_and_the_job_ends(small_group, python):
    finished, _, done = elastic_chaos.train(
        *("numpy", STEPS, 2, 0), survive=False, python=python, KILL="1:before:20", HOW=small_group
    )
    assert finished.status == 137 and not done, finished.output
    assert re.search(f"^mpidist run: {OOM}", finished.output, re.MULTILINE), finished.output


@pytest.mark.long
@needs_ulfm
def test_all_that_had_begun_are_lost_and_it_says_so():
    finished, done = train("numpy", "0:before:9 1:before:9 2:before:9", spares=3)
    assert finished.status == 0 and len(done) == 3, finished.output
    assert "step 1 goes on with 3 ranks after" in finished.output
    assert "none of those that are left had begun, so training begins anew" in finished.output


@needs_ulfm
@pytest.mark.parametrize("spares, held", [(1, "0"), late(0, "0"), (1, "2")])
def test_a_rank_that_differs_for_the_third_time_is_lost(spares, held):
    finished, done = train("faulty", ranks=4, spares=spares, steps=30, HELD=held)
    ranks, output = 3 + spares, finished.output
    assert finished.status == 0 and len(done) == ranks and len(set(done)) == 1, output
    assert f" of {ranks} ranks at step 30" in done[0]
    assert output.count("they have the values of the others now") == 2
    assert re.search(
        r"rank 1: .* rank 1 for the 3rd time .*; this rank ends$", output, re.MULTILINE
    )
    assert re.search(rf"step 15 goes on with {ranks} ranks", output)


@needs_ulfm
@pytest.mark.long
def test_a_rank_at_fault_is_an_error_where_its_share_of_a_copy_would_be_restored():
    finished, done = train("faulty", ranks=4, spares=1, steps=30, COPIES="1")
    assert finished.status and not done, finished.output
    assert "for the 3rd time" in finished.output and "this rank ends" not in finished.output


@needs_ulfm
def test_timeline_of_a_loss(tmp_path):
    finished, done = train("numpy", "1:before:20", MPIDIST_FLIGHT=str(tmp_path))
    assert finished.status == 0 and len(done) == 3, finished.output
    (job,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "mpidist", "flight", "--trace", "loss.json", str(job)]
    told = processes.run(command, LIMIT, processes.environment(), cwd=tmp_path)
    assert re.search(r"\d+ operations of 4 ranks in loss.json", told.output), told.output
    rows = [row for row in trace.read(tmp_path / "loss.json") if row["ph"] == "X"]
    phases = {k: [] for k in range(4)}
    for row in sorted(rows, key=lambda row: row["ts"]):
        if "number" not in row["args"]:  # no collective
            phases[row["pid"]].append(row["name"])
    start, again = (
        ["deals the numbers", "begins", "trains"],
        ["deals the numbers", "restores the state of the last commit", "trains"],
    )
    left = [
        "leaves its calls, as a rank is lost",
        "waits for the others",
        "forms the world of the ranks that are left",
    ]
    ended = ["waits for the others, as training has ended"]
    assert phases[1] == start
    assert phases[0] == phases[2] == [*start, *left, *again, *ended]
    assert phases[3] == [start[0], "waits as a spare", *left, *again, *ended]
    lost = max(row["ts"] for row in rows if row["pid"] == 1)
    assert lost < min(row["ts"] for row in rows if row["name"] == left[0]) + 4e3  # 4 ms: the clock


@needs_ulfm
@pytest.mark.parametrize("how", ["exit", "crash"])
def test_however_it_ends(survives, how):
    survives("numpy", "1:after:7", how=how)


@pytest.mark.long
@needs_ulfm
@pytest.mark.parametrize("wrapper", ["rows", late("nn")])
def test_other_states(survives, wrapper):
    survives(wrapper, "2:after:11")


@pytest.mark.long
@needs_ulfm
@pytest.mark.parametrize("how, kills", [("keep", "1:validated:9"), ("average", "0:before:9")])
def test_buffers_rates_and_modes(survives, how, kills):
    """What a failed step has changed, and what of each rank DDP would make equal again."""
    survives(how, kills, ranks=2)


@needs_ulfm
@pytest.mark.long
def test_copies_are_whole_when_the_spare_is_lost_before_its_first_commit(survives):
    """Its record has what `keep` has not yet restored, too."""
    survives("rows", "0:after:5 3:before:1", spares=2)


@needs_ulfm
@pytest.mark.parametrize("kills", ["1:before:1", late("1:after:1"), late("0:before:1 3:before:1")])
def test_copies_are_there_before_the_first_commit(survives, kills):
    """Objects of `keep` are the first that need them."""
    survives("rows", kills, spares=2)


@needs_ulfm
@pytest.mark.long
@pytest.mark.timeout(300)  # 8 processes import PyTorch
@pytest.mark.parametrize("kills", ["2:stepped:1", "0:stepped:9 3:stepped:1"])
def test_part_of_an_optimizer_lost_before_the_first_commit(survives, kills):
    """Calls of that step had been told the state of generators, before `keep` asked for copies."""
    survives("zero", kills, spares=2)


@needs_ulfm
@pytest.mark.long
@pytest.mark.timeout(300)  # 8 processes import PyTorch
@pytest.mark.parametrize("wrapper, ranks", [("ddp", 3), ("zero", 3), ("torch", 2)])
def test_wrappers_of_pytorch(survives, wrapper, ranks):
    output = survives(wrapper, "1:after:11", ranks)
    assert "comes between the step of an optimizer and commit()" not in output


@needs_ulfm
@takes_minutes
@pytest.mark.parametrize(
    "wrapper, ranks",
    [("ddp", 3), ("zero", 3), ("torch", 2), ("nn", 3), ("rows", 3), ("pipeline", 3), ("topk", 3)],
)
@pytest.mark.parametrize("point", ["before", "after", "stepped", "committed"])
@pytest.mark.parametrize("kills", ["0:{0}:9", "1:{0}:1", "0:{0}:5 {1}:{0}:1", "0:{0}:5 1:{0}:6"])
def test_wrappers_at_each_point(survives, wrapper, ranks, point, kills):
    """Also in the first step, and in the first one of a spare."""
    survives(wrapper, kills.format(point, ranks), ranks, spares=2)


@needs_ulfm
@pytest.mark.parametrize("wrapper", ["numpy", late("rows"), late("nn")])
def test_without_a_spare_fewer_go_on(wrapper):
    finished, done = train(wrapper, "0:after:9 2:before:20", spares=0)
    assert finished.status == 0, finished.output
    (one,) = set(done)
    assert f"of 1 ranks at step {STEPS}" in one
    assert "goes on with 2 ranks" in finished.output and "finished on 1 of 3" in finished.output


@pytest.mark.long
@needs_ulfm
def test_reproducible_training_has_the_same_bits_on_fewer_ranks(undisturbed):
    """Lost between the microbatches of a step, and in its average: 4, 3, then 2 ranks."""
    finished, done = train("same", "1:before:40 2:after:100", ranks=4, spares=0)
    assert finished.status == 0 and len(done) == 2, finished.output
    weights = undisturbed("same", STEPS, 4).split()[1]
    assert {line.split(" at ")[0] for line in done} == {f"done {weights} of 2 ranks"}


@needs_ulfm
@pytest.mark.long
def test_zero_deals_the_moments_to_fewer_ranks():
    finished, done = train("zero", "1:after:9", spares=0)
    assert finished.status == 0 and len(set(done)) == 1, finished.output
    assert f"of 2 ranks at step {STEPS}" in done[0]


@pytest.mark.long
@needs_ulfm
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("point", ["before", "after"])
def test_stages_of_a_pipeline(survives, ranks, point):
    """Three stages, and two with two replicas each."""
    survives("pipeline", f"1:{point}:9 {ranks - 1}:{point}:17", ranks, spares=2)


@pytest.mark.long
@needs_ulfm
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=LONG)])
def test_stages_are_cut_anew_for_fewer_ranks(undisturbed, ranks):
    """When nothing is learned any more: they have the weights of all."""
    finished, done = train("pipeline", f"0:after:{STEPS - 5}", ranks, spares=0)
    assert finished.status == 0 and len(done) == ranks - 1, finished.output
    weights = undisturbed("pipeline", STEPS, ranks).split()[1]
    assert {
        line.split()[1:6] == [weights, "of", str(ranks - 1), "ranks", "at"] for line in done
    } == {True}


@pytest.mark.long
@needs_ulfm
def test_exception_ends_the_job():
    """It is no loss: the others would do the same again."""
    finished, done = train("numpy", "1:after:9", how="raise")
    assert finished.status == 1 and not done, finished.output
    assert "ValueError: of the test" in finished.output and "goes on" not in finished.output


def test_chaos_counts_the_steps_done_again(tmp_path):
    for rank, steps in (0, "12334"), (1, "123234"), (2, "34"):
        said = "".join(f"step {step}\n" for step in steps)
        (tmp_path / str(rank)).write_text(f"pid {rank} 1\n{said}done 0 of 3 ranks at step 4\n")
    assert elastic_chaos.Watched(str(tmp_path)).again() == 2


@needs_ulfm
@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["numpy", *(("pipeline", *TORCH) if STRESS else ())])
def test_chaos_of_many_losses(undisturbed, capsys, wrapper):
    """A few at the same moments each time; in `make stress` many, of each kind of training."""
    if wrapper in TORCH and find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    losses, seed = (64, random.randrange(1 << 32)) if STRESS else (8, 3)
    known = undisturbed("numpy", elastic_chaos.STEPS["numpy"]) if wrapper == "numpy" else ""
    elastic_chaos.chaos(wrapper, losses, seed, known)
    output = capsys.readouterr().out
    with capsys.disabled():
        print(f"\nseed {seed}: {output.splitlines()[-1]}" if STRESS else "", end="")
    assert f"{losses} losses in " in output


PROGRAM = """
import os, sys
import numpy as np
import mpidist as md

@md.elastic{options}
def train(comm, state, more, *, also):
    assert md.init() is comm and (more, also) == (5, 6)
    for step in range(3):
        if os.environ.get("OMPI_COMM_WORLD_RANK", "") == os.environ.get("KILL", "none"):
            os.kill(os.getpid(), int(os.environ.get("SIGNAL", "9")))
        comm.allreduce(1)
        state.commit()
    return comm.rank

{before}

def tell(*words):  # in one piece: unbuffered, print() writes the parts of a line on their own
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

tell("got", train(md.State(x=np.zeros(2)), 5, also=6))
{after}
"""


def program(*words, python=sys.executable, options="", before="", after="", **env):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(PROGRAM.format(options=options, before=before, after=after))
        command = [python, "-m", "mpidist", "run", "-q", *words, str(path)]
        environ = processes.environment(PYTHONPATH=str(ROOT), MPIDIST_TIMEOUT="40", **env)
        return processes.run(command, LIMIT, environ)


@needs_ulfm
def test_function_gets_arguments_and_returns():
    done = program("-n", "2", "--spares", "1")
    assert done.status == 0, done.output
    assert sorted(done.output.split("\n")) == ["", "got 0", "got 1", "got None"]


@pytest.mark.long
@needs_ulfm
@pytest.mark.parametrize("kill", ["", "1"])
def test_second_call_goes_on_with_the_ranks_that_are_left(kill):
    """The spare that has taken a place keeps its number; one that has not waits again."""
    again = 'tell("again", train(md.State(x=np.zeros(2)), 5, also=6))'
    done = program("-n", "2", "--spares", "2", after=again, KILL=kill)
    assert done.status == 0, done.output
    said = sorted(x for x in done.output.split("\n") if x.startswith(("again", "got")))
    more = 1 if kill else 2
    expected = [f"{call} {n}" for call in ("again", "got") for n in (0, 1, *[None] * more)]
    assert said == expected, done.output


@pytest.mark.long
@needs_ulfm
def test_fewer_than_min_ranks_end_the_job():
    done = program("-n", "3", "--survive", options="(min_ranks=3)", KILL="1")
    assert done.status and "2 ranks are left, min_ranks=3" in done.output, done.output
    done = program("-n", "2", "--survive", options="(min_ranks=3)")
    assert done.status and "min_ranks=3: expected at most 2, the ranks" in done.output, done.output


@pytest.mark.long
@needs_ulfm
def test_stopped_rank_is_killed_after_a_roll_call():
    words = "-n", "2", "--spares", "1", "--hang-kill", "5"
    done = program(*words, KILL="1", SIGNAL=str(int(signal.SIGSTOP)))
    assert done.status == 0, done.output
    killed = done.output.index("rank 1: all others wait for it (--hang-kill): killing it")
    assert "no rank has moved for 5 s" in done.output[:killed]
    assert re.search(r"^rank 1 .*SIGKILL\): step 1 goes on with 2 ranks", done.output, re.MULTILINE)


@pytest.mark.long
@needs_ulfm
def test_init_outside_is_refused_with_spares():
    done = program("-n", "2", "--spares", "1", before="md.init()")
    assert done.status == 1, done.output
    assert "init: MPIDIST_SPARES=1: this job has ranks that wait to take the place" in done.output


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())
def test_launch_that_cannot_says_so_at_the_start(python):
    done = program("-n", "2", python=python)
    assert done.status == 0, done.output
    assert "md.elastic: the job ends when a rank is lost: " in done.output
    assert "started by mpidist run --survive" in done.output or "--with-ft ulfm" in done.output
    assert "mpidist run --max-restarts K starts it again, from memory" in done.output


@other_mpis
def test_spares_are_refused_by_name(python):
    done = program("-n", "2", "--spares", "1", python=python)
    assert done.status == 2 and "--spares 1: MPICH " in done.output, done.output


def test_one_process_without_mpiexec():
    done = processes.run(
        [sys.executable, "-c", PROGRAM.format(options="", before="", after="")],
        LIMIT,
        processes.environment(PYTHONPATH=str(ROOT)),
    )
    assert done.status == 0 and done.output.strip() == "got 0", done.output


def test_arguments():
    with pytest.raises(md.InvalidArgument, match="min_ranks=0: expected"):
        elastic(min_ranks=0)
    with pytest.raises(md.InvalidArgument, match="elastic: 3: expected a function"):
        elastic(3)

    @elastic
    def train(comm, state):
        raise AssertionError

    with pytest.raises(md.InvalidArgument, match="train: the first argument has type dict"):
        train({})
    assert train.__name__ == "train" and os.environ.get("MPIDIST_SPARES") is None


@pytest.mark.parametrize("first", ["State", "elastic"])
def test_function_is_found_whatever_comes_first(first):
    """The room of this name does not hide it."""
    code = f"import mpidist as md; md.{first}; print(md.elastic(lambda comm, state: 0), md.State)"
    environ = processes.environment(PYTHONPATH=str(ROOT))
    done = processes.run([sys.executable, "-c", code], LIMIT, environ)
    assert done.status == 0 and "<function <lambda>" in done.output, done.output
