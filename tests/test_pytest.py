"""The plugin for users: a suite of its own, without this project's conftest."""

import sys
import time

import pytest

from tests.support import processes
from tests.support.jobs import each_mpi

SETTINGS = """[pytest]
addopts = -ra -p no:cacheprovider --color=no -p mpidist.pytest --with-mpi
timeout = 100
"""
SUITE = """
import os, signal, time
import numpy as np

def test_passes(comm):
    assert comm.allreduce(1) == comm.size
"""


def run(tmp_path, text, *options, python=sys.executable, ranks=2, **env):
    """Run a suite on some ranks; return the status and the output."""
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_suite.py").write_text(SUITE + text)
    words = ["-m", "pytest", "--rank-grace=4", *options, str(tmp_path / "test_suite.py")]
    command = processes.mpiexec(ranks, *words, python=python) if ranks else [python, *words]
    done = processes.run(command, 200, processes.environment(**env), tmp_path)
    assert not done.timed_out, done.output
    return done.status, done.output


@pytest.mark.long
@each_mpi
def test_a_failing_test(python, tmp_path):
    """One report; each rank's failure, and the later tests are run, with a communicator anew."""
    suite = """
def test_fails(comm):
    print("printed on", comm.rank)
    comm.barrier()
    assert comm.rank != 1, "not on this one"
    comm.barrier()
def test_later(comm):
    assert comm.allreduce(1) == comm.size
"""
    # The other ranks wait in their second barrier, and are called out of it.
    status, output = run(tmp_path, suite, python=python, ranks=3, MPIDIST_TIMEOUT="90")
    assert status and output.count("test session starts") == 1
    assert "RankFailed" not in output and "another rank" not in output
    assert "failed on rank 1: AssertionError: not on this one" in output
    assert "printed on 1" in output
    assert "1 failed, 2 passed" in output


@pytest.mark.long
def test_a_test_that_some_ranks_leave(tmp_path):
    """Others are called out of what they wait for, whatever their error, and of a skip, too."""
    suite = """
import pytest
from mpidist.pytest import reports

reports.SKIPS_WITHIN = 5.0

def test_own_errors(comm):
    assert comm.rank != 1, "not on this one"
    try:
        comm.barrier()
    except Exception:
        time.sleep(100)
def test_skips(comm):
    if comm.rank == 0: pytest.skip("not here")
    while True: time.sleep(0.01)
@pytest.mark.xfail(raises=ValueError)
def test_expected(comm):
    if comm.rank == 2: raise ValueError
    comm.recv(comm.empty(1), 2)
def test_two_failures(comm):
    if comm.rank == 1: time.sleep(2)
    assert comm.rank == 2, f"failure {comm.rank}"
    comm.barrier()
def test_all_but_one(comm):
    time.sleep(7 if comm.rank == 1 else 0)
def test_later(comm):
    assert comm.allreduce(1) == comm.size
"""
    begun = time.monotonic()
    status, output = run(tmp_path, suite, ranks=3, MPIDIST_TIMEOUT="90")
    assert time.monotonic() - begun < 90 and status == 1
    assert "failed on rank 1: AssertionError: not on this one" in output
    assert "skipped on rank 0 but not on ranks 1, 2: not here" in output
    assert "failed on rank 0: AssertionError: failure 0" in output
    assert "failed on rank 1: AssertionError: failure 1" in output
    assert "3 failed, 3 passed, 1 xfailed" in output


@pytest.mark.long
@each_mpi
def test_what_follows_a_failure_is_none_of_its_own(python, tmp_path):
    """Slow ranks that skip or fail as expected; waits in a teardown; fixtures, init(), SIGUSR2."""
    suite = """
import pytest
import mpidist as md
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))

def test_slow_skip(comm):
    if RANK: time.sleep(7)
    pytest.skip("everywhere")
@pytest.mark.xfail(strict=True)
def test_slow_expected(comm):
    if RANK: time.sleep(7)
    assert RANK == 2, "on all but one"
@pytest.fixture
def ends_together(comm):
    yield
    comm.barrier()
def test_teardown(comm, ends_together):
    assert RANK == 0, f"own of {RANK}"
    comm.barrier(), comm.barrier()
def test_own(comm, ends_together):
    assert RANK == 1, f"another of {RANK}"
@pytest.fixture
def fails_on_one(): assert RANK != 1, "not set up"
@pytest.fixture(scope="module")
def shared():
    comm = md.init()
    comm.barrier()
    return comm
def test_setup(fails_on_one, request): request.getfixturevalue("shared")
def test_shared(shared): assert shared.allreduce(1) == shared.size
def test_resets(): signal.signal(signal.SIGUSR2, signal.SIG_DFL)
def test_reset_within(comm):
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    time.sleep(7 if RANK else 0)
    assert RANK, "before the others"
def test_init(): assert md.init().allreduce(1) == md.init().size
"""
    status, output = run(tmp_path, suite, python=python, ranks=3, MPIDIST_TIMEOUT="90")
    words = "4 failed, 4 passed, 1 skipped, 1 xfailed in"
    assert status == 1 and words in output, output
    assert "failed on rank 1: AssertionError: own of 1" in output
    assert "failed on rank 2: AssertionError: another of 2" in output
    assert "failed on rank 1: AssertionError: not set up" in output
    assert "failed on rank 0: AssertionError: before the others" in output
    assert "another rank" not in output and "broken" not in output


