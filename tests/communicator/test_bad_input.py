"""Bad input under MPI: a clear error, no hang, and the next call is right."""

import sys
from itertools import product

import numpy as np
import pytest

from mpidist import Op
from mpidist.communicator.simulation import run_simulated
from mpidist.errors import CollectiveMismatch, InvalidArgument
from mpidist.operations import find_op
from tests.support import processes
from tests.support.jobs import LIMIT, each_mpi, job, said


@each_mpi
@pytest.mark.parametrize("debug", ["0", "1"])
def test_bad_input_on_every_rank(python, debug):
    finished = job(python, 3, "bad_input", MPIDIST_DEBUG=debug)
    assert said(finished, "usable") == [0, 1, 2] and finished.status == 0, finished.output


@each_mpi
def test_debug_shows_who_called_what_where(python):
    finished = job(python, 3, "debug_mismatches", MPIDIST_DEBUG="1")
    assert said(finished, "usable") == [0, 1, 2] and finished.status == 0, finished.output
    for text in (
        "table kind: rank 1: barrier",
        "table length: rank 1: allreduce op=sum 4 x float64",
        "table op: rank 1: allreduce op=max 1 x int64",
        "table dtype: rank 1: allreduce op=sum 2 x float32",
        "table root: rank 1: broadcast root=1 2 x float64",
        "table raises: rank 1: raised InvalidRank: rank 1: root=99 is not a rank",
        "table split: rank 1: raised InvalidArgument: rank 1: color=-1",
        "table empty: rank 1: empty (4,), float64",
        "table counts: rank 1: barrier",
        "table scatter: rank 1: barrier",
    ):
        assert said(finished, text) == [0, 1, 2], text


@each_mpi
def test_mismatched_native_collectives(python):
    finished = job(python, 3, "mismatches")
    assert said(finished, "usable") == [0, 1, 2] and finished.status == 0, finished.output


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("algorithm", ["ring", "linear", "recursive_doubling", "rabenseifner"])
def test_arrays_of_different_length(python, algorithm):
    """Those who can see it raise; it ends in time, and nobody gets wrong numbers unnoticed."""
    finished = job(python, 3, "lengths", algorithm)
    assert finished.status, finished.output
    assert "RAW" not in finished.output
    assert said(finished, "raised CollectiveMismatch"), finished.output
    assert said(finished, "returned") == [], finished.output


ON_ONE_RANK = """import os, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
for name, text in zip(sys.argv[1::2], sys.argv[2::2]):
    if rank == 1:
        os.environ[name] = text
    import mpidist
    try:
        comm = mpidist.init(timeout=30)
        print(f"<{rank}: {comm.debug} {comm.allreduce(1)}>", flush=True)
    except mpidist.ConfigError as error:
        print(f"<{rank}: {error}>", flush=True)
    os.environ.pop(name, "")
"""


def set_on_one_rank(python, folder, *names_and_texts):
    """The output of a job in which only rank 1 has variables of the environment, in turn."""
    (folder / "one.py").write_text(ON_ONE_RANK)
    words = processes.mpiexec(3, str(folder / "one.py"), *names_and_texts, python=python)
    done = processes.run(words, LIMIT)
    assert done.status == 0, done.output
    return done.output


@each_mpi
def test_nodes_that_one_rank_alone_is_told_of(python, tmp_path):
    said = set_on_one_rank(python, tmp_path, "MPIDIST_RANKS_PER_NODE", "1")
    text = "rank 1: MPIDIST_RANKS_PER_NODE='1', but not set on rank 0: expected the same"
    assert [said.count(f"<{rank}: {text}") for rank in range(3)] == [1, 1, 1], said


@each_mpi
def test_debug_on_one_rank(python, tmp_path):
    """Rank 0's setting is used on every rank."""
    said = set_on_one_rank(python, tmp_path, "MPIDIST_DEBUG", "1")
    assert [said.count(f"<{rank}: False 3>") for rank in range(3)] == [1, 1, 1], said


@pytest.mark.long
@each_mpi
def test_a_variable_that_is_wrong_on_one_rank(python, tmp_path):
    """Every rank raises it, instead of waiting for the rank that did; and `init` again."""
    wrong = {
        "MPIDIST_RANKS_PER_NODE": "x",
        "MPIDIST_DEBUG": "nan",
        "MPIDIST_TIMEOUT": "soon",
        "MPIDIST_CALIBRATE": "x",
        "MPIDIST_STREAM_BYTES": "x",
        "MPIDIST_GPU": "x",
        "MPIDIST_LOG": "x",
        "MPIDIST_LOG_RANKS": "\N{SUPERSCRIPT TWO}",
    }
    said = set_on_one_rank(python, tmp_path, *(word for pair in wrong.items() for word in pair))
    for name, text in wrong.items():
        expected = f": rank 1: {name}={text!r}: expected "
        assert [said.count(f"<{rank}{expected}") for rank in range(3)] == [1, 1, 1], (name, said)


ARGUMENT_ON_ONE_RANK = """from mpi4py import MPI
import mpidist
rank = MPI.COMM_WORLD.Get_rank()
given = {"thread_level": "some"}, {"timeout": -1}, {"config": 3}
for arguments in given:
    try:
        mpidist.init(**(arguments if rank == 1 else {}))
    except mpidist.MpidistError as error:
        print(f"<{rank}: {error}>", flush=True)
try:
    mpidist.init(debug=(lambda: None) if rank == 0 else None)
except Exception as error:
    print(f"<{rank}: debug {error}>", flush=True)
print(f"<{rank}: {mpidist.init(timeout=30).allreduce(1)}>", flush=True)
"""


