"""The main job: data-parallel training, and the same training in one process."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import InvalidArgument, Unsupported
from ..nn import SGD, CrossEntropy, Linear, Module, ReLU, Sequential
from ..parallel import DDP
from ..schedule import blocks
from .digits import Digits, load_digits
from .result import LOSS_TOLERANCE, DemoResult

Sum = Callable[[np.ndarray], np.ndarray]


@dataclass
class Learner:
    """One replica in training: what it learns from, and how its part joins the others'.

    With `rank` 0 of `size` 1 and nothing to join it is the one-process training.
    """

    model: Any
    digits: Digits
    batch: int
    learning_rate: float
    momentum: float
    seed: int
    rank: int = 0
    size: int = 1
    sync: Callable[[], None] = lambda: None
    total: Sum = lambda values: values
    sync_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    def run(self, epochs: int, report: Report = lambda done, loss, accuracy: None) -> float:
        """Train for some epochs; give the seconds that it took."""
        begun = perf_counter()
        optimizer = SGD(self.model.parameters(), self.learning_rate, self.momentum)
        random = np.random.default_rng(self.seed)  # the same on every rank: so are the batches
        for epoch in range(epochs):
            order = random.permutation(len(self.digits.train_labels))
            loss = sum(self._step(chosen, optimizer) for chosen in self._batches(order))
            sums = self.total(np.array([loss, self._recognised()]))
            self.losses.append(float(sums[0]) / len(order))
            self.accuracies.append(float(sums[1]) / len(self.digits.test_labels))
            report(epoch + 1, self.losses[-1], self.accuracies[-1])
        return perf_counter() - begun

    def _batches(self, order: np.ndarray) -> Iterator[np.ndarray]:
        return (order[i : i + self.batch] for i in range(0, len(order), self.batch))

    def _step(self, chosen: np.ndarray, optimizer: SGD) -> float:
        """Learn from the global batch `chosen`; give the sum of the losses of this rank's part."""
        mine = chosen[blocks(len(chosen), self.size)[self.rank]]
        criterion = CrossEntropy("sum")
        scores = self.model(self.digits.train_images[mine])
        loss = criterion(scores, self.digits.train_labels[mine])
        self.model.zero_grad()
        # The parts may differ in size, so each rank divides its sum by the size of the whole batch;
        # the mean over the ranks divides once more, by their number, so that is multiplied in.
        self.model.backward(criterion.backward(self.size / len(chosen)))
        begun = perf_counter()
        self.sync()
        self.sync_seconds += perf_counter() - begun
        optimizer.step()
        return loss

    def _recognised(self) -> int:
        """Count the test samples of this rank's part that the model recognises."""
        mine = blocks(len(self.digits.test_labels), self.size)[self.rank]
        guesses = self.model(self.digits.test_images[mine]).argmax(axis=1)
        return int((guesses == self.digits.test_labels[mine]).sum())


