"""One conftest for every launch: serial, and under mpiexec with pytest in each rank.

Under mpiexec rank 0 reports for all (support/rank_reports.py).  Without it no MPI is started here.
"""

from __future__ import annotations

import fcntl
import gc
import math
import os
import re
import signal
import sys
import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from mpidist.pytest import (
    Exchange,
    RankReports,
    add_markers,
    add_rank_grace,
    add_ranks,
    is_launched,
    report_together,
    session_communicator,
)
from mpidist.pytest.simulated import parse_sizes, simulate
from tests.support.results import Recorder

gc.disable()  # until the files are imported, which leaves little garbage and takes 0.5 s less so
COMM_TIMEOUT = "90"  # seconds; a collective that never ends fails well before the test's limit

# Each rank must try the same examples, and a run must not fail by luck; `make stress` is for luck.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("stress", max_examples=2000, deadline=None, database=None)
settings.load_profile(os.environ.get("MPIDIST_TEST_PROFILE", "fixed"))

# How a file is run: test_x.py serially, test_x_mpi.py under mpiexec, test_x_cuda.py too but with a
# GPU, test_x_alone.py with the machine for itself; these folders' files each in a way of their own.
# Tests of test_x.py with the fixture comm have simulated ranks, and are run under mpiexec too.
SUFFIXES = ("mpi", "cuda", "alone")
FOLDERS = ("slurm", "stress")
KINDS = ("serial", *SUFFIXES, *FOLDERS)
KINDS_CHOSEN = pytest.StashKey[tuple[str, ...]]()
RANKS = pytest.StashKey[int]()
WITH_RANKS = re.compile(r"^def test_\w+\((?:[^)]*\W)?comm\W", re.MULTILINE)
PART = 8  # `make test` runs one of eight of a test's cases
RANK_TIMEOUT = 600.0  # seconds, of a test on simulated ranks without a limit of pytest-timeout


def pytest_addoption(parser):
    group = parser.getgroup("mpidist")
    group.addoption(
        "--kind",
        metavar="KIND,…",
        help=f"how the tests are run: {', '.join(KINDS)} (default: "
        "mpi and cuda under mpiexec, without it all but slurm and stress)",
    )
    group.addoption(
        "--results", metavar="FILE", help="write a JSON line for every test begun, ended"
    )
    add_rank_grace(group)
    add_ranks(group, "1,3")


def kind_of(path):
    """Return how a test file, or the files of a folder, are run; None where its parts decide."""
    if path.is_dir():
        return path.name if path.name in FOLDERS else None
    suffix = path.stem.rpartition("_")[2]
    return None if path.parent.name in FOLDERS else suffix if suffix in SUFFIXES else "serial"


