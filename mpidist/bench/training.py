"""Steps of data-parallel training, and how much communication backward hides."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..nn import Module, Parameter
from ..parallel import DDP, Stats
from ..parallel.autotune import candidates
from .results import make_header

WARM_ROUNDS = 3
OURS = "mpidist DDP"


@dataclass(frozen=True)
class Contender:
    """One means to do the same work: `act` is timed, once `model` has chosen how it sends."""

    name: str
    act: Callable[[], object]
    model: DDP | None = None

    def warm_up(self) -> None:
        """Do the work until nothing changes any more."""
        for _ in range(WARM_ROUNDS):
            self.act()
        while self.model is not None and not self.model.reducer.settled:
            self.act()


@dataclass(frozen=True)
class Row:
    """What one contender took.

    Attributes
    ----------
    work, name : str
        What was done, and by which means.
    seconds : float
        Median over the rounds of the time on the slowest rank.
    ratio : float
        The time of our wrapper over this one: below 1 ours is faster.
    """

    work: str
    name: str
    seconds: float
    ratio: float

    def as_json(self) -> dict[str, Any]:
        """Give it as a dict."""
        return asdict(self)


def take_turns(comm: Any, contenders: Sequence[Contender], rounds: int) -> np.ndarray:
    """Give the seconds of each contender (columns) on the slowest rank, round by round.

    Their order is drawn for each round, the same on every rank.
    """
    times = np.empty((rounds, len(contenders)))
    for contender in contenders:
        contender.warm_up()
    draw = np.random.default_rng(0)  # in a fixed order each would follow the same other one
    for taken in times:
        for k in draw.permutation(len(contenders)):
            comm.barrier()
            began = perf_counter()
            contenders[k].act()
            taken[k] = perf_counter() - began
    return comm.allreduce(times, op="max")


def race(comm: Any, work: str, contenders: Sequence[Contender], rounds: int) -> list[Row]:
    """Let contenders take turns; the first is ours."""
    times = take_turns(comm, contenders, rounds)
    medians = [statistics.median(column) for column in times.T.tolist()]
    return [
        Row(work, contender.name, seconds, medians[0] / seconds)
        for contender, seconds in zip(contenders, medians, strict=True)
    ]


class Arrays:
    """A module of bare arrays of so many elements, whose gradients are there."""

    def __init__(self, sizes: Sequence[int]):
        self._arrays = [Parameter(np.zeros(size, np.float32)) for size in sizes]
        for p in self._arrays:
            p.grad = np.ones(p.data.size, np.float32)

    def parameters(self) -> list[Parameter]:
        """List the arrays."""
        return self._arrays


def communication(comm: Any, rounds: int, count: int = 240, elements: int = 1000) -> list[Row]:
    """Measure the averaging of many small gradients: in buckets, and each for itself."""
    ours, theirs = Arrays([elements] * count), Arrays([elements] * count)
    model = DDP(ours, comm, overlap="none")

    def one_by_one() -> None:
        for p in theirs.parameters():
            comm.allreduce(p.grad, op="mean", out=p.grad)

    contenders = [
        Contender(OURS, model.sync_gradients),
        Contender("one allreduce per parameter", one_by_one),
    ]
    work = f"communication, {count} gradients of {elements} float32"
    return race(comm, work, contenders, rounds)


ALONE = "communication alone"
AUTOS = 3  # wrappers that choose for themselves
NOTEWORTHY = 0.1  # share of a step; what is hidden of less cannot be told from noise
LAYERS, ELEMENTS, SECONDS = 40, 25_000, 4e-3  # of the backward that waits

Make = Callable[[Any, str], tuple[Callable[[], object], DDP]]


@dataclass(frozen=True)
class Overlapped:
    """What a step took in one way.

    Attributes
    ----------
    work, name : str
        What was done, and how it was overlapped.
    seconds, least : float
        Median and least over the rounds of the time on the slowest rank.
    share : float
        Median over the rounds of the time relative to the one without overlap, of the same round.
    hidden : float or None
        (Tsync - T) / min(Tcommunication, Tbackward), of the least times, as other work on the
        machine only adds; None where communication is too short, and without overlap.
    """

    work: str
    name: str
    seconds: float
    least: float
    share: float
    hidden: float | None

    def as_json(self) -> dict[str, Any]:
        """Give it as a dict."""
        return asdict(self)


class Waiting(Module):
    """Layers whose gradients take a given time, and no core."""

    def __init__(self) -> None:
        self.weights = [Parameter(np.zeros(ELEMENTS, np.float32)) for _ in range(LAYERS)]
        self._gradient = np.ones(ELEMENTS, np.float32)

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """List the layers."""
        return [(str(k), p) for k, p in enumerate(self.weights)]

    def forward(self, x: Any) -> Any:
        """Give `x`."""
        return x

    def backward(self, grad: Any) -> Any:
        """Wait before each gradient."""
        for p in reversed(self.weights):
            time.sleep(SECONDS)
            p.accumulate(self._gradient)
        return grad


def waiting(comm: Any, overlap: str) -> tuple[Callable[[], object], DDP]:
    """Give a step of a model whose backward waits on a timer, and its wrapper."""
    nbytes = 4 * ELEMENTS
    model = DDP(Waiting(), comm, nbytes, nbytes, overlap=overlap)

    def step() -> None:
        model.zero_grad()
        model.backward(model(1))
        model.sync_gradients()

    return step, model


def overlaps(comm: Any, rounds: int, work: str, make: Make, autos: int = AUTOS) -> list[Overlapped]:
    """Measure steps in every way that there is, and with "auto" some times, in turns."""
    ways = candidates(comm, "auto", 2)
    models = {name: make(comm, name) for name in ways}
    models |= {f"auto {k}": make(comm, "auto") for k in range(1, autos + 1)}
    sizes = [bucket.starts[-1] for bucket in models["none"][1].buckets]
    alone = DDP(Arrays(sizes), comm, 1, 1, overlap="none")
    contenders = [Contender(name, act, model) for name, (act, model) in models.items()]
    contenders.append(Contender(ALONE, alone.sync_gradients, alone))
    times = take_turns(comm, contenders, rounds)
    least = dict(zip((contender.name for contender in contenders), times.min(axis=0), strict=True))
    bound = min(least[ALONE], max(least["none"] - least[ALONE], 0.0))
    told = []
    for contender, column in zip(contenders, times.T, strict=True):
        name = contender.name
        hides = name not in ("none", ALONE) and bound > NOTEWORTHY * least["none"]
        hidden = float((least["none"] - least[name]) / bound) if hides else None
        if name.startswith("auto"):
            name += f" ({models[name][1].reducer.name})"
        seconds, share = map(float, np.median([column, column / times[:, 0]], axis=1))
        told.append(Overlapped(work, name, seconds, float(column.min()), share, hidden))
    return told


def ranks_have(comm: Any, module: str) -> bool:
    """Return whether rank 0 can import a module; collective."""
    return comm.broadcast_object(comm.rank == 0 and importlib.util.find_spec(module) is not None)


@dataclass(frozen=True)
class TrainingResults:
    """Results of `mpidist bench ddp`.

    Attributes
    ----------
    header : dict
        Description of the run.
    rows : list of Row or Overlapped
        Times of the steps.
    notes : list of str
        Lines below the table.
    has_torch : bool
        Whether PyTorch was measured too.
    """

    header: dict[str, Any]
    rows: list[Any]
    notes: list[str]
    has_torch: bool

    def as_json(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        rows = [row.as_json() for row in self.rows]
        return {"header": self.header, "rows": rows, "notes": self.notes}


def measure_steps(comm: Any, iterations: int, sizes: Sequence[float]) -> TrainingResults:
    """Measure training steps by several means, and averaging small gradients; collective.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    iterations : int
        Timed steps of each kind.
    sizes : sequence of float
        Millions of parameters of the networks.
    """
    rows: list[Row] = []
    notes, have = [], ranks_have(comm, "torch")
    if have:
        from .training_torch import training, width_for

        for size in sizes:
            more, stats = training(comm, iterations, width_for(size))
            rows += more
            notes.append(f"{more[0].work}: {describe(stats)}")
    if comm.size > 1:
        rows += communication(comm, iterations)
    return TrainingResults(make_header(comm, *["torch"] * have), rows, notes, have)


def measure_overlap(comm: Any, iterations: int) -> TrainingResults:
    """Measure steps with each kind of overlap; collective."""
    if comm.size == 1:
        raise InvalidArgument(
            "bench ddp --overlap on 1 rank: expected 2 or more (mpidist run -n 2)"
        )
    have = ranks_have(comm, "torch")
    rows = overlaps(comm, iterations, "backward that waits on a timer", waiting)
    if have:
        from .training_torch import busy, threads

        with threads(comm):
            rows += overlaps(comm, iterations, "backward that computes", busy)
    autos = [row.share for row in rows if row.name.startswith("auto")]
    notes = [f"auto: at most {max(autos):.2f} of the time without overlap"]
    return TrainingResults(make_header(comm, *["torch"] * have), rows, notes, have)


def describe(stats: Stats) -> str:
    """Return the chosen overlap, the trials before it, and the parts of a step's time, as text."""
    parts = ("compute", "exposed", "hidden")
    times = ", ".join(f"{part} {1e3 * getattr(stats, part):.2f} ms" for part in parts)
    trials = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in stats.trials.items())
    tried = f" after steps of {trials}" if trials else ""
    return f"overlap {stats.overlap!r}{tried}; {times}"
