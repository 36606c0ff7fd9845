"""How soon a training goes on after kill -9 of a rank, beside torchrun and Horovod.

python benchmarks/losses.py                     # 4 ranks, 10 million parameters, 5 losses each
python benchmarks/losses.py --ranks 2 --losses 20 --only spares survive
python benchmarks/losses.py --horovod ../horovod/bin/python --only horovod

Each job trains the same number of weights, by an allreduce of as many gradients in each step.  At a
random moment a rank is killed; "back" is the time from the kill until each rank has done a step
that none had done before, "noticed" until the last rank that is left has the exception.  Under
torchrun all ranks are killed and started again; the program has a checkpoint in memory of each
step, without which it would lose more.  Horovod blacklists the host of the lost rank: it is told of
two hosts with half of the ranks each, both this machine, and goes on with the other half.  It is
installed in an environment of its own: its newest release, 0.28.1, is built with gloo and without
MPI by C++17 (in its CMakeLists.txt 14 stands) and CMAKE_POLICY_VERSION_MINIMUM=3.5.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

STEPS = 10**9  # the driver ends a job
LIMIT = 120.0  # seconds for each wait of the driver
ROWS = {  # by name: arguments of the launcher, and the training
    "spares": (["--spares", "1"], "numpy"),
    "survive": (["--survive"], "numpy"),
    "max-restarts": (["--max-restarts", "1"], "numpy"),
    "spares, PyTorch": (["--spares", "1"], "torch"),
    "survive, PyTorch": (["--survive"], "torch"),
    "max-restarts, PyTorch": (["--max-restarts", "1"], "torch"),
    "torchrun": ([], "torchrun"),
    "horovod": ([], "horovod"),
}


# -- a job's ranks ---------------------------------------------------------------------------------


def say(text: str) -> None:
    """Write a line to this process's file."""
    with open(Path(os.environ["LOSSES"]) / str(os.getpid()), "a", encoding="utf-8") as file:
        file.write(f"{time.time()} {text}\n")


def train_numpy(count: int) -> None:
    """Weights that follow the mean of random gradients."""
    import numpy as np

    import mpidist as md

    weights = np.zeros(count, np.float32)

    @md.elastic
    def train(comm, state):
        gradient = comm.empty(count, "float32")
        while state.step < STEPS:
            gradient[...] = 1e-3 * comm.rank
            try:
                comm.allreduce(gradient, "mean", out=gradient)
            except md.RankFailed:
                say("noticed")
                raise
            np.subtract(weights, gradient, out=weights)
            state.commit()
            say(f"step {state.step} {comm.rank}")

    train(md.State(weights=weights))


def net_of(count: int):
    """Return two layers with about so many weights."""
    import torch

    torch.set_num_threads(1)
    width = int((count / 2) ** 0.5)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)), width


def train_torch(count: int) -> None:
    """Train those layers with md.DDP."""
    import torch

    import mpidist as md

    net, width = net_of(count)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    @md.elastic
    def train(comm, state):
        model, x = md.DDP(net, comm), torch.ones(2, width)
        while state.step < STEPS:
            optimizer.zero_grad()
            try:
                model(x).square().mean().backward()
            except md.RankFailed:
                say("noticed")
                raise
            optimizer.step()
            state.commit()
            say(f"step {state.step} {comm.rank}")

    train(md.State(net=net, optimizer=optimizer))


def train_torchrun(count: int) -> None:
    """Train them with PyTorch's DDP over gloo, with a checkpoint in memory of each step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net, width = net_of(count)
    model, x, step = torch.nn.parallel.DistributedDataParallel(net), torch.ones(2, width), 0
    optimizer, saved = torch.optim.SGD(net.parameters(), 1e-3), Path(os.environ["SAVED"])
    if saved.exists():
        state = torch.load(saved)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
        say(f"step {step} {dist.get_rank()}")


def train_horovod(count: int) -> None:
    """Train them with Horovod's elastic driver over gloo."""
    import horovod.torch as hvd
    import torch
    from horovod.common.exceptions import HorovodInternalError

    hvd.init()
    net, width = net_of(count)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 1e-3), named_parameters=net.named_parameters()
    )

    @hvd.elastic.run
    def train(state):
        x = torch.ones(2, width)
        while True:
            optimizer.zero_grad()
            try:
                net(x).square().mean().backward()
                optimizer.step()
            except HorovodInternalError:
                say("noticed")
                raise
            state.step += 1
            state.commit()
            say(f"step {state.step} {hvd.rank()}")

    train(hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0))


# -- the driver ------------------------------------------------------------------------------------


