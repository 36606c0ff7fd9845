"""Every allreduce compared on the gradients of the trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..bench import Results, Settings, run_benchmark, steps
from ..bench.cases import BARE
from ..communicator.communicator import Communicator

NATIVE = (BARE, "native")  # MPI promises no equal bits on all ranks: reported, not checked


def _settings(gradients: np.ndarray, algorithms: Sequence[str] | None, budget: float) -> Settings:
    sizes = [gradients.nbytes]
    return Settings(sizes=sizes, algorithms=algorithms, budget=budget, data=gradients, bits=True)


def comparison_steps(gradients: np.ndarray, algorithms: Sequence[str] | None, budget: float) -> int:
    """Return how often :func:`compare` will call `on_step`, for a progress bar."""
    return steps(["allreduce"], _settings(gradients, algorithms, budget))


def compare(
    comm: Communicator,
    gradients: np.ndarray,
    algorithms: Sequence[str] | None,
    budget: float,
    on_step: Callable[[str, int], None] = lambda collective, nbytes: None,
) -> Results:
    """Measure every allreduce on gradients, and check results and bits; collective.

    `gradients` are float32, the same on every rank; each rank contributes them shifted by 7
    elements per rank and 1 per call.  By default all `algorithms` are measured, in `budget`
    seconds; ``on_step(collective, bytes)`` is called before each part of the measurement.
    """
    settings = _settings(gradients, algorithms, budget)
    return run_benchmark(comm, ["allreduce"], settings, on_step, stream=False)


def same_bits(results: Results) -> bool:
    """Return whether every candidate but the MPI library gave all ranks the same bits."""
    return all(same for name, same in results.identical.items() if name not in NATIVE)