@cache
def has_ranks(path):
    """Return whether a file of kind serial has tests with the fixture comm; without an import."""
    if kind_of(path) != "serial" or not path.match("test_*.py"):
        return False
    return bool(WITH_RANKS.search(path.read_text(encoding="utf-8")))


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests of other kinds; pytest does not ask for paths on its command line."""
    kind, chosen = kind_of(collection_path), config.stash[KINDS_CHOSEN]
    if kind == "serial" and "mpi" in chosen and is_launched():
        return not has_ranks(collection_path)
    return True if kind and kind not in chosen else None


def pytest_collectstart(collector):
    """Let tests for an mpiexec have one real rank without it."""
    if isinstance(collector, pytest.Module) and kind_of(collector.path) in SUFFIXES:
        collector.add_marker("real_ranks")


def pytest_collection_modifyitems(config, items):
    """Mark most cases of a test long; under mpiexec leave out a file's tests without ranks."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        # In an order that no parameter has, else all those left could be of one dtype or size; and
        # another one for each number of ranks, so that together they leave less out.
        ranks = config.stash[RANKS]
        same.sort(key=lambda item: zlib.crc32(f"{item.nodeid} {ranks}".encode()))
        for item in same[math.ceil(len(same) / PART) :]:
            item.add_marker("long")
    if is_launched() and "serial" not in config.stash[KINDS_CHOSEN]:
        others = [x for x in items if has_ranks(x.path) and "comm" not in x.fixturenames]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if item not in others]


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # `make test &` in a script leaves it ignored, also in the processes to which tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    default = ("mpi", "cuda") if is_launched() else ("serial", *SUFFIXES)
    given = config.getoption("kind")
    chosen = config.stash[KINDS_CHOSEN] = tuple(given.split(",")) if given else default
    if unknown := set(chosen) - set(KINDS):
        raise pytest.UsageError(f"--kind: {', '.join(unknown)}: expected {', '.join(KINDS)}")
    add_markers(config)
    config.option.with_mpi = True  # tests marked mpi run without more ado, on one rank too
    exchange = Exchange() if is_launched() else None
    config.stash[RANKS] = exchange.size if exchange else 0
    if exchange is None:
        sizes = parse_sizes(config.getoption("ranks"))
        simulate(config, session_communicator, sizes, RANK_TIMEOUT)
    path = config.getoption("results")
    reports = exchange is None or exchange.rank == 0
    # A worker of pytest-xdist reports to another process.
    if path and reports and not hasattr(config, "workerinput"):
        mpi = exchange.describe() if exchange else "no MPI"
        config.pluginmanager.register(Recorder(path, mpi))
    if exchange is not None:
        os.environ.setdefault("MPIDIST_TIMEOUT", COMM_TIMEOUT)

        def abort(why):
            if path:  # any rank may have to tell: rank 0 can be the one that hangs
                Recorder.add(path, event="abort", reason=why)

        ranks = RankReports(exchange, config.getoption("rank_grace"), abort)
        report_together(config, ranks, path and f"{path}.rank{exchange.rank}.log")


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """Take what is alive before a file's tests out of the garbage collector's sight.

    Tests collect often, and with the objects of PyTorch and of all that earlier files imported to
    look at, that takes 0.1 to 0.2 s each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=[1, 2, 3])
def nodes(comm, request):
    """The ranks on pretended nodes of 1, 2 or 3, or fewer on the last; or on real nodes."""
    from tests.support.pretended import on_nodes

    if comm.topology.num_nodes > 1:
        if request.param > 1:
            pytest.skip("needs all ranks on one node")
        yield comm
        return
    if comm.size <= request.param:
        pytest.skip(f"needs at least {request.param + 1} ranks")
    made = on_nodes(comm, request.param)
    yield made
    made.free()


@pytest.fixture
def emulated_device():
    """Emulate the device of this process in host memory, and return its class."""
    from mpidist.device.find import install_device
    from tests.support.emulated import EmulatedDevice

    install_device(EmulatedDevice)
    yield EmulatedDevice
    install_device(None)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Return what says how a training of elastic_trainings.py ends without a loss.

    One worker of pytest-xdist runs the job, and the others wait for what it finds.
    """
    from tests.support import elastic_chaos

    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def ends(wrapper, steps, ranks=3, python=sys.executable):
        name = f"{wrapper}-{steps}-{ranks}-{zlib.crc32(python.encode())}"
        with open(folder / name, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (done := file.read()):
                done, _ = elastic_chaos.undisturbed(wrapper, steps, ranks, python=python)
                file.write(done)
                file.flush()
        return done

    return ends


comm_of_all = pytest.fixture(session_communicator)


@pytest.fixture
def comm(comm_of_all, request):
    """The communicator of the session, see :func:`mpidist.pytest.communicator`."""
    if request.node.get_closest_marker("one_node") and comm_of_all.topology.num_nodes > 1:
        pytest.skip("needs all ranks on one node")
    return comm_of_all


@pytest.fixture
def folder(comm, tmp_path):
    """The temporary folder of rank 0, on every rank."""
    return Path(comm.broadcast_object(str(tmp_path)))
