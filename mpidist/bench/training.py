"""Steps of data-parallel training beside PyTorch's, and what communication backward hides."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..communicator.agreement import from_rank_0
from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..nn import Module, Parameter
from ..parallel import DDP, Stats, autotune
from ..recovery.state import State
from .device import HOST, filled, until_idle, use_device
from .machine import make_header
from .race import Contender, nothing, race, rows
from .results import Results, Row

if TYPE_CHECKING:
    import torch

OUR_DDP = "mpidist DDP"
CHECKED, CHECK = f"{OUR_DDP}, check_replicas=1", "comparison of replicas alone"
COMMITTED, COMMIT = f"{OUR_DDP}, md.elastic", "its commit() alone"
REFERENCE = "mpidist"  # ratios of training refer to the first candidate, which is ours
NO_TORCH = "PyTorch is not installed: pip install torch to measure it too"


class BareArrays:
    """A module without layers: arrays of the given lengths, each with a gradient of ones."""

    def __init__(self, sizes: Sequence[int], device: str = HOST):
        self._arrays = [Parameter(filled(device, (size,), 0, np.float32)) for size in sizes]
        for p in self._arrays:
            p.grad = filled(device, p.data.shape, 1, np.float32)

    def parameters(self) -> list[Parameter]:
        """Return the arrays as parameters, in the order of their lengths given."""
        return self._arrays


def communication(
    comm: Communicator,
    rounds: int,
    count: int = 240,
    elements: int = 1000,
    device: str = HOST,
) -> list[Row]:
    """Time the averaging of `count` gradients, `rounds` times each: in buckets, and one by one.

    Each gradient has `elements` float32, on the device.
    """
    ours, theirs = (BareArrays([elements] * count, device) for _ in range(2))
    model = DDP(ours, comm, overlap="none")

    def one_by_one() -> None:
        for p in theirs.parameters():
            comm.allreduce(p.grad, op="mean", out=p.grad)

    contenders = [
        Contender(OUR_DDP, model.sync_gradients),
        Contender("one allreduce per parameter", one_by_one),
    ]
    work = f"communication, {count} gradients of {elements} float32"
    return rows(comm, work, contenders, rounds, until_idle(device))


def stepping(name: str, step: Callable[[], object], model: DDP) -> Contender:
    """Return the contender whose `step` is of `model`: warm once its buckets and transport are."""
    return Contender(name, step, ready=lambda: model.reducer.settled)


class Committed:
    """The State of a training under md.elastic, in a race with others, and its commits' times.

    Its communicator is its own, as a State observes all calls of one.
    """

    def __init__(self, comm: Communicator):
        own = comm.split(0)
        assert own is not None
        self._all, self._comm, self._seconds = comm, own, list[float]()

    def wrap(self, net: Any) -> DDP:
        """Begin to train a module; return its DDP."""
        self._state = State(net=net)
        self._state.begin(self._comm, {})
        return DDP(net, self._comm)

    def keep(self, optimizer: Any) -> Callable[[], None]:
        """Keep the optimizer; return the function to be called behind each step of it."""
        self._state.keep("optimizer", optimizer)

        def commit() -> None:
            began = time.perf_counter()
            self._state.commit()
            self._seconds.append(time.perf_counter() - began)

        return commit

    def stepping(self, step: Callable[[], object], model: DDP) -> Contender:
        """Return the contender: a State sees the steps of all optimizers, here those of others."""
        contender = stepping(COMMITTED, step, model)
        return replace(contender, prepare=self._state.forget_steps)

    def row(self, steps: Row, rounds: int) -> Row:
        """End the training; return a row of the commits in its last `rounds` steps; collective."""
        self._state.end()
        seconds = self._all.allreduce(np.array(self._seconds[-rounds:]), "max")
        time_us = 1e6 * float(np.median(seconds))
        ratio = steps.time_us * (steps.ratio or 1) / time_us
        return Row(steps.work, COMMIT, steps.ranks, time_us, ratio)


def _rows(
    committed: Committed | None,
    comm: Communicator,
    work: str,
    contenders: Sequence[Contender],
    rounds: int,
    wait: Callable[[], object],
) -> list[Row]:
    """Race contenders; with the row of the commits, if one of them has made some; collective."""
    found = rows(comm, work, contenders, rounds, wait)
    if committed is not None:
        at = [row.candidate for row in found].index(COMMITTED)
        found.insert(at + 1, committed.row(found[at], rounds))
    return found


_COMMUNICATION_ALONE = "communication alone"
AUTOS = 3  # wrappers with overlap="auto"
NOTEWORTHY = 0.1  # share of a step below which hidden communication is lost in the noise
LAYERS, ELEMENTS, SECONDS = 40, 25_000, 4e-3  # of the backward that waits on a timer

Make = Callable[[Communicator, str], tuple[Callable[[], object], DDP]]


class Waiting(Module):
    """A module whose backward sleeps before each layer's gradient: it takes time, but no core."""

    def __init__(self) -> None:
        self.weights = [Parameter(np.zeros(ELEMENTS, np.float32)) for _ in range(LAYERS)]
        self._gradient = np.ones(ELEMENTS, np.float32)

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the weights of the layers by name."""
        return [(str(k), p) for k, p in enumerate(self.weights)]

    def forward(self, x: Any) -> Any:
        """Return `x`."""
        return x

    def backward(self, grad: Any) -> Any:
        """For each layer, from the last to the first, sleep and add its gradient; return `grad`."""
        for p in reversed(self.weights):
            time.sleep(SECONDS)
            p.accumulate(self._gradient)
        return grad


def waiting(comm: Communicator, overlap: str) -> tuple[Callable[[], object], DDP]:
    """Return a function that runs one step of a model whose backward sleeps, and the model's DDP.

    The model is :class:`Waiting`; `overlap` is that of the DDP.
    """
    nbytes = 4 * ELEMENTS
    model = DDP(Waiting(), comm, nbytes, nbytes, overlap=overlap)

    def step() -> None:
        model.zero_grad()
        model.backward(model(1))

    return step, model


def overlaps(
    comm: Communicator, rounds: int, work: str, make: Make, autos: int = AUTOS
) -> list[Row]:
    """Measure training steps with each kind of overlap, and with "auto" `autos` times.

    `work` labels the rows; ``make(comm, overlap)`` returns a function that runs one step, and its
    DDP.  The last row is communication alone: averaging the same buckets without a backward.

    Figures of a row are ``least_us``, its least time T in the rounds; ``share``, the median of the
    time divided by the time without overlap in the same round; and ``hidden``,
    (Tnone - T) / min(Talone, Tnone - Talone), the part that overlap hid of what it can hide, where
    Tnone is the least time without overlap and Talone that of communication alone.  The rows
    "none" and "communication alone" have no ``hidden``; no row has it if the divisor is at most a
    tenth of Tnone.  Least times are compared, since other work on the machine only adds time.
    """
    models = {name: make(comm, name) for name in autotune.candidates(comm, "auto", 2)}
    models |= {f"auto {k}": make(comm, "auto") for k in range(1, autos + 1)}
    sizes = [bucket.starts[-1] for bucket in models["none"][1].buckets]
    alone = DDP(BareArrays(sizes), comm, 1, 1, overlap="none")
    contenders = [stepping(name, act, model) for name, (act, model) in models.items()]
    contenders.append(stepping(_COMMUNICATION_ALONE, alone.sync_gradients, alone))
    times = race(comm, contenders, rounds)
    least = dict(zip((contender.name for contender in contenders), times.min(axis=0), strict=True))
    bound = min(least[_COMMUNICATION_ALONE], max(least["none"] - least[_COMMUNICATION_ALONE], 0.0))
    found = []
    for contender, column in zip(contenders, times.T, strict=True):
        name = contender.name
        seconds, share = map(float, np.median([column, column / times[:, 0]], axis=1))
        figures = {"least_us": 1e6 * float(column.min()), "share": share}
        if name not in ("none", _COMMUNICATION_ALONE) and bound > NOTEWORTHY * least["none"]:
            figures["hidden"] = float((least["none"] - least[name]) / bound)
        if name.startswith("auto"):
            name += f" ({models[name][1].reducer.name})"
        found.append(Row(work, name, comm.size, 1e6 * seconds, figures=figures))
    return found


# -- steps in PyTorch, which is imported when they run ---------------------------------------------

Keep = Callable[[Any], Callable[[], object]]
SAMPLES, DEPTH = 32, 4  # of each rank in a step; layers of the MLPs
BUSY_WIDTH, BUSY_SAMPLES, BUSY_BUCKET = 1024, 128, 4 << 20  # of the network of --overlap


def mlp(width: int, seed: int = 0, last: bool = True, device: str = HOST) -> torch.nn.Module:
    """Return an MLP: 4 layers of `width`² weights, and 10 classes if it has the `last` layer."""
    import torch

    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    if last:
        layers.append(torch.nn.Linear(width, 10))
    return torch.nn.Sequential(*layers).to(device)


def width_for(millions: float) -> int:
    """Return the width of the MLP with about `millions` of parameters."""
    return max(64, 64 * round(math.sqrt(millions * 1e6 / DEPTH) / 64))


def sgd_step(
    model: Any,
    parameters: Any,
    width: int,
    sync: Callable[[], object] = lambda: None,
    samples: int = SAMPLES,
    device: str = HOST,
    keep: Keep = lambda _: nothing,
) -> Callable[[], None]:
    """Return a function that runs one SGD step of `model`, with `sync()` before the update.

    What ``keep(optimizer)`` returns is called behind the update.

    The batch is random: `samples` inputs of `width` numbers, on the model's `device`.
    """
    import torch

    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    commit = keep(optimizer)
    x, labels = (
        torch.randn(samples, width, device=device),
        torch.randint(10, (samples,), device=device),
    )

    def step() -> None:
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        sync()
        optimizer.step()
        commit()
        optimizer.zero_grad()

    return step


def one_by_one(comm: Communicator, net: torch.nn.Module) -> Callable[[], None]:
    """Return a function that averages the gradients of `net`, one allreduce per parameter."""

    def sync() -> None:
        for p in net.parameters():
            assert p.grad is not None
            comm.allreduce(p.grad, op="mean", out=p.grad)

    return sync


def mlp_steps(
    comm: Communicator,
    rounds: int,
    width: int,
    device: str = HOST,
    checked: bool = False,
    elastic: bool = False,
) -> tuple[list[Row], Stats]:
    """Time `rounds` SGD steps of an MLP with each wrapper; return rows and mpidist.DDP's stats.

    If `checked`, one wrapper compares the replicas in every step, and the comparison is timed.  If
    `elastic`, one more is trained as under md.elastic, and its commits are timed.
    """
    import torch

    from .torch import process_groups, threads

    wait = until_idle(device)
    net, bare, each = (mlp(width, device=device) for _ in range(3))
    count = sum(p.numel() for p in net.parameters())
    step = partial(sgd_step, width=width, device=device)
    with threads(comm):
        model = DDP(net, comm)
        contenders = [
            stepping(OUR_DDP, step(model, net.parameters()), model),
            Contender("no communication", step(bare, bare.parameters())),
        ]
        if checked:
            compared = mlp(width, device=device)
            wrapped = DDP(compared, comm, check_replicas=1)
            contenders.append(stepping(CHECKED, step(wrapped, compared.parameters()), wrapped))
            contenders.append(Contender(CHECK, wrapped.unlike_parameters))
        committed = Committed(comm) if elastic else None
        if committed is not None:
            kept = mlp(width, device=device)
            wrapped = committed.wrap(kept)
            act = step(wrapped, kept.parameters(), keep=committed.keep)
            contenders.append(committed.stepping(act, wrapped))
        work = f"step, MLP of {count / 1e6:.1f} M parameters"
        if comm.size == 1:
            return _rows(committed, comm, work, contenders, rounds, wait), model.stats()
        sync = one_by_one(comm, each)
        name = "one allreduce per parameter"
        contenders.append(Contender(name, step(each, each.parameters(), sync=sync)))
        with process_groups(comm) as (_, gloo):
            wrap = torch.nn.parallel.DistributedDataParallel
            theirs = wrap(mlp(width, device=device), process_group=gloo)
            name = "torch DDP over gloo"
            contenders.append(Contender(name, step(theirs, theirs.parameters())))
            found = _rows(committed, comm, work, contenders, rounds, wait)
            del theirs, contenders
    return found, model.stats()


def model_steps(
    comm: Communicator,
    rounds: int,
    name: str,
    device: str = HOST,
    checked: bool = False,
    elastic: bool = False,
) -> tuple[list[Row], Stats]:
    """Time `rounds` AdamW steps with each wrapper; return rows and mpidist.DDP's stats.

    `name` is a model of :data:`mpidist.bench.models.MODELS`.  If `checked`, one wrapper compares
    the replicas in every step, and the comparison is timed.  If `elastic`, one more is trained as
    under md.elastic, and its commits are timed.
    """
    import torch

    from .models import MODELS
    from .torch import process_groups, threads

    def step(
        wrap: Callable[[torch.nn.Module], Any], keep: Keep = lambda _: nothing
    ) -> tuple[Callable[[], None], Any]:
        torch.manual_seed(0)
        with torch.device(device):
            net, loss = MODELS[name]()
        model, optimizer = wrap(net), torch.optim.AdamW(net.parameters())
        commit = keep(optimizer)

        def act() -> None:
            loss(model).backward()
            optimizer.step()
            commit()
            optimizer.zero_grad()

        return act, model

    wait = until_idle(device)
    with threads(comm):
        ours, model = step(lambda net: DDP(net, comm))
        bare, net = step(lambda net: net)
        count = sum(p.numel() for p in net.parameters())
        work = f"step, {name} of {count / 1e6:.1f} M parameters"
        contenders = [
            stepping(OUR_DDP, ours, model),
            Contender("no communication", bare),
        ]
        if checked:
            act, wrapped = step(lambda net: DDP(net, comm, check_replicas=1))
            contenders.append(stepping(CHECKED, act, wrapped))
            contenders.append(Contender(CHECK, wrapped.unlike_parameters))
        committed = Committed(comm) if elastic else None
        if committed is not None:
            act, wrapped = step(committed.wrap, committed.keep)
            contenders.append(committed.stepping(act, wrapped))
        if comm.size == 1:
            return _rows(committed, comm, work, contenders, rounds, wait), model.stats()
        with process_groups(comm) as (over_mpidist, over_gloo):
            unused = {"find_unused_parameters": True} if name == "moe" else {}
            for backend, group, views in (
                ("mpidist", over_mpidist, True),
                ("gloo", over_gloo, True),
                ("gloo", over_gloo, False),
            ):
                theirs = step(  # not its model: process_groups frees that
                    partial(
                        torch.nn.parallel.DistributedDataParallel,
                        process_group=group,
                        gradient_as_bucket_view=views,
                        **unused,
                    )
                )[0]
                label = f"torch DDP over {backend}" + ", views" * views
                contenders.append(Contender(label, theirs))
            found = _rows(committed, comm, work, contenders, rounds, wait)
            del theirs, contenders
    return found, model.stats()


def busy(comm: Communicator, overlap: str) -> tuple[Callable[[], None], DDP]:
    """Return a function that runs a training step of a compute-bound MLP, and the MLP's DDP.

    It is for ``mpidist bench ddp --overlap``.
    """
    net = mlp(BUSY_WIDTH)
    model = DDP(net, comm, BUSY_BUCKET, overlap=overlap)
    step = sgd_step(model, net.parameters(), BUSY_WIDTH, samples=BUSY_SAMPLES)
    return step, model


# -- what `mpidist bench ddp` measures -------------------------------------------------------------


def ranks_have(comm: Communicator, *modules: str) -> bool:
    """Return on every rank whether rank 0 can import all `modules`; collective."""
    return from_rank_0(comm, lambda: all(map(importlib.util.find_spec, modules)), "importing")


def measure_steps(
    comm: Communicator,
    iterations: int,
    millions: Sequence[float],
    device: str = HOST,
    checked: bool = False,
    elastic: bool = False,
) -> Results:
    """Measure training steps of MLPs, and averaging of small gradients; collective.

    There are `iterations` timed steps of each kind, and an MLP for each number of `millions` of
    parameters; all of them on the `device`, "cpu" or "cuda".  If `checked`, one candidate compares
    the replicas in every step, and the comparison is timed; if `elastic`, one more is trained as
    under md.elastic, and its commits are timed.
    """
    has_torch = ranks_have(comm, "torch")
    results = _results(comm, has_torch, device)
    if has_torch:
        for count in millions:
            _add(results, *mlp_steps(comm, iterations, width_for(count), device, checked, elastic))
    if comm.size > 1:
        results.rows += communication(comm, iterations, device=device)
    return results


def measure_models(
    comm: Communicator,
    iterations: int,
    names: Sequence[str],
    device: str = HOST,
    checked: bool = False,
    elastic: bool = False,
) -> Results:
    """Measure training steps of real models by several candidates; collective.

    `names` are of :data:`mpidist.bench.models.MODELS`; there are `iterations` timed steps of each
    kind, on the `device`, "cpu" or "cuda".  If `checked`, one candidate compares the replicas in
    every step, and the comparison is timed; if `elastic`, one more is trained as under md.elastic,
    and its commits are timed.
    """
    has_torch = ranks_have(comm, "torch")
    results = _results(comm, has_torch, device)
    if has_torch:
        for name in names:
            _add(results, *model_steps(comm, iterations, name, device, checked, elastic))
    return results


def measure_overlap(comm: Communicator, iterations: int) -> Results:
    """Measure training steps with each kind of overlap; collective, on 2 ranks or more."""
    if comm.size == 1:
        raise InvalidArgument(
            "bench ddp --overlap on 1 rank: expected 2 or more (mpidist run -n 2)"
        )
    has_torch = ranks_have(comm, "torch")
    results = _results(comm, has_torch)
    results.rows += overlaps(comm, iterations, "backward that waits on a timer", waiting)
    if has_torch:
        from .torch import threads

        with threads(comm):
            results.rows += overlaps(comm, iterations, "backward that computes", busy)
    shares = [row.figures["share"] for row in results.rows if row.candidate.startswith("auto")]
    results.notes.append(f"auto: at most {max(shares):.2f} of the time without overlap")
    return results


def _results(comm: Communicator, has_torch: bool, device: str = HOST) -> Results:
    header = make_header(comm, *["torch"] * has_torch)
    notes = [] if has_torch else [NO_TORCH]
    results = Results(header, benchmark="ddp", reference=REFERENCE, notes=notes)
    use_device(comm, device, results)
    return results


def _add(results: Results, found: list[Row], stats: Stats) -> None:
    results.rows += found
    clock = ", all by the host's clock" if "gpus" in results.header else ""
    results.notes.append(f"{found[0].work}: {describe_stats(stats)}{clock}")


def describe_stats(stats: Stats) -> str:
    """Return as text a DDP's overlap, the trial times that chose it, and the parts of a step."""
    parts = ("compute", "exposed", "hidden")
    times = ", ".join(f"{part} {1e3 * getattr(stats, part):.2f} ms" for part in parts)
    trials = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in stats.trials.items())
    tried = f" after steps of {trials}" if trials else ""
    return f"overlap {stats.overlap!r}{tried}; {times}"