class Job:
    """A job, watched by what its ranks write."""

    def __init__(self, row: str, ranks: int, count: int, folder: Path, horovod: Path | None):
        arguments, training = ROWS[row]
        self.folder, self.ranks = folder / "ranks", ranks
        self.fewer = (
            1 if "--survive" in arguments else ranks // 2 if row == "horovod" else 0
        )  # ranks, after a loss
        self.folder.mkdir()
        program = [str(Path(__file__).resolve()), "--train", training, "--parameters", str(count)]
        if training == "torchrun":
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(ranks), "--max-restarts", "10"]
        elif training == "horovod" and horovod is not None:
            horovod = horovod.absolute()
            half, hosts = ranks // 2, folder / "hosts.sh"
            hosts.write_text(f"#!/bin/sh\necho localhost:{half}\necho 127.0.0.1:{half}\n")
            hosts.chmod(0o700)
            start = [str(horovod.with_name("horovodrun")), "--gloo", "-np", str(2 * half)]
            start += ["--min-np", str(half), "--host-discovery-script", str(hosts), str(horovod)]
        else:
            start = [sys.executable, "-m", "mpidist", "run", "-q", "-n", str(ranks), *arguments]
        env = {**os.environ, "LOSSES": str(self.folder), "SAVED": str(folder / "saved.pt")}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with open(folder / "output", "w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*start, *program], env=env, stdout=output, stderr=output, start_new_session=True
            )

    def lines(self) -> list[tuple[float, int, list[str]]]:
        """Return what the ranks have said: when, the process, the words."""
        found = []
        for path in self.folder.iterdir():
            for line in path.read_text(encoding="utf-8").splitlines():
                at, *words = line.split()
                found.append((float(at), int(path.name), words))
        return sorted(found)

    def wait(self, ranks: int, beyond: int) -> float:
        """Return when as many ranks had done a step behind `beyond`; TimeoutError past a limit."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            first: dict[str, float] = {}
            for at, _, words in self.lines():
                if words[0] == "step" and int(words[1]) > beyond:
                    first.setdefault(words[2], at)
            if len(first) >= ranks:
                return sorted(first.values())[ranks - 1]
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise TimeoutError("the job has not gone on")

    def lose(self) -> tuple[float, float | None]:
        """Kill a rank; return the seconds until the job is back, and until all have noticed."""
        self.wait(self.ranks, 10)
        time.sleep(random.random() * 0.2)
        training = {words[2]: pid for _, pid, words in self.lines() if words[0] == "step"}
        victim = training[random.choice(sorted(training))]
        os.kill(victim, signal.SIGKILL)
        killed = time.time()
        time.sleep(0.05)  # else reading what was said takes the core on which the rank is to end
        done = max(int(words[1]) for _, _, words in self.lines() if words[0] == "step")
        back = self.wait(self.ranks - self.fewer, done) - killed
        noticed = [at for at, _, words in self.lines() if words[0] == "noticed"]
        return back, max(noticed) - killed if noticed else None

    def end(self) -> None:
        """End the job."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        for path in self.folder.iterdir():  # ranks have process groups of their own
            try:
                os.kill(int(path.name), signal.SIGKILL)
            except ProcessLookupError:
                pass


def tell(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Have the losses, by turns, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--losses", type=int, default=5, help="of each row, each in a job")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="rows; by default all")
    parser.add_argument("--horovod", type=Path, metavar="PYTHON", help="of an environment with it")
    parser.add_argument(
        "--train", choices={training for _, training in ROWS.values()}, help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    options.only = options.only or [row for row in ROWS if options.horovod or row != "horovod"]
    if "horovod" in options.only and (options.horovod is None or options.ranks % 2):
        parser.error("horovod needs --horovod PYTHON, and an even number of ranks")
    if options.train:
        globals()[f"train_{options.train}"](options.parameters)
        return 0
    back: dict[str, list[float]] = {row: [] for row in options.only}
    noticed: dict[str, list[float]] = {row: [] for row in options.only}
    failed = 0
    for number in range(options.losses):
        for row in options.only:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                job = Job(row, options.ranks, options.parameters, Path(folder), options.horovod)
                try:
                    seconds, known = job.lose()
                except TimeoutError as error:
                    failed += 1
                    tell(f"{row}: {error}\n{Path(folder, 'output').read_text()}")
                    continue
                finally:
                    job.end()
            back[row].append(seconds)
            noticed[row] += [] if known is None else [known]
            ms = "" if known is None else f", noticed after {1e3 * known:.1f} ms"
            tell(f"{number + 1}: {row}: back after {seconds:.3f} s{ms}")
    tell(f"\n{options.ranks} ranks, {options.parameters:,} parameters; median (most)")
    for row in options.only:
        if back[row]:
            known = noticed[row]
            ms = f"{1e3 * median(known):7.1f} ({1e3 * max(known):.1f}) ms" if known else "-"
            tell(f"{row:22} noticed {ms:20} back {median(back[row]):.2f} ({max(back[row]):.2f}) s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