def make_model(hidden: tuple[int, ...], seed: int, dtype: Any) -> Module:
    """Build the network: linear layers with ReLU between them, 64 inputs and 10 outputs."""
    random = np.random.default_rng(seed)
    sizes = (64, *hidden, 10)
    layers: list[Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [Linear(inputs, outputs, seed=random, dtype=dtype), ReLU()]
    return Sequential(*layers[:-1])


def fingerprint(model: Any) -> str:
    """Give the SHA-256 of all parameters' bytes: two models with the same one are the same."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(np.ascontiguousarray(p.data).tobytes())
    return digest.hexdigest()


log = logging.getLogger("mpidist.demo")
Report = Callable[[int, float, float], None]


@contextmanager
def progress(rank: int, epochs: int, console: Console | None = None) -> Iterator[Report]:
    """Show how training goes, on rank 0 only.

    Parameters
    ----------
    rank, epochs : int
        This rank, and how many epochs there will be.
    console : rich.console.Console, optional
        Where to draw; by default standard error, if that is a terminal.

    Yields
    ------
    callable
        To be called after each epoch with (epochs done, loss, accuracy).
    """
    console = console or Console(stderr=True)
    if rank != 0:
        yield lambda done, loss, accuracy: None
    elif not console.is_terminal:
        yield lambda done, loss, accuracy: log.info(
            "epoch %d/%d: loss %.4f, test accuracy %.2f %%", done, epochs, loss, 100 * accuracy
        )
    else:
        with Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}, test accuracy {task.fields[accuracy]:.2%}"),
            TimeElapsedColumn(),
            console=console,
        ) as bar:
            task = bar.add_task("training", total=epochs, loss=float("nan"), accuracy=0.0)
            yield lambda done, loss, accuracy: bar.update(
                task, completed=done, loss=loss, accuracy=accuracy
            )


BUCKET_BYTES, FIRST_BUCKET_BYTES = 256 << 10, 64 << 10


def train(
    comm: Any,
    *,
    epochs: int = 20,
    batch: int = 100,
    hidden: tuple[int, ...] = (512, 256),
    learning_rate: float = 0.05,
    momentum: float = 0.9,
    dtype: str = "float64",
    algorithm: str = "auto",
    seed: int = 0,
    reference: bool = True,
    console: Any = None,
) -> DemoResult:
    """Train a classifier of handwritten digits on all ranks of `comm` together, and check it.

    Every rank begins with other weights and takes those of rank 0.  Each global batch is cut into
    one part per rank, as evenly as it goes; gradients are averaged over the batch.  Afterwards
    rank 0 alone repeats the training on the same global batches.

    Parameters
    ----------
    comm : Communicator
        The ranks; all must call this with the same arguments.
    epochs, batch : int
        Passes over the training set, and samples in a global batch.
    hidden : tuple of int
        Sizes of the hidden layers.
    learning_rate, momentum : float
        Of the gradient descent.
    dtype : {"float32", "float64"}
        In which all is computed; float64 makes the comparison with one process sharp.
    algorithm : str
        Of the allreduce of gradients.
    seed : int
        Of the weights and the order of samples.
    reference : bool
        Whether to repeat the training in one process.
    console : rich.console.Console, optional
        Where rank 0 shows progress; by default standard error if that is a terminal, else the log.

    Returns
    -------
    DemoResult
        The same on every rank.

    Raises
    ------
    InvalidArgument
        If an argument is not allowed.
    Unsupported
        If scikit-learn is not installed.
    """
    _check(comm.rank, epochs=epochs, batch=batch, hidden=hidden, dtype=dtype)
    digits = _shared_digits(comm, dtype)
    settings = (digits, batch, learning_rate, momentum, seed)
    with _one_thread():
        learner = _together(comm, hidden, dtype, algorithm, settings)
        with progress(comm.rank, epochs, console) as report:
            seconds = learner.run(epochs, report)
        alone = Learner(make_model(hidden, seed, dtype), *settings)
        alone_seconds = _one_process(comm, alone, epochs) if reference else 0.0
    times = comm.allreduce(np.array([seconds, learner.sync_seconds, alone_seconds]), op="max")
    parameters = learner.model.parameters()
    gradients = np.concatenate([p.grad.ravel() for p in parameters]).astype(np.float32)
    losses, accuracies = comm.broadcast_object((alone.losses, alone.accuracies), root=0)
    return DemoResult(
        ranks=comm.size,
        train_samples=len(digits.train_labels),
        test_samples=len(digits.test_labels),
        layers=(64, *hidden, 10),
        parameters=gradients.size,
        epochs=epochs,
        steps=epochs * math.ceil(len(digits.train_labels) / batch),
        batch=batch,
        dtype=dtype,
        losses=tuple(learner.losses),
        accuracies=tuple(learner.accuracies),
        reference_losses=tuple(losses),
        reference_accuracies=tuple(accuracies),
        fingerprints=tuple(comm.allgather_object(fingerprint(learner.model))),
        gradients=gradients,
        seconds=float(times[0]),
        sync_seconds=float(times[1]),
        reference_seconds=float(times[2]),
    )


def _shared_digits(comm: Any, dtype: str) -> Digits:
    """Load the data on rank 0 for all.

    Importing scikit-learn takes seconds where ranks share cores; and if it is missing, all say so.
    """
    loaded: Digits | str = ""
    if comm.rank == 0:
        try:
            loaded = load_digits(dtype)
        except Unsupported as error:
            loaded = str(error)
    loaded = comm.broadcast_object(loaded, root=0)
    if isinstance(loaded, str):
        raise Unsupported(f"rank {comm.rank}: {loaded}")
    return loaded


def _together(
    comm: Any,
    hidden: tuple[int, ...],
    dtype: str,
    algorithm: str,
    settings: tuple[Digits, int, float, float, int],
) -> Learner:
    """Give this rank's learner: weights of its own, replaced by those of rank 0."""
    model = make_model(hidden, settings[-1] + comm.rank, dtype)
    ddp = DDP(model, comm, BUCKET_BYTES, FIRST_BUCKET_BYTES, algorithm)
    ddp.broadcast_parameters(0)
    sync = ddp.overlapped_sync_gradients
    return Learner(ddp, *settings, comm.rank, comm.size, sync, comm.allreduce)


def _one_process(comm: Any, alone: Learner, epochs: int) -> float:
    """Train on rank 0 alone; the others wait epoch by epoch, so the deadline is for one epoch."""
    if comm.rank == 0:
        return alone.run(epochs, lambda done, loss, accuracy: comm.barrier())
    for _ in range(epochs):
        comm.barrier()
    return 0.0


def _check(rank: int, **values: Any) -> None:
    """Refuse what cannot be trained with."""

    def refuse(name: str, allowed: str) -> None:
        raise InvalidArgument(f"rank {rank}: {name}={values[name]!r}: allowed are {allowed}")

    for name in ("epochs", "batch"):
        if not isinstance(values[name], int) or values[name] < 1:
            refuse(name, "whole numbers > 0")
    if not all(isinstance(n, int) and n > 0 for n in values["hidden"]):
        refuse("hidden", "tuples of whole numbers > 0")
    if values["dtype"] not in LOSS_TOLERANCE:
        refuse("dtype", " and ".join(LOSS_TOLERANCE))


def _one_thread() -> Any:
    """Keep the linear algebra of every rank on one core: the ranks share the machine."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # it comes with scikit-learn
        return nullcontext()
    return threadpool_limits(1)
