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
HELD = """
import os, signal, subprocess, sys
import mpidist as md

@md.elastic
def train(comm, state):
    while state.step < 9:
        comm.allreduce(1)
        state.commit()
        if state.step == 5 and comm.rank == 1 and not state.generation:
            monitor = os.getppid()
            later = ["sh", "-c", f"sleep {sys.argv[1]}; kill -CONT {monitor}"]
            subprocess.Popen(later, start_new_session=True)
            os.kill(monitor, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)

train(md.State())
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
@pytest.mark.parametrize("options", [("--survive",), ("--spares", "1")])
def test_loss_that_is_reported_behind_the_end_of_all_others_was_survived(options):
    """The monitor of the lost rank is stopped until then."""
    done = job(HELD, "4", options=options)
    assert done.status == 0, done.output
    last = done.output.splitlines()[-1]
    end = r"mpidist run: finished on (2 of 3|3 of 4) ranks: rank 1 on .* \(SIGKILL\)"
    assert re.fullmatch(end, last), last


@needs_ulfm
@pytest.mark.parametrize("options", [("--survive",), ("--spares", "1"), MANY])
@pytest.mark.parametrize(
    "point, code",
    [("", 75), pytest.param("requested", 75, marks=pytest.mark.long), ("answered", 3)],
)
def test_all_stop(options, point, code):
    """With 75 the job is started again, by SLURM and not from memory, whoever was lost before."""
    done = job(STOPS, point, str(code), options=(*options, "--max-restarts", "2"))
    assert done.status == code, done.output
    told = rf"^mpidist run: rank \d on \S+ ended with exit code {code}$"
    assert len(re.findall(told, done.output, re.M)) == 1, done.output
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


ENDS = """
import os, signal, sys, time
import numpy as np
import mpidist as md
from mpidist.backends.recorder import raised

HOW = sys.argv[1]

@md.elastic
def train(comm, state):
    x = np.zeros(4)
    while state.step < 60:
        if state.step == 20 and state.generation == 0:
            if HOW.startswith("raise"):
                if comm.rank == 1:
                    raise ValueError("bad sample")
                if comm.rank == 0:
                    while not raised(1):  # the exception is first
                        time.sleep(0.001)
                    time.sleep(float(HOW[5:]))
                    os.kill(os.getpid(), signal.SIGKILL)
            elif HOW == "all" or comm.rank == 1:
                comm.barrier() if HOW == "all" else None
                sys.exit(3 if HOW == "all" else int(HOW))
        comm.allreduce(np.ones(4), out=x)
        state.commit()
        time.sleep(0.01)
    os.write(1, b"trained to the end on %d\\n" % comm.size)  # in one piece

train(md.State())
"""


@needs_ulfm
@pytest.mark.parametrize("options, ranks", [(("--survive",), 2), (("--spares", "1"), 3)])
@pytest.mark.parametrize("code", [3, pytest.param(75, marks=pytest.mark.long)])
def test_a_rank_that_exits_is_lost(options, ranks, code):
    """Not by MPI_Abort, which ends the others, and not as if all were asked to stop."""
    done = job(ENDS, str(code), options=options)
    assert done.status == 0, done.output
    assert done.output.count(f"trained to the end on {ranks}") == ranks, done.output
    assert (
        f"rank 1 on {done.output.split('rank 1 on ')[1].split()[0]} has ended with" in done.output
    )
    assert "MPI_ABORT" not in done.output and "job ends" not in done.output, done.output


@needs_ulfm
@pytest.mark.parametrize("options", [("--survive",), ("--spares", "1"), MANY])
def test_when_all_exit_the_job_ends(options):
    """A spare does not train on, or begin anew: the others have given up."""
    done = job(ENDS, "all", options=options)
    assert done.status == 3 and "trained" not in done.output, done.output
    assert "goes on with" not in done.output, done.output


@needs_ulfm
@pytest.mark.parametrize("options", [("--survive",), ("--spares", "1")])
@pytest.mark.parametrize("apart", ["0", pytest.param("0.05", marks=pytest.mark.long), "0.2"])
def test_an_exception_beside_a_loss_ends_the_job(options, apart):
    """It may be that of all ranks, and nobody knows on which the rest would train."""
    done = job(ENDS, f"raise{apart}", options=options)
    assert done.status == 1 and "ValueError: bad sample" in done.output, done.output
    assert "trained to the end" not in done.output and "goes on with" not in done.output
    last = done.output.strip().splitlines()[-1]
    assert re.fullmatch(r"mpidist run: rank 1 on \S+ failed first: ValueError: bad sample", last)


CHILD = """
import os, signal, subprocess
import mpidist as md

