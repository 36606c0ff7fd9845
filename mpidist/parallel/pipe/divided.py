"""Layers in a row divided into parts, and how even those are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Partition(Sequence):
    """Stages, in order, and how even they are.

    Attributes
    ----------
    by : str
        What `costs` are: numbers of parameters, or seconds of forward and backward.
    costs : tuple of float
        Of the stages.
    layers : tuple of (int, int)
        The first layer of each, and the one after its last.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        by: str,
        costs: Sequence[float],
        layers: Sequence[tuple[int, int]],
    ):
        self._stages, self.by = list(stages), by
        self.costs, self.layers = tuple(costs), tuple(layers)

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, k: Any) -> Any:
        return self._stages[k]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stages)

    @property
    def balance(self) -> float:
        """The mean cost of a stage by the largest: 1 if all are equal."""
        most = max(self.costs)
        return sum(self.costs) / len(self.costs) / most if most else 1.0

    def __str__(self) -> str:
        lines = []
        for k, ((start, stop), cost) in enumerate(zip(self.layers, self.costs)):
            layers = f"layers {start} … {stop - 1}" if stop - start > 1 else f"layer {start}"
            words = f"{cost:,.0f} parameters" if self.by == "parameters" else f"{1e3 * cost:.4g} ms"
            lines.append(f"stage {k}: {layers}, {words}")
        return "\n".join([*lines, f"balance {self.balance:.2f} (mean / largest)"])


def divide(costs: Sequence[float], parts: int) -> list[int]:
    """Give where each part ends so that the largest sum is smallest; every part has an entry.

    By dynamic programming over the last cut: exact, in O(parts · n²).
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    count = len(costs)
    best = [math.inf if k else 0.0 for k in range(count + 1)]  # of no part
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        now, cut = [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                value = max(best[start], float(sums[stop] - sums[start]))
                if value < now[stop]:
                    now[stop], cut[stop] = value, start
        best = now
        cuts.append(cut)
    ends, stop = [count], count
    for cut in reversed(cuts[1:]):
        stop = cut[stop]
        ends.append(stop)
    return ends[::-1]
