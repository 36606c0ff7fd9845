"""The main job: data-parallel training, and the same training in one process."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from ..parallel import DDP
from .digits import Digits, load_digits
from .learner import Learner, fingerprint, make_model
from .progress import progress
from .result import LOSS_TOLERANCE, DemoResult

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
