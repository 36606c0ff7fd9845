"""Executors of arrays on a GPU, as far as they go without one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist.device import find
from mpidist.device.recognise import as_device_array
from mpidist.errors import ConfigError, Unsupported
from mpidist.gpu.assignment import VisibleGpus
from mpidist.gpu.cuda_aware import Awareness
from mpidist.gpu.executors import (
    CLASSES,
    NAMES,
    RankProperties,
    forced_executor,
    table,
    takes_turns,
)
from tests.support.emulated import EmulatedDevice

YES, NO = Awareness("yes", "it says so"), Awareness("no", "it says not")


def test_no_device():
    stray = SimpleNamespace(__cuda_array_interface__={})
    reason = find.why_no_device()
    if reason is None:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(Unsupported, match=r"rank 2: x is a GPU array \(types.SimpleNamespace\)"):
        as_device_array(stray, 2)


def test_bench_without_a_gpu():
    """It names what is needed, and what was found."""
    if find.why_no_device() is None:
        pytest.skip("needs a machine without a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "mpidist", "bench", "gpu"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode and "bench gpu needs cupy, and a GPU for each rank" in done.stderr
    assert find.why_no_device().partition("(")[0] in " ".join(done.stderr.split())


def test_explain_without_a_gpu():
    """It says what is missing, in a line."""
    if find.why_no_device() is None:
        pytest.skip("needs a machine without a GPU")
    command = [sys.executable, "-m", "mpidist", "explain", "allreduce", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and not done.stdout
    assert find.why_no_device() in " ".join(done.stderr.split())


def test_cupy_is_not_needed(tmp_path):
    """A cupy that cannot be imported harms nobody who has no array on a GPU."""
    (tmp_path / "cupy.py").write_text("raise ImportError('poisoned')")
    program = (
        "import sys, numpy, mpidist, mpidist.cli, mpidist.gpu.service, mpidist.device.find as f\n"
        "mpidist.run_simulated(2, lambda comm: comm.allreduce(numpy.ones(3)))\n"
        "assert 'cupy' not in sys.modules\n"
        "assert 'poisoned' in f.why_no_device(), f.why_no_device()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=200)


# -- the emulated device is as late as a GPU can be


def test_streams_are_lazy():
    device = EmulatedDevice()
    x, host = device.array(np.zeros(4)), np.ones(4)
    other, mark = device.new_stream(), device.event()
    pointer = x.__cuda_array_interface__["data"][0]
    device.copy(pointer, host.__array_interface__["data"][0], 32, other)
    mark.record(other)
    assert (x.get() == 0).all()  # the default stream waits for nothing
    mark.block(0)
    host[:] = 2  # too late for a copy that had been done, early enough for this one
    assert (x.get() == 2).all()


# -- executors


def test_executors():
    """A table of who can, who is asked for, and what is taken."""
    cases = [
        ([YES, YES], "", {"allreduce": "staged", "broadcast": "mpi", "send": "mpi"}),
        ([YES, NO], "", {"allreduce": "staged", "broadcast": "staged", "send": "staged"}),
        ([YES, YES], "staged", {"allreduce": "staged", "broadcast": "staged"}),
        ([YES, YES], "mpi", {"allreduce": "staged", "alltoall": "mpi"}),
    ]
    for answers, forced, expected in cases:
        found = table([RankProperties(answer, forced, 1) for answer in answers])
        by_class = {c.operations: c.name for c in found if c.taken and c.name != "ipc"}
        served = {name: by_class[kind] for kind, names in CLASSES.items() for name in names}
        assert expected.items() <= served.items(), (forced, served)
        assert all(c.why for c in found) and {c.name for c in found} <= set(NAMES)
    for nodes, native, words in ((2, True, "on 2 nodes"), (1, False, "threads of one process")):
        with pytest.raises(Unsupported, match=f"MPIDIST_GPU=ipc: the ranks are {words}"):
            table([RankProperties(YES, "ipc", 1)], native, nodes)
    with pytest.raises(Unsupported, match="MPIDIST_GPU=ipc: there are 33 ranks; the maximum is 32"):
        table([RankProperties(YES, "ipc", 1)] * 33)
    for forced, symmetric in (("", True), ("ipc", True), ("mpi", False), ("staged", False)):
        found = table([RankProperties(YES, forced, 1)])
        assert symmetric == any(c.taken for c in found if c.name == "ipc"), forced
    here = VisibleGpus("host", ("GPU-1",), 0)
    for side_by_side, words in (
        (True, "from 512 KiB on"),
        (False, "from 16 MiB on, where ranks t"),
    ):
        ranks = [RankProperties(YES, "", 1, "no", here, side_by_side)] * 2
        assert takes_turns(ranks) is not side_by_side and not takes_turns(ranks[:1])
        found = {c.name: c.why for c in table(ranks) if c.operations == "reductions"}
        assert found["ipc_slots"].startswith(f"for other arrays {words}"), found
        assert "from 4 MiB on" in found["ipc"] or side_by_side
    unknown = Awareness("unknown", "no query")
    for answers, words in (
        ([YES, NO], r"it says not \(rank 1\)"),
        ([unknown], "not known.*no query"),
    ):
        with pytest.raises(Unsupported, match=f"MPIDIST_GPU=mpi: .*{words}"):
            table([RankProperties(answer, "mpi", 1) for answer in answers])
    with pytest.raises(ConfigError, match="MPIDIST_GPU='magic': expected one of"):
        forced_executor({"MPIDIST_GPU": "magic"})
