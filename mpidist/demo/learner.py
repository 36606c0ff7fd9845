"""One replica in training, alone or together with others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ..nn import SGD, CrossEntropy, Linear, Module, ReLU, Sequential
from ..schedule import blocks
from .digits import Digits
from .progress import Report

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
