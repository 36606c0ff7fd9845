"""A longer default deadline for training: some ranks wait while others validate or compile."""

from __future__ import annotations

from ..communicator.communicator import Communicator
from ..selection.config import CollectiveConfig

TRAINING_SECONDS = 1800.0  # as PyTorch's


def allow_for_training(comm: Communicator) -> None:
    """Set the deadline of a communicator to 30 minutes, unless the user has set one.

    Communicators that are later split off from it have the same deadline.
    """
    if "timeout" not in comm.config.given and comm.timeout == CollectiveConfig().timeout:
        comm.timeout = TRAINING_SECONDS
