"""mpidist: collectives, DDP and pipelines for people who launch with MPI."""

from typing import TYPE_CHECKING, Any

from . import algorithms  # registers the shipped algorithms
from .backends.simulated import Faults, SimulatedBackend
from .checkpoint.checkpoint import Checkpoint
from .communicator.communicator import Communicator
from .communicator.launch import get_communicator, init
from .communicator.simulation import run_simulated
from .data import shard
from .engine.messages import PostedMessage
from .engine.work import Work
from .errors import (
    CheckpointError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorBroken,
    ConfigError,
    InvalidArgument,
    InvalidRank,
    LaunchError,
    MpidistError,
    ReplicasDiffer,
    ScheduleError,
    Unsupported,
    UnsupportedDtype,
)
from .operations import Op
from .parallel import DDP, ZeroOptimizer
from .pipeline import Pipeline, partition
from .selection.config import CollectiveConfig
from .stop import StopRequest
from .topology import Grid

if TYPE_CHECKING:
    from .launcher.function import run

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CollectiveConfig",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorBroken",
    "ConfigError",
    "DDP",
    "Faults",
    "Grid",
    "InvalidArgument",
    "InvalidRank",
    "LaunchError",
    "MpidistError",
    "Op",
    "Pipeline",
    "PostedMessage",
    "ReplicasDiffer",
    "ScheduleError",
    "SimulatedBackend",
    "StopRequest",
    "Unsupported",
    "UnsupportedDtype",
    "Work",
    "ZeroOptimizer",
    "get_communicator",
    "init",
    "partition",
    "run",
    "run_simulated",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name == "run":  # the launcher is imported by those who launch
        from .launcher.function import run

        return run
    raise AttributeError(f"module 'mpidist' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    """Return the public names and the modules meant for users, without the internal subpackages."""
    modules = ("errors", "nn", "operations", "schedule", "testing", "topology", "torch")
    return sorted([*__all__, *modules, "__version__", "__doc__"])
