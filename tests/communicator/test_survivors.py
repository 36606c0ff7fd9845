"""Ranks are lost, and the rest go on: in every kind of call, one after the other, and several."""

import os
import re
import sys

import pytest

import mpidist
from mpidist.errors import InvalidArgument
from mpidist.launcher.flight import Job
from mpidist.launcher.job import JobOptions
from tests.support import processes
from tests.support.jobs import (
    HERE,
    LIMIT,
    ROOT,
    each_mpi,
    job,
    no_memory_left_behind,
    other_mpis,
    said,
    tolerant,
)

# On more ranks than are lost, one in each call; what ends a rank other than SIGKILL behind a colon.
CHAINS = [
    "native symmetric staged ring",
    "single_copy linear large half",
    "recv recv-from-any irecv posted",
    "background large-native native-background symmetric-background",
    "barrier:segv broadcast:exit3 objects empty",
    "sub native:exit3 split symmetric",
]


def lossy(ranks, *arguments):
    """Run a job of loss_jobs.py that may lose ranks."""
    if not tolerant():
        pytest.skip("needs Open MPI")
    options = ("--with-ft", "ulfm")
    with no_memory_left_behind():
        done = job(sys.executable, ranks, *arguments, script="loss_jobs.py", options=options)
    assert "Traceback" not in done.output, done.output
    return done


@pytest.mark.long
@pytest.mark.parametrize("names", CHAINS)
def test_every_call_is_left_when_a_rank_is_lost(names):
    calls = names.split()
    done = lossy(len(calls) + 2, "chain", *calls)
    assert said(done, "left 2") == [0, 1], done.output
    # Open MPI's own mpirun has the exit code of a rank that ended by one.
    assert done.status == (3 if "exit3" in names else 0), done.output


def test_split_is_left_when_a_rank_dies_in_the_call_of_the_library():
    done = lossy(8, "in_split")
    assert said(done, "left 2") == [0, 1] and not done.status, done.output


@pytest.mark.long
def test_part_without_the_lost_rank_stays_usable_after_a_split_that_was_left():
    done = lossy(4, "beside_split")
    assert said(done, "right") == [0, 1, 2] and not done.status, done.output


def test_two_at_once():
    done = lossy(5, "two_at_once")
    assert said(done, "left 3") == [0, 1, 2] and not done.status, done.output


@pytest.mark.long
@pytest.mark.parametrize("where", ["meeting", "made", "set-up", "end"])
def test_another_loss_while_the_rest_go_on(where):
    done = lossy(5, "inside_recovery", where)
    assert said(done, "left 3") == [0, 1, 2] and not done.status, done.output


@pytest.mark.long
def test_a_failed_set_up_does_not_crash_who_is_still_making_the_communicator():
    done = lossy(4, "stopped_in_shrink")
    assert said(done, "left 3") == [0, 1, 2] and not done.status, done.output


@pytest.mark.long
def test_survivors_of_a_part_and_of_all():
    done = lossy(6, "of_a_part")
    assert said(done, "left 5") == [0, 1, 2, 3, 4] and not done.status, done.output


@pytest.mark.long
def test_rank_that_does_not_come_is_named():
    done = lossy(4, "one_does_not_come")
    assert said(done, "named") == [0, 3], done.output


@pytest.mark.long
def test_rank_that_has_ended_is_named():
    done = lossy(4, "one_has_ended")
    assert said(done, "named") == [1, 3], done.output


@pytest.mark.long
def test_survivors_have_deadlines_of_their_own():
    done = lossy(3, "much_later")
    assert said(done, "left 2") == [0, 1] and not done.status, done.output


@pytest.mark.long
def test_files_stay_as_many():
    done = lossy(7, "many_losses")
    assert said(done, "left 2") == [0, 1] and not done.status, done.output


@each_mpi
def test_without_fault_tolerance_it_says_what_works(python):
    done = job(python, 2, "unsupported", script="loss_jobs.py")
    assert said(done, "unsupported") == [0, 1] and not done.status, done.output


def test_simulated_ranks_cannot():
    def program(comm):
        with pytest.raises(mpidist.Unsupported, match="simulated backend does not go on"):
            comm.survivors()
        return comm.allreduce(1)

    assert mpidist.run_simulated(3, program) == [3, 3, 3]


def supervised(python, ranks, *arguments, **environ):
    """Run a job of loss_jobs.py by mpidist run --survive; return it and its last line."""
    command = [python, "-m", "mpidist", "run", "-q", "-n", str(ranks), "--survive"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with no_memory_left_behind():
        done = processes.run(
            [*command, str(HERE / "loss_jobs.py"), *arguments],
            LIMIT,
            processes.environment(PYTHONPATH=path, **environ),
        )
    assert not done.timed_out, done.output
    return done, done.output.strip().splitlines()[-1]


@pytest.mark.long
def test_job_that_goes_on_has_succeeded(tmp_path):
    """Also where more ranks end by exit codes than Open MPI's own launcher can count."""
    if not tolerant():
        pytest.skip("needs Open MPI")
    calls = ["chain", *["ring:exit3"] * 3, "native"]
    done, last = supervised(sys.executable, 6, *calls, MPIDIST_FLIGHT=f"{tmp_path}/flights")
    assert done.status == 0, done.output
    assert last.startswith("mpidist run: finished on 2 of 6 ranks: rank 5 on "), last
    assert last.count(" ended with exit code 3") == 3 and "killed by signal 9 (SIGKILL)" in last
    assert done.output.count("; the others go on") == 4
    # Each loss is told with what its flight record says, and the records are kept.
    assert done.output.count("mpidist run: more: mpidist flight --last 20 ") == 4
    first = done.output.partition("; the others go on")[0]
    assert "mpidist run: rank 5: ended with exit code 3; after world #" in first, first
    assert done.output.count("rank 5: ended with exit code 3; after ") == 1  # not at each loss
    lost = {int(number) for number in re.findall(r"rank (\d+) on ", last)}
    (job,) = tmp_path.joinpath("flights").iterdir()
    assert {r.rank for r in Job(job).records if r.crashed} == lost


def test_job_that_does_not_go_on_has_failed():
    if not tolerant():
        pytest.skip("needs Open MPI")
    done, last = supervised(sys.executable, 3, "nobody_goes_on")
    assert done.status == 128 + 9 and "rank 1 on " in last and "SIGKILL" in last, done.output
    assert "RankFailed: " in done.output


@other_mpis
def test_other_mpis_are_refused_by_name(python):
    command = [python, "-m", "mpidist", "run", "-n", "2", "--survive", "-c", "pass"]
    done = processes.run(command, LIMIT, processes.environment())
    assert done.status == 2 and "--survive: MPICH " in done.output, done.output
    assert "with this one, --max-restarts K starts the job again" in done.output


@pytest.mark.parametrize("options", [{"launcher": "srun"}, {"mpi": "pmix"}])
def test_srun_is_refused(options):
    with pytest.raises(InvalidArgument, match="--survive: .* srun ends all ranks"):
        JobOptions(survive=True, **options).check(object())
