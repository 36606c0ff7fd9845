"""The result of the demo's training, with that of one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

LOSS_TOLERANCE = {"float32": 2e-3, "float64": 1e-9}


@dataclass(frozen=True)
class DemoResult:
    """The outcome of data-parallel training, the same on every rank; times in seconds."""

    ranks: int
    train_samples: int
    test_samples: int
    layers: tuple[int, ...]  # sizes, with input and output
    parameters: int
    epochs: int
    steps: int  # of all epochs together
    batch: int  # samples of a global batch
    dtype: str  # of all arrays
    losses: tuple[float, ...]  # mean training loss of each epoch
    accuracies: tuple[float, ...]  # test accuracy after each epoch, from 0 to 1
    # Of one process on the same global batches, as the accuracies below; empty without reference.
    reference_losses: tuple[float, ...]
    reference_accuracies: tuple[float, ...]
    fingerprints: tuple[str, ...]  # SHA-256 of all parameters, rank by rank
    # The averaged gradients of the last step, float32, all parameters one after another.
    gradients: np.ndarray = field(repr=False, compare=False)
    seconds: float = field(compare=False)  # wall time of the training, on its slowest rank
    sync_seconds: float = field(compare=False)  # of the averaging of gradients within it
    # of the training in one process; 0 without reference
    reference_seconds: float = field(compare=False)

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last epoch, from 0 to 1."""
        return self.accuracies[-1]

    @property
    def reference_accuracy(self) -> float | None:
        """Test accuracy of one process after the last epoch; None without reference."""
        return self.reference_accuracies[-1] if self.reference_accuracies else None

    @property
    def identical(self) -> bool:
        """Whether all ranks have bit-identical parameters."""
        return len(set(self.fingerprints)) == 1

    @property
    def max_loss_difference(self) -> float | None:
        """Largest difference of an epoch's loss from one process's; None without reference."""
        pairs = zip(self.losses, self.reference_losses, strict=False)
        return max((abs(a - b) for a, b in pairs), default=None)

    @property
    def loss_tolerance(self) -> float:
        """Largest accepted difference of an epoch's loss from that of one process.

        Ranks sum a batch's gradient in parts, one process sums it at once.  The sums differ in
        rounding, by a few units in the last place, and training carries the difference from step to
        step: in float64 up to 1e-15 (6 seeds, 2 … 7 ranks, 40 epochs); in float32 mostly 1e-7, but
        2e-4 if a tiny difference turned a ReLU on or off.  The tolerances (2e-3 and 1e-9) are
        above these, and below the error of a wrongly weighted mean of unequal parts (a test shows
        both).
        """
        return LOSS_TOLERANCE[self.dtype]

    @property
    def accuracy_tolerance(self) -> float:
        """Largest accepted difference of accuracy: one test sample in float32, none in float64."""
        return 1.5 / self.test_samples if self.dtype == "float32" else 0.0

    @property
    def matches(self) -> bool | None:
        """Whether losses and last accuracy match one process, within the tolerances.

        None without reference.
        """
        if self.max_loss_difference is None or self.reference_accuracy is None:
            return None
        close = self.max_loss_difference <= self.loss_tolerance
        return close and abs(self.accuracy - self.reference_accuracy) <= self.accuracy_tolerance

    @property
    def passed(self) -> bool:
        """Whether the replicas are identical and match one process, if there is a reference."""
        return self.identical and self.matches is not False
