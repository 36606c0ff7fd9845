"""Data-parallel training of a digit classifier, and the same training in one process."""

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

from ..arguments import whole
from ..bench.progress import draw_progress
from ..communicator.agreement import from_rank_0
from ..communicator.communicator import Communicator
from ..errors import InvalidArgument, Unsupported
from ..nn import SGD, CrossEntropy, Linear, Module, ReLU, Sequential
from ..parallel import DDP
from ..schedule import blocks
from .digits import Digits, load_digits
from .result import LOSS_TOLERANCE, DemoResult

Sum = Callable[[np.ndarray], np.ndarray]


@dataclass
class Replica:
    """One replica of the model in training.

    With the defaults of `rank`, `size`, `sync` and `total` it trains in one process.
    """

    model: Any  # a Module, or the DDP around it
    digits: Digits
    batch: int  # samples in a global batch
    learning_rate: float
    momentum: float
    seed: int  # of the order of the samples
    rank: int = 0
    size: int = 1  # number of all replicas
    sync: Callable[[], None] = lambda: None  # averages the gradients over the replicas
    total: Sum = lambda values: values  # returns the sum of the replicas' arrays
    sync_seconds: float = 0.0  # spent in `sync`
    # mean training loss of each epoch, over all replicas
    losses: list[float] = field(default_factory=list)
    # test accuracy after each epoch, over all replicas
    accuracies: list[float] = field(default_factory=list)

    def run(self, epochs: int, report: Report = lambda done, loss, accuracy: None) -> float:
        """Train; return the seconds.  ``report(done, loss, accuracy)`` runs after each epoch."""
        began = perf_counter()
        optimizer = SGD(self.model.parameters(), self.learning_rate, self.momentum)
        random = np.random.default_rng(self.seed)  # the same on every rank: so are the batches
        for epoch in range(epochs):
            order = random.permutation(len(self.digits.train_labels))
            loss = sum(self._step(samples, optimizer) for samples in self._batches(order))
            sums = self.total(np.array([loss, self._recognised()]))
            self.losses.append(float(sums[0]) / len(order))
            self.accuracies.append(float(sums[1]) / len(self.digits.test_labels))
            report(epoch + 1, self.losses[-1], self.accuracies[-1])
        return perf_counter() - began

    def _batches(self, order: np.ndarray) -> Iterator[np.ndarray]:
        return (order[i : i + self.batch] for i in range(0, len(order), self.batch))

    def _step(self, samples: np.ndarray, optimizer: SGD) -> float:
        """Train on this rank's part of a global batch; return the sum of the losses of its samples.

        `samples` are the indices of the global batch.
        """
        part = samples[blocks(len(samples), self.size)[self.rank]]
        criterion = CrossEntropy("sum")
        scores = self.model(self.digits.train_images[part])
        loss = criterion(scores, self.digits.train_labels[part])
        self.model.zero_grad()
        # Parts may differ in size, so each rank divides its sum by the size of the whole batch.
        # The mean over the ranks divides by their number again: multiply by it.
        self.model.backward(criterion.backward(self.size / len(samples)))
        began = perf_counter()
        self.sync()
        self.sync_seconds += perf_counter() - began
        optimizer.step()
        return loss

    def _recognised(self) -> int:
        """Return how many test samples of this rank's part the model classifies correctly."""
        part = blocks(len(self.digits.test_labels), self.size)[self.rank]
        guesses = self.model(self.digits.test_images[part]).argmax(axis=1)
        return int((guesses == self.digits.test_labels[part]).sum())