@pytest.mark.long
def test_a_failure_at_the_end(tmp_path):
    """What it has broken does not end the job."""
    suite = """
def test_fails(comm):
    assert comm.rank != 1, "not on this one"
    comm.barrier()
def test_never(comm): pass
"""
    status, output = run(tmp_path, suite, "-x", MPIDIST_TIMEOUT="90")
    assert status == 1 and "1 failed, 1 passed" in output
    assert "CommunicatorBroken" not in output and "the job ends" not in output, output


@pytest.mark.long
def test_a_hanging_test(tmp_path):
    """Stuck in Python: pytest-timeout ends the test; stuck inside MPI: the ranks show stacks."""
    head = "import pytest\nfrom mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\n"
    head += "@pytest.mark.timeout(4)\n"  # not for test_passes, which starts MPI
    stuck = "def test_stuck():\n    while RANK: time.sleep(0.05)\n"
    status, output = run(tmp_path, head + stuck + "def test_later(): pass\n")
    assert status == 1 and "failed on rank 1: Failed: Timeout" in output
    assert "1 failed, 2 passed" in output
    inside = "def test_inside():\n    if RANK: MPI.COMM_WORLD.recv(source=0, tag=99)\n"
    status, output = run(tmp_path, head + inside)
    assert status and "rank 1 did not come within 8 s to the end of" in output
    assert "the stacks of rank 1 " in output and "in test_inside\n" in output


def test_a_dying_test(tmp_path):
    suite = """
def test_dies(comm):
    comm.barrier()  # the other rank is in this test, too
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    status, output = run(tmp_path, suite)
    assert status
    assert "rank 0: ended by the launcher in test_suite.py::test_dies" in output


def test_simulated_ranks(tmp_path):
    """Without an mpiexec: each test on 1, 2 and 3 threads, with one report, and fixtures."""
    suite = """
import pytest

@pytest.fixture
def part(comm, tmp_path):
    sub = comm.split(comm.rank % 2)
    yield sub
    (tmp_path / f"freed by {comm.rank}").touch()
    sub.free()
@pytest.fixture
def after(tmp_path):
    yield tmp_path
    assert len(list(tmp_path.glob("freed*"))) == len(list(tmp_path.glob("written*"))) > 0
@pytest.mark.parametrize("n", [4, 9])
def test_fixtures(after, part, comm, n):
    assert part.size == len(range(comm.rank % 2, comm.size, 2))
    (after / f"written by {comm.rank}").write_text(str(n))
    comm.barrier()
    assert [path.read_text() for path in after.glob("written*")] == [str(n)] * comm.size
class TestClass:
    def setup_method(self): self.seven = 7
    @pytest.fixture
    def mine(self, comm): return self.seven + comm.rank
    def test_method(self, mine, comm): assert mine == 7 + comm.rank
@pytest.mark.ranks(2)
def test_fails(comm):
    print(f"printed on {comm.rank}" + chr(10), end="")
    comm.barrier()
    if comm.rank: raise ValueError("not on this one")
    comm.barrier()
@pytest.mark.ranks(3)
def test_fails_on_two(comm): assert comm.rank == 1, f"{comm.size} ranks"
@pytest.mark.ranks(2)
def test_later(comm): assert comm.allreduce(1) == 2
def test_without_ranks(): pass
"""
    status, output = run(tmp_path, suite, ranks=0)
    # On 1, 2 and 3 ranks: test_passes of SUITE, test_fixtures twice, test_method; and two more.
    assert status == 1 and "2 failed, 14 passed" in output
    assert output.count("failed on rank 1: ValueError: not on this one") == 1
    assert output.count("failed on ranks 0, 2: AssertionError: 3 ranks") == 1
    assert "printed on 0" in output and "RankFailed" not in output
    assert output.count('raise ValueError("not on this one")') == 1


def test_simulated_ranks_skip_and_expect_failures(tmp_path):
    """A skip counts if it is one of all ranks; an expected failure may be one of any rank."""
    suite = """
import pytest

