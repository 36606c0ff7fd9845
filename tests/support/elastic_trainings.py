"""Trainings for the tests of md.elastic: ``elastic_trainings.py WRAPPER STEPS``.

Each rank writes lines "pid W PID BEGUN", "step S" and at the end "done HASH of R ranks at step S"
to a file of its own in the folder ELASTIC_TEST.  KILL="W:POINT:N …" ends rank W of the world when
it comes to a point for the N-th time: by SIGKILL, or as HOW says, which may be the folder of a
control group to exceed; with W:POINT:N:S in start S of the job only.  The point "atS" is behind the
work of step S + 1.  The point "line" is each line of mpidist that rank W runs in step 10 (W + 1),
of which a step has some hundred: their number is printed as "lines COUNT".  "MODULE.py@NUMBER" is
that line of that module in this step, in which the others are late; each line that was run goes to
a file in the folder LINES, with how often it was.
"part" is where MPI is to make a communicator of some of the ranks.  With MORE a later start of the
job ends as many steps behind its first one: so the first start can go on until the test has lost a
node, however long that takes.  Under --max-restarts each step is copied, with SPACED each 25th.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np

import mpidist as md
from mpidist import nn
from mpidist.communicator.launch import start_mpi
from mpidist.gpu.heap import DeviceHeap
from mpidist.parallel import hooks
from mpidist.recovery import pace
from mpidist.recovery.pace import Pace
from tests.support.processes import begun

WRAPPER, STEPS = sys.argv[1], int(sys.argv[2])
WORLD = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK", "0"))
START = os.environ.get("MPIDIST_RESTART", "0")
FILE = Path(os.environ["ELASTIC_TEST"]) / str(WORLD)
KILLS = [tuple(kill.split(":")) for kill in os.environ.get("KILL", "").split()]
AT_SOURCE = any("@" in point for _, point, *_ in KILLS)
AT_LINE = AT_SOURCE or any(point == "line" for _, point, *_ in KILLS)
HOW = os.environ.get("HOW", "kill")
MORE = int(os.environ.get("MORE", "0"))
# For the next start every step is copied, so that tests know the one that it begins with.
EACH = os.environ.get("MPIDIST_VAULTS") and not os.environ.get("SPACED")
State = partial(md.State, copies=True) if EACH else md.State
DEVICE = os.environ.get("DEVICE", "cpu")
_seen: dict[str, int] = {}
_hoard: list[np.ndarray] = []
if HOW.startswith("/") and str(WORLD) in (kill[0] for kill in KILLS):
    (Path(HOW) / "cgroup.procs").write_text(str(os.getpid()))


def say(text: str) -> None:
    with FILE.open("a") as file:
        file.write(text + "\n")


def at(point: str) -> None:
    """End here, if this rank is to."""
    _seen[point] = _seen.get(point, 0) + 1
    here = str(WORLD), point, str(_seen[point])
    if here not in KILLS and (*here, START) not in KILLS:
        return
    if HOW == "raise":
        raise ValueError("of the test")
    if HOW == "exit":
        os._exit(3)
    while HOW.startswith("/"):  # more than the control group allows
        _hoard.append(np.ones(1 << 20))
    os.kill(os.getpid(), {"kill": 9, "crash": 11}[HOW])


def _die_in_part() -> None:
    start_mpi("multiple")
    from mpidist.backends import ulfm  # which starts MPI

    part = ulfm.part

    def deadly(*arguments):
        at("part")
        return part(*arguments)

    ulfm.part = deadly


if "part" in (point for _, point, *_ in KILLS):
    _die_in_part()


COPY = 0.49e-3  # seconds by this clock


class Clock:
    """For a :class:`Pace`: a step takes 1 ms, whatever else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def keep_pace() -> None:
    """Copy each 25th step, so that copies take 2 % of the time of this clock."""
    begin, commit, pace.time = Pace.__init__, Pace.commit, Clock()

    def commit_in_time(self, copy):
        def copy_in_time():
            copy()
            pace.time.now += COPY

        pace.time.now += 1e-3
        commit(self, copy_in_time)

    Pace.__init__ = lambda self, exchange, _: begin(self, exchange, COPY)
    Pace.commit = commit_in_time


if os.environ.get("SPACED"):
    keep_pace()


