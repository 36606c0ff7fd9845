"""mpidist: collectives, DDP and pipelines for people who launch with MPI."""

from . import algorithms  # registers the shipped algorithms
from .backends.simulated import Faults, SimulatedBackend
from .communicator import Communicator
from .config import CollectiveConfig
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
from .launch import get_communicator, init
from .operations import Op
from .parallel import (
    DDP,
    Checkpoint,
    Pipeline,
    StopRequest,
    ZeroOptimizer,
    partition,
    shard,
)
from .simulation import run_simulated
from .topology import Grid
from .work import Work

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
    "run_simulated",
    "shard",
]
