"""What a process of a check records: imprints of tensors, step by step, in a file of its own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PHASES = ("start", "batch", "forward", "gradients", "parameters", "optimizer", "buffers")
"""What is compared of a step, in this order; "start" has the parameters before the first step."""

NOBODY = -1  # the group of samples of the reference that no rank has


@dataclass
class Part:
    """The sketch of some rows or elements of a tensor: see :mod:`mpidist.oracle.sketch`."""

    sums: np.ndarray
    squares: float
    rows: int = 0  # of a batch
    value: float | None = None  # of a scalar

    def __add__(self, other: Part) -> Part:
        value = None if None in (self.value, other.value) else self.value + other.value  # type: ignore[operator]
        return Part(
            self.sums + other.sums, self.squares + other.squares, self.rows + other.rows, value
        )


@dataclass
class Imprint:
    """A tensor of a step as it is compared.

    `how` it is divided among the ranks decides which parts belong together: "whole" is the same on
    all ranks, "rows" has the samples of each, "part" the elements of a shard, and "loss" is a value
    of each rank's batch.
    """

    name: str
    how: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    layout: str = ""  # of "rows": where the samples are
    # By the rank whose rows these are; of a tensor that is not divided into rows, by this rank.
    parts: dict[int, Part] = field(default_factory=dict)
    hash: int | None = None  # of the bits: before the first step, and where they shall be equal
    kind: str = ""  # class of the module whose output it is
    trait: str = ""  # "batch statistics" or "dropout", of that module

    def add(self, other: Imprint) -> None:
        """Add the parts of another microbatch of the same step."""
        for rank, part in other.parts.items():
            self.parts[rank] = self.parts[rank] + part if rank in self.parts else part
        if other.layout != self.layout or other.dtype != self.dtype:
            self.layout = "unlike"


@dataclass
class Step:
    """One step of an optimizer, on one process."""

    number: int
    tensors: dict[str, dict[str, Imprint]] = field(default_factory=dict)  # by phase and name
    ids: list[np.ndarray] = field(default_factory=list)  # of the samples, one array per forward
    # Of a pipeline, on the rank of its last stage: ids of the samples with their targets.
    pairs: list[np.ndarray] = field(default_factory=list)
    batches: int = 0  # that a pipeline has run
    local: dict[str, Imprint] = field(default_factory=dict)  # gradients before they are averaged
    random: bool = False  # whether forward drew random numbers
    stepped: bool = False  # whether the optimizer's step has ended
    sites: dict[str, str] = field(default_factory=dict)  # file and line of "backward" and "step"

    def put(self, phase: str, imprint: Imprint) -> None:
        """Record a tensor; if it has been recorded in this step, add its parts."""
        known = self.tensors.setdefault(phase, {})
        if imprint.name in known:
            known[imprint.name].add(imprint)
        else:
            known[imprint.name] = imprint

    @property
    def samples(self) -> np.ndarray:
        """The ids of all samples of the step."""
        return np.concatenate([np.empty(0, np.uint64), *self.ids])


@dataclass
class Log:
    """The record of one process of a check."""

    rank: int
    steps: list[Step] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def step(self, number: int) -> Step | None:
        """Return a step by its number, from 1; None if this process did not come so far."""
        return next((step for step in self.steps if step.number == number), None)

    def has(self, phase: str, name: str) -> bool:
        """Return whether any step has a tensor."""
        return any(name in step.tensors.get(phase, {}) for step in self.steps)


class Writer:
    """Writes the log of a process, so that what was recorded outlives its end."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"log-{rank}"
        self._file = open(self.path, "wb")  # noqa: SIM115  (to the end of the process)
        self._facts: dict[str, Any] = {}

    def facts(self, **facts: Any) -> None:
        """Record facts that are none of a step."""
        if any(self._facts.get(name) != value for name, value in facts.items()):
            self._facts.update(facts)
            self._write(facts)

    def step(self, step: Step) -> None:
        """Record a step."""
        self._write(step)

    def _write(self, item: Any) -> None:
        pickle.dump(item, self._file)
        self._file.flush()


def _items(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # killed while it wrote
                return


def read_logs(folder: Path) -> dict[int, Log]:
    """Return the logs in a folder of this check, by rank."""
    found = {}
    for path in folder.glob("log-*"):
        log = found[int(path.name[4:])] = Log(int(path.name[4:]))
        for item in _items(path):
            if isinstance(item, Step):
                log.steps = [step for step in log.steps if step.number != item.number] + [item]
            else:
                log.facts.update(item)
    return dict(sorted(found.items()))