def done(comm, state, arrays) -> None:
    flat = [a for part in arrays for a in (part if isinstance(part, list) else [part])]
    found = zlib.crc32(b"".join(np.ascontiguousarray(a).tobytes() for a in flat))
    say(f"done {found:08x} of {comm.size} ranks at step {state.step}")


HERE = str(Path(md.__file__).parent)


def _line(frame, event, _):
    if not frame.f_code.co_filename.startswith(HERE):
        return None
    if event == "line":
        line = f"{frame.f_code.co_filename[len(HERE) + 1 :]}@{frame.f_lineno}"
        again = {"line": _seen.get("line", 0) + 1, line: _seen.get(line, 0) + 1}
        if any((str(WORLD), point, str(n)) in KILLS for point, n in again.items()):
            print(f"rank {WORLD} lost at {line}", flush=True)
        at("line")
        at(line)
    return _line


def commit(state, **values) -> None:
    global STEPS, MORE
    at("stepped")
    at(f"at{state.step}")
    state.commit(**values)
    at("committed")
    if MORE and START != "0":
        STEPS, MORE = state.step + MORE, 0
    say(f"step {state.step}")
    if AT_LINE and state.step == 10 * (WORLD + 1):
        sys.settrace(_line)
        sys._getframe(1).f_trace = None
    elif AT_SOURCE and state.step % 10 == 0:
        time.sleep(0.05)  # the rank that goes on comes to the lines of a wait, too
    elif _seen.get("line") and sys.gettrace():
        sys.settrace(None)
        print(f"lines {_seen['line']}", flush=True)
        if "LINES" in os.environ:
            lines = [f"{point} {n}\n" for point, n in _seen.items() if "@" in point]
            Path(os.environ["LINES"], str(WORLD)).write_text("".join(lines))


X = np.random.default_rng(1).normal(size=(600, 10)).astype(np.float32)
Y = (X @ np.random.default_rng(2).normal(size=(10, 3))).astype(np.float32)
SIGNS = (Y[:, 0] > 0).astype(int)
say(f"pid {WORLD} {os.getpid()} {begun(os.getpid())}")


def numpy_training():
    """A gradient by hand, noise of each rank, and a count that is a value."""
    weights, rng = np.zeros((10, 3), np.float32), np.random.default_rng(100 + WORLD)

    @md.elastic
    def train(comm, state):
        while state.step < STEPS:
            mine = rng.integers(0, 600, 8)
            gradient = X[mine].T @ (X[mine] @ weights - Y[mine])
            at("before")
            gradient = comm.allreduce(gradient, op="mean")
            loss = comm.allreduce(np.abs(gradient).max() + rng.random())
            at("after")
            weights[...] -= 0.001 * gradient
            commit(state, seen=state.values.get("seen", 0) + 8, loss=float(loss))
        assert state.values["seen"] == 8 * STEPS
        done(comm, state, [weights])

    train(State(weights=weights, rng=rng))


def rows_training():
    """Each rank has rows of its own, which change after the last call: per_rank."""
    rng = np.random.default_rng(100 + WORLD)

    @md.elastic
    def train(comm, state):
        u = np.full((4, 6), comm.rank, np.float64)
        total = np.zeros(6)
        state.keep("total", total)
        if state.generation and state.parts("u") and len(state.parts("u")) != comm.size:
            rows = np.concatenate([part for _, part in sorted(state.parts("u").items())])
            u = np.array_split(rows, comm.size)[comm.rank].copy()
        u = state.keep("u", u, per_rank=True)
        while state.step < STEPS:
            at("before")
            total[...] = comm.allreduce(u.sum(0))
            at("after")
            u += 1e-3 * total * rng.random()
            commit(state)
        done(comm, state, [comm.allreduce(u.sum(0), algorithm="linear")])

    train(State(rng=rng))


