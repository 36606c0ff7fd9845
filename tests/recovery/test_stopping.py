"""A request to stop inside md.elastic: all ranks end, spares too, by the code that starts again."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.jobs import LIMIT, PYTHONS, ROOT, tolerant
from tests.support.training_kits import needs_torch

needs_ulfm = pytest.mark.skipif(not tolerant(), reason="needs Open MPI")
MANY = pytest.param(("--spares", "2"), marks=pytest.mark.long)
STOPS = """
import os, signal, sys, time
import numpy as np
import mpidist as md

POINT, CODE = sys.argv[1], int(sys.argv[2])

def lose(comm, state, point):
    if point == POINT and comm.rank == 1 and not state.generation:
        time.sleep(0.2)  # the others are inside of leave()
        os.kill(os.getpid(), signal.SIGKILL)

@md.elastic
def train(comm, state):
    stop = md.StopRequest(comm)
    while state.step < 9:
        comm.allreduce(np.ones(4))
        state.commit()
        if state.step == 5 and not state.generation:
            os.kill(os.getpid(), signal.SIGUSR1)
            lose(comm, state, "requested")
    assert stop.requested(), "the request was forgotten"
    lose(comm, state, "answered")
    stop.leave(CODE)

train(md.State())
print("went on behind the training")
"""
EXITS = """
import sys
import mpidist as md

@md.elastic
def train(comm, state):
    comm.allreduce(1)
    state.commit()
    sys.exit()

train(md.State())
print("went on behind the training")
"""


def job(program, *words, options=("--survive",), python=sys.executable):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(program)
        command = [python, "-m", "mpidist", "run", "-q", "-n", "3", *options, str(path), *words]
        environ = processes.environment(PYTHONPATH=str(ROOT), MPIDIST_TIMEOUT="40")
        done = processes.run(command, LIMIT, environ)
    assert not done.timed_out and "went on behind" not in done.output, done.output
    return done


@needs_ulfm
@pytest.mark.parametrize("options", [("--survive",), ("--spares", "1"), MANY])
@pytest.mark.parametrize(
    "point", ["", pytest.param("requested", marks=pytest.mark.long), "answered"]
)
def test_all_stop(options, point):
    """With 75 the job is started again, by SLURM and not from memory, whoever was lost before."""
    done = job(STOPS, point, "75", options=(*options, "--max-restarts", "2"))
    assert done.status == 75, done.output
    assert re.search(r"^mpidist run: rank \d on \S+ ended with exit code 75$", done.output, re.M)
    assert ("before that rank 1 on" in done.output) == bool(point), done.output
    assert done.output.count("the others go on") == bool(point), done.output


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())
@pytest.mark.parametrize("code", [0, 3, 75])
def test_each_exit_code(python, code):
    done = job(STOPS, "", str(code), options=(), python=python)
    assert done.status == code, done.output


@needs_ulfm
@pytest.mark.parametrize("spares", ["1", "2"])
def test_an_exit_is_an_end_for_the_spares(spares):
    done = job(EXITS, options=("--spares", spares))
    assert (done.status, done.output) == (0, "")


RESUMES = """
import hashlib, os, signal, sys
import torch
import mpidist as md
from mpidist.parallel.hooks import TopK

FOLDER, STOP, LOSE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(480, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8)
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.AdamW(net.parameters())

@md.elastic
def train(comm, state):
    hook = TopK(0.2)
    model = md.DDP(net, comm, hook=hook)
    samples = state.keep("samples", md.shard(loader, comm, shuffle=True))
    checkpoint = md.Checkpoint(FOLDER, comm)
    saved = {"model": model, "optimizer": optimizer, "samples": samples, "rng": torch}
    found = state.values or checkpoint.load(**saved)
    step = found["step"] if found else 0
    stop = md.StopRequest(comm)
    while samples.epoch < 3:
        for x, y in samples:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            state.commit(step=step)
            if step == LOSE and comm.rank == 1 and not state.generation:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STOP and comm.rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop.requested():
                checkpoint.save(step, **saved)
                stop.leave()
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(step - state.step, step, hashlib.sha256(weights).hexdigest())

train(md.State(net=net, optimizer=optimizer, rng=torch))
"""


@needs_ulfm
@needs_torch
@pytest.mark.long
@pytest.mark.timeout(300)  # 9 processes import PyTorch
@pytest.mark.parametrize("losses", [(-1, -1), (11, 41)])
def test_resumed_from_a_checkpoint(tmp_path, losses):
    """Losses before the stop, and in the first step after it: the same bits as without either."""
    path = tmp_path / "program.py"
    path.write_text(RESUMES)

    def start(folder, stop, lost):
        command = [sys.executable, "-m", "mpidist", "run", "-q", "-n", "2", "--spares", "1"]
        environ = processes.environment(PYTHONPATH=str(ROOT), MPIDIST_TIMEOUT="40")
        words = str(tmp_path / folder), str(stop), str(lost)
        return processes.run([*command, str(path), *words], LIMIT, environ)

    whole, stopped = start("whole", -1, -1), start("resumed", 40, losses[0])
    resumed = start("resumed", -1, losses[1])
    jobs = whole, stopped, resumed
    output = "".join(job.output for job in jobs)
    assert [job.status for job in jobs] == [0, 75, 0], output
    # The spare that was not needed prints nothing.
    (_, bits), (begin, others) = (
        set(re.findall(r"^(\d+) 90 (\w{64})$", job.output, re.M)).pop() for job in (whole, resumed)
    )
    assert begin == "40" and bits == others, output
    assert output.count("goes on with 2 ranks") == sum(lost > 0 for lost in losses), output