@each_mpi
def test_an_argument_of_init_that_is_wrong_on_one_rank(python, tmp_path):
    """Every rank raises it, and `init` can be called again."""
    (tmp_path / "one.py").write_text(ARGUMENT_ON_ONE_RANK)
    words = processes.mpiexec(3, str(tmp_path / "one.py"), python=python)
    done = processes.run(words, LIMIT)
    assert done.status == 0, done.output
    for rank in range(3):
        for text in (
            "rank 1: thread_level='some': ",
            "rank 1: timeout=-1",
            "rank 1: config=3: expected a CollectiveConfig>",
            "debug ",
            "3>",
        ):
            assert f"<{rank}: {text}" in done.output, (rank, text, done.output)


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [("MPIDIST_DEBUG", text, "0 or 1") for text in ("nan", "x", "-1")]
    + [
        ("MPIDIST_GPU", "x", "one of 'nccl'"),
        ("MPIDIST_GPU_AWARE", "x", "0 or 1"),
        ("MPIDIST_GPU_CHUNK_BYTES", "x", "a whole number of bytes >= 1"),
    ],
)
def test_a_variable_that_is_wrong(name, text, allowed):
    """Also where it would have no effect, as without a GPU."""
    words = [sys.executable, "-c", "import mpidist; mpidist.init()"]
    done = processes.run(words, LIMIT, processes.environment(**{name: text}))
    assert done.status == 1 and f"ConfigError: {name}='{text}': expected {allowed}" in done.output


def test_zero_ranks():
    for size in (0, -3):
        with pytest.raises(InvalidArgument, match=f"size={size}: .*>= 1"):
            run_simulated(size, lambda comm: None)


def test_an_operation_that_is_no_function():
    with pytest.raises(InvalidArgument, match="op function=3: .* function"):
        Op(3)
    with pytest.raises(InvalidArgument, match=r"op=5: .* or Op\(function, commute=True or False\)"):
        find_op(5)


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("algorithm", ["native", "ring", "linear"])
def test_unlike_calls_on_different_nodes(python, algorithm):
    forms = ("blocking", "bound", "background")
    finished = job(python, 2, "unlike", algorithm, *forms, MPIDIST_RANKS_PER_NODE="1")
    assert said(finished, "usable") == [0, 1] and finished.status == 0, finished.output
    calls = ("op=max: rank ", "int64: rank ", "root=1: rank ", "allgather: rank ", " 9 x: ")
    for form, text in product(forms, calls):
        assert said(finished, f"{form} {text}") == [0, 1], (form, text)


@pytest.mark.long
@each_mpi
def test_mismatch_between_nodes(python):
    forms = ("blocking", "background")
    finished = job(python, 3, "unlike", "ring", *forms, MPIDIST_RANKS_PER_NODE="2")
    assert said(finished, "usable") == [0, 1, 2] and finished.status == 0, finished.output


@each_mpi
@pytest.mark.parametrize("nodes", ["", "1"])
def test_ranks_that_wait_in_another_order(python, nodes):
    finished = job(python, 2, "wait_in_another_order", MPIDIST_RANKS_PER_NODE=nodes)
    assert said(finished, "usable") == [0, 1] and finished.status == 0, finished.output


@each_mpi
def test_debug_shows_another_order_in_the_background(python):
    finished = job(python, 3, "begun_in_another_order", MPIDIST_DEBUG="1")
    assert said(finished, "usable") == [0, 1, 2] and finished.status == 0, finished.output


@each_mpi
def test_ranks_that_differ_in_their_first_call(python):
    finished = job(python, 3, "differ_in_their_first_call")
    assert said(finished, "usable") == [0, 1, 2], finished.output


@pytest.mark.long
@each_mpi
def test_late_first_call(python):
    finished = job(python, 3, "late_in_its_first_call")
    assert said(finished, "named") == [0, 2] and finished.status, finished.output


@each_mpi
def test_a_rank_that_cannot_make_the_board(python):
    finished = job(python, 2, "no_board")
    assert said(finished, "usable") == [0, 1] and finished.status == 0, finished.output


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node"), [("ring", "1"), ("ring", "2"), ("hierarchical", "2")]
)
def test_messages_that_are_too_long(python, algorithm, ranks_per_node):
    """Seen before the first of them: Open MPI would write them past the end of an array."""
    finished = job(python, 2, "longer", algorithm, MPIDIST_RANKS_PER_NODE=ranks_per_node)
    assert said(finished, "whole") == [0, 1] and finished.status == 0, finished.output


@pytest.mark.long
@each_mpi
def test_a_misspelt_variable_is_named_once(python):
    finished = job(python, 2, "longer", "ring", MPIDIST_TIMEUOT="3")
    assert finished.output.count("MPIDIST_TIMEUOT=3 has no effect") == 1, finished.output
    assert "did you mean MPIDIST_TIMEOUT?" in finished.output


def test_unequal_tables_of_alltoall():
    """Also where they differ in what two other ranks send each other."""

    def job(comm):
        counts = np.ones((3, 3), int)
        assert comm.alltoall(np.full(3, comm.rank), counts=counts).tolist() == [0, 1, 2]
        counts[1, 2] += comm.rank == 0
        comm.alltoall(np.zeros(3), counts=counts)

    with pytest.raises(CollectiveMismatch, match="table="):
        run_simulated(3, job)
