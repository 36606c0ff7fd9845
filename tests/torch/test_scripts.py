"""Scripts that use the backend "mpidist", as jobs: how they start and how they end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, job, said
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
SCRIPT = str(Path(__file__).with_name("torchrun_script.py"))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_script_for_torchrun(ranks):
    finished = job(sys.executable, ranks, "run", script=SCRIPT)
    assert finished.status == 0, finished.output
    assert said(finished, f"sum {2**ranks - 1}") == list(range(ranks))


@pytest.mark.long
def test_what_is_left_pending_at_the_end():
    finished = job(sys.executable, 2, "leave", script=SCRIPT)
    assert finished.status == 0, finished.output
    assert said(finished, "sum 3") == [0, 1]


@pytest.mark.long
def test_a_rank_that_raises():
    """Its traceback is printed, though PyTorch keeps it for later.

    Before it, the other one has named the missing rank where a group is made again.
    """
    finished = job(sys.executable, 2, "raise", script=SCRIPT)
    assert finished.status
    assert "rank 1 of 2 failed; the job ends" in finished.output
    assert "ZeroDivisionError: the rank that is to blame" in finished.output
    late = (
        "late: rank 0: init_process_group of group '0', which its members are to call: Timed out "
    )
    (words,) = [words for words in finished.words[0] if words.startswith(late)]
    assert "waiting 500ms: rank 0: create_group of ranks 0, 1 not finished within 0.5 s" in words
    assert words.endswith("rank 1 has not called it")


def test_the_import_starts_nothing():
    code = "import sys, mpidist.torch; print(sorted(m for m in sys.modules if m == 'mpi4py.MPI'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


GPU_ASKED = """import torch, torch.distributed as dist
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, lambda name=name: asked.append(name) or len(asked) > 1)
import mpidist.torch
print(asked)
for _ in range(2):
    print(*dist.BackendConfig(dist.Backend("mpidist")).device_backend_map, *asked)
"""


def test_the_import_does_not_ask_for_a_gpu():
    """Which may start CUDA's driver: it then fails in forked processes, as of a DataLoader."""
    done = subprocess.run(
        [sys.executable, "-c", GPU_ASKED], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    lines = ["[]", "cpu device_count", "cpu cuda device_count device_count"]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr


UNIMPORTED = """import sys, torch
import torch.distributed as dist
assert dist.is_backend_available("mpidist")
assert not {"mpidist", "mpi4py.MPI"} & set(sys.modules)  # every program pays for these
dist.init_process_group("mpidist")
total = torch.ones(())
dist.all_reduce(total)
print(f"<rank {dist.get_rank()} sum {int(total)}>", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_without_the_import(tmp_path):
    """The entry point ``torch.backends`` does it, where mpidist is installed."""
    (tmp_path / "script.py").write_text(UNIMPORTED)
    finished = job(sys.executable, 2, script=str(tmp_path / "script.py"))
    assert finished.status == 0, finished.output
    found = re.findall(r"<rank (\d) sum 2>", finished.output)
    assert sorted(found) == ["0", "1"], finished.output


WITHOUT_ML_DTYPES = """import sys
sys.modules["ml_dtypes"] = None  # as if it were not installed
import torch, torch.distributed as dist
dist.init_process_group("mpidist")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.full((2,), rank + 1.0, dtype=torch.bfloat16)
for call in (lambda: dist.all_reduce(x), lambda: dist.reduce(x, 0),
             lambda: dist.reduce_scatter_single(x, x.repeat(size))):
    try:
        call()
    except TypeError as error:
        print(error, flush=True)
dist.broadcast(x, 0)  # which needs no arithmetic
assert x.tolist() == [1, 1]
dist.destroy_process_group()
"""


@pytest.mark.long
def test_without_ml_dtypes(tmp_path):
    """Reductions say what is missing, and the group works on."""
    (tmp_path / "script.py").write_text(WITHOUT_ML_DTYPES)
    finished = job(sys.executable, 2, script=str(tmp_path / "script.py"))
    assert finished.status == 0, finished.output
    for rank in range(2):
        told = rf"rank {rank}: op='sum' of a tensor of torch.bfloat16; .*pip install ml_dtypes"
        assert len(re.findall(told, finished.output)) == 3, finished.output


IMPORTED_TWICE = """import sys, torch.distributed as dist
sys.modules["mpidist.torch.batchnorm"] = None  # as if the import of mpidist.torch failed
for _ in range(3):
    try:
        print(dist.Backend("mpidist"))
    except ImportError as error:
        print(type(error).__name__, error.name)
del sys.modules["mpidist.torch.batchnorm"]
if "itself" in sys.argv:
    import mpidist.torch
print(dist.Backend("mpidist"), dist.Backend.MPIDIST, dist.Backend._plugins.keys())
"""


@pytest.mark.long
@pytest.mark.parametrize("who", ["the name", "itself"])
def test_a_failed_import_is_told_each_time(who):
    """And the name works once the import does, of the program itself, too."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_TWICE, who], capture_output=True, text=True, timeout=200
    )
    told = ["ModuleNotFoundError mpidist.torch.batchnorm"] * 3
    names = "mpidist mpidist dict_keys(['MPIDIST'])"
    assert done.stdout.splitlines() == [*told, names], done.stderr


@pytest.mark.long
def test_an_entry_point_that_fails():
    """It must not end ``import torch``; and its variable turns it off."""
    code = (
        "import sys; sys.modules['torch.distributed'] = None\n"
        "import mpidist_autoload; mpidist_autoload.register(); print('went on')"
    )
    off = "import torch.distributed as d; print(d.is_backend_available('mpidist'))"
    for lines, expected in ((code, "went on"), (off, "False")):
        done = subprocess.run(
            [sys.executable, "-c", lines],
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
