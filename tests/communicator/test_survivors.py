"""Ranks are lost, and the rest go on: in every kind of call, one after the other, and several."""

import sys
from functools import cache

import pytest

import mpidist
from mpidist.launcher.mpi import OPEN_MPI, find_library
from tests.support.jobs import each_mpi, job, no_memory_left_behind, said

# On more ranks than are lost, one in each call; what ends a rank other than SIGKILL behind a colon.
CHAINS = [
    "native symmetric staged ring",
    "single_copy linear large half",
    "recv recv-from-any irecv posted",
    "background large-native native-background symmetric-background",
    "barrier:segv broadcast:exit3 objects empty",
    "sub native:exit3 symmetric",
]


@cache
def tolerant():
    """Whether this MPI can go on after a loss."""
    library = find_library()
    return library.vendor == OPEN_MPI and int(library.about.split(" v")[1].split(".")[0]) >= 5


def lossy(ranks, *arguments):
    """Run a job of loss_jobs.py that may lose ranks."""
    if not tolerant():
        pytest.skip("needs Open MPI")
    options = ("--with-ft", "ulfm")
    with no_memory_left_behind():
        done = job(sys.executable, ranks, *arguments, script="loss_jobs.py", options=options)
    assert "Traceback" not in done.output, done.output
    return done


@pytest.mark.parametrize("names", CHAINS)
def test_every_call_is_left_when_a_rank_is_lost(names):
    calls = names.split()
    done = lossy(len(calls) + 2, "chain", *calls)
    assert said(done, "left 2") == [0, 1], done.output
    # Open MPI's own mpirun has the exit code of a rank that ended by one.
    assert done.status == (3 if "exit3" in names else 0), done.output


def test_two_at_once():
    done = lossy(5, "two_at_once")
    assert said(done, "left 3") == [0, 1, 2] and not done.status, done.output


@pytest.mark.parametrize("seconds", ["0", "0.002", "0.01"])
def test_another_loss_while_the_rest_go_on(seconds):
    done = lossy(5, "inside_recovery", seconds)
    assert said(done, "left 3") == [0, 1, 2] and not done.status, done.output


def test_survivors_of_a_part_and_of_all():
    done = lossy(6, "of_a_part")
    assert said(done, "left 5") == [0, 1, 2, 3, 4] and not done.status, done.output


def test_rank_that_does_not_come_is_named():
    done = lossy(4, "one_does_not_come")
    assert said(done, "named") == [0, 3], done.output


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