def nn_training(hook=None):
    """mpidist.nn with md.DDP, a learning rate that falls; perhaps a hook that leaves some out."""
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer, rng = nn.Adam(net.parameters(), 1e-2), np.random.default_rng(100 + WORLD)

    @md.elastic
    def train(comm, state):
        buckets = {"bucket_bytes": 1000, "first_bucket_bytes": 500}
        model = md.DDP(net, comm, sync="manual", hook=hook and hook(), **buckets)
        if hook and state.step:  # on fewer ranks, too
            assert any(each["residual"].any() for each in model.reducer.hook.save(model.buckets))
        data = state.keep("data", md.shard(np.arange(600), comm, shuffle=True))
        while state.step < STEPS:
            batch = []
            for index in data:
                batch.append(index)
                if len(batch) < 5:
                    continue
                optimizer.zero_grad()
                noise = 0.1 * rng.normal(size=(5, 10)).astype(np.float32)
                error = model(X[batch] + noise) - Y[batch]
                model.backward(2 * error / error.size)
                at("before")
                model.sync_gradients()
                at("after")
                optimizer.step()
                optimizer.learning_rate *= 0.999
                commit(state)
                batch = []
                if state.step >= STEPS:
                    break
        done(comm, state, [p.data for p in net.parameters()])

    train(State(net=net, optimizer=optimizer, rng=rng))


def faulty_training():
    """A weight of rank 1 of the world flips again and again: the third time it is lost."""
    held = float(os.environ.get("HELD", "0"))  # seconds that its end takes

    def hold(record):
        time.sleep(held if "this rank ends" in record.getMessage() else 0)
        return True

    logging.getLogger("mpidist").addFilter(hold)
    net = nn.Linear(10, 3, seed=1)
    optimizer = nn.SGD(net.parameters(), 0.01)

    @md.elastic
    def train(comm, state):
        model = md.DDP(net, comm, check_replicas=1, differing="majority")
        while state.step < STEPS:
            if WORLD == 1 and state.step % 5 == 4:
                net.weight.data.view(np.uint32)[0, 0] ^= 1
            optimizer.zero_grad()
            error = model(X[state.step :: 100]) - Y[state.step :: 100]
            model.backward(2 * error / error.size)
            model.sync_gradients()
            optimizer.step()
            commit(state)
        done(comm, state, [p.data for p in net.parameters()])

    copies = bool(os.environ.get("COPIES"))
    train(State(net=net, optimizer=optimizer, copies=copies))


def same_training():
    """The same weights on any number of ranks: twelve microbatches in each step."""
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = nn.Adam(net.parameters(), 1e-2)
    batches = [np.arange(4 * k, 4 * k + 4) for k in range(150)]

    @md.elastic
    def train(comm, state):
        model, each = md.DDP(net, comm, reproducible=12), 12 // comm.size
        data = state.keep("data", md.shard(batches, comm, shuffle=True, microbatches=12))
        while state.step < STEPS:
            for number, index in enumerate(data, 1):
                error = model(X[index]) - Y[index]
                at("before")
                model.backward(2 * error / error.size)
                at("after")
                if number % each == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    commit(state)
                    if state.step >= STEPS:
                        break
        done(comm, state, [p.data for p in net.parameters()])

    train(State(net=net, optimizer=optimizer))


