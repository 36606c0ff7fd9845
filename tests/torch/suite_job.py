"""Run torch's own tests of torch.distributed on this rank: BACKEND FOLDER FILE-WITH-NAMES.

Started by tests/torch/suite.py under mpiexec.  Each test has a fresh group, and leaves a file with
its result for each rank.  Where the ranks do not agree that it passed or was skipped, all of them
end: the rest is for another launch.  With ``--list`` in place of the file rank 0 prints the names.
"""

import json
import os
import signal
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

from mpi4py import MPI

BACKEND, FOLDER, NAMES = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LIMIT = int(os.environ.get("SUITE_LIMIT", "75"))  # seconds of one test
AGREE_SECONDS = 40

# Read when the tests are imported: they are gated by the name of the backend, and all are wanted.
os.environ.update(BACKEND="gloo", WORLD_SIZE=str(SIZE), RANK=str(RANK), LOCAL_RANK=str(RANK))
os.environ.update(TEMP_DIR=str(FOLDER), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for name in ("barrier", "test_dir", "init_dir"):
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
sys.argv = sys.argv[:1]  # the tests read it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed as common  # noqa: E402
from torch.testing._internal.common_utils import TestCase  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

torch.set_num_threads(1)
if BACKEND == "mpidist":
    import mpidist.torch  # noqa: F401


class Suite(TestCase, suite.DistributedTest._DistTestBase):
    """Torch's tests; its own class starts the processes itself."""

    rank = RANK
    world_size = property(lambda self: str(SIZE))
    init_method = property(lambda self: f"file://{self.file_name}")

    def runTest(self):
        """Do nothing: the tests are called by name."""


if NAMES == "--list":
    if RANK == 0:
        print("\n".join(name for name in dir(Suite) if name.startswith("test_")))
    WORLD.Barrier()
    sys.stdout.flush()
    os._exit(0)

NAMED = ("test_get_backend",)  # which compares the backend with the name by which tests are gated

SKIPS = {skip.exit_code for skip in common.TEST_SKIPS.values()}


def put(test, result, message=""):
    """Leave this rank's result for all to see."""
    path = FOLDER / f"{test}.{RANK}"
    path.with_suffix(f".{RANK}.tmp").write_text(json.dumps([result, message]))
    path.with_suffix(f".{RANK}.tmp").rename(path)


def described(error):
    where = "".join(traceback.format_tb(error.__traceback__)[-2:])
    return f"{type(error).__name__}: {str(error)[:500]} @ {where[-500:]}"


def perform(test, number):
    """Run one test; return the result and a message."""
    case = Suite("runTest")
    case.file_name, case._testMethodName = FOLDER / f"store_{test}", test
    begun = 1000 * number
    suite.BACKEND = BACKEND if test in NAMED else "gloo"
    try:
        seconds = suite.CUSTOM_PG_TIMEOUT.get(test, 60)
        options = {"world_size": SIZE, "rank": RANK, "timeout": timedelta(seconds=seconds)}
        dist.init_process_group(init_method=case.init_method, backend=BACKEND, **options)
        suite.Barrier.barrier_id = begun
        suite.Barrier.sync(timeout=60)
        case.setUp()  # the same seed on all ranks, among others
        try:
            getattr(case, test)()
        finally:
            case.doCleanups()
        suite.Barrier.barrier_id = begun + 900
        suite.Barrier.sync(timeout=30)
        dist.destroy_process_group()
    except unittest.SkipTest as error:
        return "skip", str(error)
    except SystemExit as error:
        if error.code in SKIPS:
            reasons = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
            return "skip", reasons[error.code]
        return ("pass", "") if error.code == 0 else ("fail", f"exit {error.code}")
    except BaseException as error:
        return "fail", described(error)
    return "pass", ""


def late(_, frame):
    put(current, "timeout", "".join(traceback.format_stack(frame)[-3:])[-600:])
    os._exit(3)


def agreed(test):
    """Return whether all ranks passed the test, or all skipped it."""
    paths, until = [FOLDER / f"{test}.{rank}" for rank in range(SIZE)], time.time() + AGREE_SECONDS
    while time.time() < until and not all(path.exists() for path in paths):
        time.sleep(0.01)
    found = {json.loads(path.read_text())[0] if path.exists() else "none" for path in paths}
    return found in ({"pass"}, {"skip"})


signal.signal(signal.SIGALRM, late)
if RANK == 0:
    suite.Barrier.init()
WORLD.Barrier()
for number, current in enumerate(Path(NAMES).read_text().split()):
    signal.alarm(LIMIT)
    result, message = perform(current, number)
    if result == "skip" and dist.is_initialized():
        try:
            suite.Barrier.barrier_id = 1000 * number + 900
            suite.Barrier.sync(timeout=30)
            dist.destroy_process_group()
        except BaseException as error:
            result, message = "fail", f"after the skip: {described(error)}"
    signal.alarm(0)
    put(current, result, message)
    if not agreed(current):
        os._exit(5)
    if dist.is_initialized():
        dist.destroy_process_group()
os._exit(0)