@md.elastic
def train(comm, state):
    while state.step < 9:
        if state.step == 5 and comm.rank == 1 and state.generation == 0:
            none = subprocess.DEVNULL
            subprocess.Popen(["sleep", "6"], stdin=none, stdout=none, stderr=none)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allreduce(1)
        state.commit()

train(md.State())
"""


@needs_ulfm
@pytest.mark.long
def test_a_loss_is_told_once():
    """A child of the lost rank keeps the launcher from its end."""
    done = job(CHILD)
    assert done.status == 0, done.output
    told = re.findall(r"^mpidist run: rank 1 on .*SIGKILL.*$", done.output, re.M)
    assert len(told) == 1 and told[0].endswith("; the others go on"), done.output


TRACED = """
import sys
import numpy as np
import mpidist as md

@md.elastic
def train(comm, state):
    comm.trace(sys.argv[1])
    comm.allreduce(np.ones(4))
    state.commit()
    md.StopRequest(comm).leave()

train(md.State())
"""


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())
def test_what_is_done_at_exit_still_has_mpi(tmp_path, python):
    """A trace is written there, and the store of torch.distributed polls until then."""
    done = job(TRACED, str(tmp_path / "trace.json"), options=(), python=python)
    assert done.status == 75 and "allreduce" in (tmp_path / "trace.json").read_text(), done.output


GROUP = """
import torch
import torch.distributed as dist
import mpidist as md

net = torch.nn.Linear(4, 1)

@md.elastic
def train(comm, state):
    dist.init_process_group("mpidist")
    model = torch.nn.parallel.DistributedDataParallel(net)
    model(torch.ones(2, 4)).sum().backward()
    state.commit()
    md.StopRequest(comm).leave()

train(md.State(net=net))
"""


@needs_ulfm
@needs_torch
@pytest.mark.long
@pytest.mark.timeout(300)  # 4 processes import PyTorch
def test_a_process_group_of_pytorch():
    done = job(GROUP, options=("--spares", "1"))
    assert done.status == 75 and "MPI_" not in done.output, done.output


FORGETS = """
import os, signal
import mpidist as md

@md.elastic
def train(comm, state, n):
    stop = md.StopRequest(comm)
    comm.allreduce(1)
    state.commit()
    if stop.requested():
        stop.leave()
    os.kill(os.getpid(), signal.SIGUSR1)

for n in range(2):
    train(md.State(), n)
print("went on behind the training")
"""


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())
def test_a_request_behind_the_last_look_is_one_of_the_next_training(python):
    assert job(FORGETS, options=(), python=python).status == 75


TWICE = """
import os, signal
import mpidist as md

@md.elastic
def train(comm, state):
    stop = md.StopRequest(comm)
    comm.allreduce(1)
    state.commit()
    before = stop.requested()
    comm.barrier()
    os.kill(os.getpid(), signal.SIGUSR1)
    return before, stop.requested()

answers = train(md.State()), train(md.State())
assert answers == ((False, True),) * 2, answers
"""


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())
def test_the_next_training_begins_without_a_request(python):
    assert job(TWICE, options=(), python=python).status == 0


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
    told = f"{step - state.step} {step} {hashlib.sha256(weights).hexdigest()}\\n"
    os.write(1, told.encode())  # in one piece

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