class Counted(nn.Linear):
    """A layer with a buffer that no state has, in which each forward of a training counts."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = np.zeros(2)

    def named_buffers(self):
        return [("seen", self.seen)]

    def forward(self, x):
        self.seen += [x.sum(), 1] if self.training else 0
        return super().forward(x)


def buffers_training(how):
    """Buffers, a rate that changes before the calls of a step, and a validation in each step."""
    net = Counted(10, 3)
    optimizer, rng = nn.Adam(net.parameters(), 1e-2), np.random.default_rng(100 + WORLD)

    @md.elastic
    def train(comm, state):
        model = md.DDP(net, comm, sync="manual", buffers=how)
        while state.step < STEPS:
            optimizer.learning_rate *= 0.99
            mine = rng.integers(0, 600, 8)
            optimizer.zero_grad()
            error = model(X[mine]) - Y[mine]
            model.backward(2 * error / error.size)
            at("before")
            model.sync_gradients()
            at("after")
            net.eval()
            loss = comm.allreduce(np.square(model(X[:50]) - Y[:50]).mean(), algorithm="linear")
            at("validated")
            comm.barrier()
            net.train()
            optimizer.step()
            commit(state, loss=float(loss))
        seen = comm.allgather_object(net.seen)
        done(comm, state, [*(p.data for p in net.parameters()), *seen])

    train(State(net=net, optimizer=optimizer, rng=rng))


def pipeline_training(hook=None):
    """Stages of a network, each with an optimizer of its own; on 4 ranks two replicas of each."""
    layers = [nn.Linear(10, 16, seed=1), nn.ReLU(), nn.Linear(16, 16, seed=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(16, 3, seed=3))
    rng = np.random.default_rng(7)

    @md.elastic
    def train(comm, state):
        replicas = 2 if comm.size == 4 else 1
        grid = md.Grid(comm, pipe=comm.size // replicas)
        stage = md.partition(model, comm.size // replicas, verbose=False)[grid.pipe_index]
        chunk = md.DDP(stage, grid.data, hook=hook and hook())
        pipe = state.keep("pipe", md.Pipeline(chunk, grid.pipe, num_microbatches=4))
        optimizer = nn.Adam(stage.parameters(), 1e-2)
        if len(state.parts("optimizer")) in (0, comm.size):  # else the stages are other ones
            state.keep("optimizer", optimizer, per_rank=True)
        while state.step < STEPS:
            optimizer.zero_grad()
            # At the end nothing is learned any more: then fewer ranks have the same weights, too.
            optimizer.learning_rate = 1e-2 if state.step < STEPS // 2 else 0.0
            batch = np.array_split(rng.integers(0, 600, 16), replicas)[grid.data_index]
            at("before")
            pipe.step(X[batch], SIGNS[batch], nn.CrossEntropy())
            at("after")
            optimizer.step()
            commit(state)
        mine = [p.data for p in stage.parameters()] if grid.data_index == 0 else []
        done(comm, state, comm.allgather_object(mine))

    train(State(rng=rng))


def torch_training(wrapper):
    """PyTorch: dropout, BatchNorm, a scheduler, a loader; md.DDP, the stock DDP, or ZeRO."""
    if wrapper != "torch" and DEVICE == "cpu":  # the stock DDP asks it more
        from tests.support.forked import leave_out_compiler

        leave_out_compiler()
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(100 + WORLD)
    layers = [torch.nn.Linear(10, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2)]
    net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(32, 3)).to(DEVICE)
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=5)
    objects = {"net": net, "rng": torch}
    if DEVICE == "cuda":
        objects["rng of the GPU"] = torch.cuda
        barrier = DeviceHeap.barrier

        def told(heap, awaits, stream):
            at("barrier")  # all ranks have come to the call, and this one's stream never arrives
            barrier(heap, awaits, stream)

        DeviceHeap.barrier = told
    if wrapper != "zero":
        optimizer = objects["optimizer"] = torch.optim.AdamW(net.parameters(), 1e-2)
        objects["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    @md.elastic
    def train(comm, state):
        if wrapper == "torch":
            dist.init_process_group("mpidist")
            assert dist.get_world_size() == comm.size
            model = torch.nn.parallel.DistributedDataParallel(net)
        else:
            model = md.DDP(net, comm)
        step = objects.get("optimizer")
        if wrapper == "zero":
            step = state.keep("optimizer", md.ZeroOptimizer(torch.optim.AdamW, model, lr=1e-2))
        data = state.keep("data", md.shard(loader, comm, shuffle=True))
        while state.step < STEPS:
            for x, y in data:
                step.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x.to(DEVICE)), y.to(DEVICE))
                at("before")
                loss.backward()
                at("after")
                step.step()
                if wrapper == "torch" and not state.step % 10:  # the thread of the store looks in
                    time.sleep(0.025)
                if "scheduler" in objects:
                    objects["scheduler"].step()
                commit(state)
                if state.step >= STEPS:
                    break
        done(comm, state, [p.detach().cpu().numpy() for p in net.parameters()])
        if wrapper == "torch":
            dist.destroy_process_group()

    train(State(**objects))


TRAININGS = {
    "numpy": numpy_training,
    "rows": rows_training,
    "nn": nn_training,
    "pipeline": pipeline_training,
    "same": same_training,
    "faulty": faulty_training,
    "topk": partial(nn_training, partial(hooks.TopK, 0.1)),
    "powersgd": partial(nn_training, hooks.PowerSGD),
    "compress": partial(nn_training, hooks.Compress),
    "pipeline-topk": partial(pipeline_training, partial(hooks.TopK, 0.1)),
}

if __name__ == "__main__":
    if WRAPPER in ("keep", "average"):
        buffers_training(WRAPPER)
    elif WRAPPER in TRAININGS:
        TRAININGS[WRAPPER]()
    else:
        torch_training(WRAPPER)