def make_model(hidden: tuple[int, ...], seed: int, dtype: Any) -> Module:
    """Build the network: linear layers with ReLU between them, 64 inputs and 10 outputs."""
    random = np.random.default_rng(seed)
    sizes = (64, *hidden, 10)
    layers: list[Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [Linear(inputs, outputs, seed=random, dtype=dtype), ReLU()]
    return Sequential(*layers[:-1])


def fingerprint(model: Any) -> str:
    """Return the SHA-256 of the bits of all parameters, as hexadecimal text."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(np.ascontiguousarray(p.data).tobytes())
    return digest.hexdigest()


log = logging.getLogger("mpidist.demo")
Report = Callable[[int, float, float], None]


@contextmanager
def progress(rank: int, epochs: int, console: Console | None = None) -> Iterator[Report]:
    """Show the progress of training on rank 0: a bar on a terminal, otherwise lines in the log.

    Yield what is to be called after each epoch with (epochs done, loss, accuracy).  It draws on
    `console`, by default standard error.
    """
    console = console or Console(stderr=True)
    if rank != 0:
        yield lambda done, loss, accuracy: None
    elif not console.is_terminal:
        yield lambda done, loss, accuracy: log.info(
            "epoch %d/%d: loss %.4f, test accuracy %.2f %%", done, epochs, loss, 100 * accuracy
        )
    else:
        with draw_progress(console, "training", epochs, keep=True) as advance:
            yield lambda done, loss, accuracy: advance(
                f"training: loss {loss:.4f}, test accuracy {accuracy:.2%}", done
            )


BUCKET_BYTES, FIRST_BUCKET_BYTES = 256 << 10, 64 << 10


def train(
    comm: Communicator,
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
    """Train a classifier of handwritten digits on all ranks, and check the result; collective.

    Every rank starts with different weights and takes those of rank 0.  Each global batch is cut
    into one part per rank, as evenly as possible; gradients are averaged over the batch, by
    `algorithm`.  Then, unless `reference` is False, rank 0 alone repeats the training on the same
    global batches.  In float64 the losses are those of one process but for rounding.  Rank 0 draws
    a progress bar on `console`, by default standard error; if that is no terminal, the logger
    ``mpidist.demo`` gets a line for each epoch.

    InvalidArgument if epochs, batch, hidden or dtype has a wrong value; Unsupported if scikit-learn
    is not installed.
    """
    _check(comm.rank, epochs=epochs, batch=batch, hidden=hidden, dtype=dtype)
    digits = _shared_digits(comm, dtype)
    settings = (digits, batch, learning_rate, momentum, seed)
    with _one_thread():
        replica = _parallel_replica(comm, hidden, dtype, algorithm, settings)
        with progress(comm.rank, epochs, console) as report:
            seconds = replica.run(epochs, report)
        alone = Replica(make_model(hidden, seed, dtype), *settings)
        alone_seconds = _one_process(comm, alone, epochs) if reference else 0.0
    times = comm.allreduce(np.array([seconds, replica.sync_seconds, alone_seconds]), op="max")
    parameters = replica.model.parameters()
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
        losses=tuple(replica.losses),
        accuracies=tuple(replica.accuracies),
        reference_losses=tuple(losses),
        reference_accuracies=tuple(accuracies),
        fingerprints=tuple(comm.allgather_object(fingerprint(replica.model))),
        gradients=gradients,
        seconds=float(times[0]),
        sync_seconds=float(times[1]),
        reference_seconds=float(times[2]),
    )


def _shared_digits(comm: Communicator, dtype: str) -> Digits:
    """Return the data on every rank, loaded on rank 0 only; raise its error on every rank.

    Importing scikit-learn takes seconds if many ranks do it on shared cores.
    """

    def load() -> Digits:
        try:
            return load_digits(dtype)
        except Unsupported as error:
            raise Unsupported(f"rank 0: {error}") from error

    return from_rank_0(comm, load, "load_digits()", Unsupported)


def _parallel_replica(
    comm: Communicator,
    hidden: tuple[int, ...],
    dtype: str,
    algorithm: str,
    settings: tuple[Digits, int, float, float, int],
) -> Replica:
    """Return this rank's replica, with the weights of rank 0.

    `settings` are the digits, batch, learning rate, momentum and seed, as in :class:`Replica`.
    """
    model = make_model(hidden, settings[-1] + comm.rank, dtype)
    # "manual" for the time of the averaging alone
    ddp = DDP(model, comm, BUCKET_BYTES, FIRST_BUCKET_BYTES, algorithm, sync="manual")
    ddp.broadcast_parameters(0)
    sync = ddp.overlapped_sync_gradients
    return Replica(ddp, *settings, comm.rank, comm.size, sync, comm.allreduce)


def _one_process(comm: Communicator, alone: Replica, epochs: int) -> float:
    """Train on rank 0 alone, as the reference; return the seconds, on other ranks 0; collective.

    All ranks meet at a barrier after each epoch, so that the deadline is for one epoch only.
    """
    if comm.rank == 0:
        return alone.run(epochs, lambda done, loss, accuracy: comm.barrier())
    for _ in range(epochs):
        comm.barrier()
    return 0.0


def _check(rank: int, **values: Any) -> None:
    """Raise InvalidArgument if epochs, batch, hidden or dtype of :func:`train` is wrong."""

    def refuse(name: str, expected: str) -> None:
        raise InvalidArgument(f"rank {rank}: {name}={values[name]!r}: expected {expected}")

    for name in ("epochs", "batch"):
        whole(name, values[name], 1, f"rank {rank}: ")
    if not all(isinstance(n, int) and n > 0 for n in values["hidden"]):
        refuse("hidden", "a tuple of whole numbers >= 1")
    if values["dtype"] not in LOSS_TOLERANCE:
        refuse("dtype", " or ".join(LOSS_TOLERANCE))


def _one_thread() -> Any:
    """Return a context that limits numpy's linear algebra to one thread: ranks share the cores.

    Without threadpoolctl, it does nothing.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # which scikit-learn installs
        return nullcontext()
    return threadpool_limits(1)