def test_skipped(comm): pytest.skip("no luck")
@pytest.mark.ranks(3)
def test_half_skipped(comm):
    if comm.rank: pytest.skip("no luck here")
    comm.barrier()
@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, raises=ValueError)
def test_expected(comm):
    if comm.rank: raise ValueError
    comm.barrier()
@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, raises=ValueError)
def test_another_error(comm): raise TypeError("not this one")
@pytest.mark.ranks(2)
def test_known(comm): pytest.xfail("known")
"""
    status, output = run(tmp_path, suite, ranks=0)
    assert status == 1 and "2 failed, 3 passed, 3 skipped, 2 xfailed" in output
    assert "skipped on ranks 1, 2 but not on rank 0: no luck here" in output
    assert "failed on ranks 0, 1: TypeError: not this one" in output
    assert "SKIPPED [3]" in output and "test_known[2ranks] - known" in output


@pytest.mark.long
def test_simulated_ranks_sizes(tmp_path):
    """``--ranks``, and the markers."""
    suite = """
import pytest

@pytest.mark.mpi(min_size=2)
def test_two(comm): assert comm.size >= 2
@pytest.mark.mpi(min_size=7)
def test_seven(comm): assert comm.size == 7
@pytest.mark.ranks(2, 6)
def test_marked(comm): assert comm.size in (2, 6)
@pytest.mark.real_ranks
def test_real(comm): assert comm.backend.name == "mpi" and comm.size == 1
@pytest.fixture
def own(): return 8
@pytest.mark.mpi(min_size=2)
def test_own(own): assert False, "run by pytest-mpi's rules"
"""
    command = ["--strict-markers", "-v", "--ranks=1,5", "--deselect", "test_suite.py::test_own"]
    status, output = run(tmp_path, suite, *command, ranks=0)
    assert status == 0 and "7 passed, 1 deselected" in output
    for name in ("passes[1rank]", "passes[5ranks]", "two[5ranks]", "seven[7ranks]", "real"):
        assert f"test_{name} PASSED" in output
    status, output = run(tmp_path, suite, "-k", "own", ranks=0)
    assert status == 0 and "Test requires 2 MPI processes, only 1" in output
    status, output = run(tmp_path, suite, "--ranks=2,0", ranks=0)
    assert status == 4 and "--ranks=2,0: expected numbers of ranks >= 1" in output
    replaced = "import pytest\n@pytest.fixture\ndef comm(): return type('C', (), {'size': 9})\n"
    status, output = run(
        tmp_path, replaced + "def test_own(comm): assert comm.size == 9\n", "-k", "own", ranks=0
    )
    assert status == 0 and "1 passed" in output


def test_simulated_ranks_without_other_plugins(tmp_path):
    """Neither pytest-mpi, by whose word tests need ``--with-mpi``, nor pytest-timeout."""
    suite = """
import pytest

@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=2)
def test_hangs(comm):
    while comm.rank == 1: time.sleep(0.01)
    comm.barrier()
@pytest.mark.ranks(2)
def test_deadlock(comm):
    if comm.rank: comm.recv(np.empty(1), 0)
"""
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    status, output = run(tmp_path, suite, "--rank-timeout=2", ranks=0, **alone)
    assert status == 1 and "2 failed, 3 passed" in output
    assert "failed on ranks 0, 1, 2: Failed: did not end within 2" in output
    assert "DeadlockError: deadlock: ranks 1 wait for messages" in output


@pytest.mark.long
def test_simulated_ranks_that_hang(tmp_path):
    """pytest-timeout's limit ends the test; the stacks of the hanging ranks are its report."""
    suite = """
import pytest

@pytest.mark.timeout(3)
@pytest.mark.ranks(3)
def test_hangs(comm):
    while comm.rank == 1: time.sleep(0.01)
@pytest.mark.ranks(2)
def test_later(comm):
    import threading
    comm.barrier()
    assert threading.active_count() <= 3  # the hanging one has been ended
"""
    for workers in ((), ("-n1",)):
        status, output = run(tmp_path, suite, *workers, ranks=0)
        assert status == 1 and "1 failed, 4 passed" in output
        assert "failed on rank 1: Failed: did not end within " in output
        assert "while comm.rank == 1: time.sleep(0.01)" in output


@pytest.mark.long
def test_without_other_plugins(tmp_path):
    """Neither pytest-timeout nor pytest-mpi is needed."""
    suite = "def test_fails(comm):\n    assert comm.rank\n"
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    status, output = run(tmp_path, suite, **alone)
    assert status == 1 and "failed on rank 0: assert 0" in output
    hangs = "def test_hangs(comm):\n    while comm.rank: time.sleep(0.05)\n"
    status, output = run(tmp_path, hangs, "--rank-timeout=3", **alone)
    assert status and "rank 1 did not come within 7 s to the end of" in output
