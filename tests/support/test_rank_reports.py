"""The conftest itself: what rank 0 reports of tests that go wrong on some ranks."""

import re

import pytest

from tests.support.throwaway import HANGS, closing, launch


def test_failure_on_one_rank(tmp_path):
    suite = """
def test_fails_on_rank_1():
    print("printed on rank", world.rank)
    assert world.rank != 1, "not on this one"
def test_passes(): assert world.allreduce(1) == 2
@pytest.mark.mpi(min_size=3)
def test_skipped(): pass
"""
    status, output = launch(tmp_path, suite)
    assert status == 1
    assert "failed on rank 1: AssertionError: not on this one" in output
    assert "printed on rank 1" in output and "printed on rank 0" not in output
    assert output.count("test session starts") == 1  # the other ranks are silent
    line = next(line for line in output.splitlines() if " 2 ranks " in line)
    assert re.search(r"1 passed +1 failed +1 skipped .* 1 x Test requires 3 MPI processes", line)
    assert closing(output) == "1 passed, 1 failed, 1 skipped"


def test_setup_and_teardown_count_too(tmp_path):
    suite = """
@pytest.fixture
def early():
    if world.rank == 1: raise RuntimeError("too early")
@pytest.fixture
def late():
    yield
    if world.rank == 0: raise RuntimeError("too late")
def test_setup(early): pass
def test_teardown(late): pass
def test_both(): assert world.size == 3
"""
    status, output = launch(tmp_path, suite)
    assert status == 1
    assert "failed on rank 1: RuntimeError: too early" in output
    assert "failed on rank 0: RuntimeError: too late" in output
    assert "failed on ranks 0, 1: assert 2 == 3" in output
    assert closing(output) == "0 passed, 3 failed, 0 skipped"


def test_ranks_must_agree_on_a_skip(tmp_path):
    suite = """
def test_half_skipped():
    if world.rank == 1: pytest.skip("needs Open MPI")
"""
    status, output = launch(tmp_path, suite)
    assert status == 1
    assert "skipped on rank 1 but not on rank 0: needs Open MPI" in output


def test_ranks_must_find_the_same_tests(tmp_path):
    suite = """
@pytest.mark.parametrize("n", range(2 + world.rank))
def test_some(n): pass
"""
    status, output = launch(tmp_path, suite)
    assert status == 1
    assert "rank 1 found other tests than rank 0: 3 tests, not 2" in output
    assert closing(output) == "0 passed, 1 failed, 0 skipped"


def test_a_file_that_one_rank_cannot_import(tmp_path):
    status, output = launch(tmp_path, "assert world.rank != 1, 'at import'")
    assert status == 1
    assert "AssertionError: at import" in output
    assert closing(output) == "0 passed, 1 failed, 0 skipped"


@pytest.mark.long
def test_hang_in_python(tmp_path):
    suite = """
def test_hangs():
    while world.rank: time.sleep(0.05)
def test_passes(): assert world.allreduce(1) == 2
"""
    status, output = launch(tmp_path, suite, limit=HANGS)
    assert status == 1
    assert "Timeout (0:00:01)!" in output  # faulthandler, of every rank
    assert "failed on rank 1: Failed: Timeout" in output
    assert closing(output) == "1 passed, 1 failed, 0 skipped"


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_hang_inside_mpi(tmp_path, rank):
    suite = f"""
def test_passes(): pass
def test_hangs_in_mpi():
    if world.rank == {rank}: world.recv(source=1 - {rank}, tag=99)
def test_never_run(): pass
"""
    status, output = launch(tmp_path, suite, limit=HANGS)
    assert status == 1
    why = f"rank {rank} did not come within 8 s to the end of test_suite.py::test_hangs_in_mpi"
    assert why in output.splitlines()[-2]
    assert f"the stacks of rank {rank} " in output
    # One by faulthandler_timeout, one when the other rank gave up.
    assert len(re.findall(r"in test_hangs_in_mpi\n", output)) == 2
    assert closing(output) == "1 passed, 1 failed, 0 skipped"


@pytest.mark.long
def test_a_hang_of_every_rank_inside_mpi(tmp_path):
    status, output = launch(
        tmp_path, "def test_hangs(): world.recv(source=world.rank, tag=99)", limit=HANGS
    )
    assert status == 1
    assert "no rank came to the end of test_suite.py::test_hangs" in output.splitlines()[-2]
    assert len(re.findall(r"in test_hangs\n", output)) == 4
    assert closing(output) == "0 passed, 1 failed, 0 skipped"


@pytest.mark.long
def test_the_communicator_is_renewed_after_a_failure(tmp_path):
    suite = """
def test_out_of_step(comm):
    if comm.rank == 0: raise RuntimeError("before the collective")
    comm.iallreduce(1)
def test_in_step(comm): assert comm.allreduce(1) == comm.size
def test_times_out(comm):
    if comm.rank == 0: comm.barrier()
    assert comm.rank
def test_in_step_again(comm): assert comm.allreduce(1) == comm.size
"""
    # Stacks that are shown after 1 s too, just as the rank raises its error, may crash CPython.
    head = "import faulthandler\nfaulthandler.dump_traceback_later = lambda *_, **__: None\n"
    head += "os.environ['MPIDIST_TIMEOUT'] = '3'\n"
    status, output = launch(tmp_path, head + suite)
    assert status == 1
    assert "RuntimeError: before the collective" in output and "CollectiveTimeout" in output
    assert closing(output) == "2 passed, 2 failed, 0 skipped"
