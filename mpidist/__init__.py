"""mpidist: collectives, DDP and pipelines for people who launch with MPI."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import algorithms  # registers the shipped algorithms, before anybody looks one up
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
    RankFailed,
    ReplicasDiffer,
    ScheduleError,
    Unsupported,
    UnsupportedDtype,
)
from .selection import names as _names  # reserves the executors' names, before anybody takes one

if TYPE_CHECKING:
    from .backends.simulated import Faults, SimulatedBackend
    from .checkpoint.checkpoint import Checkpoint
    from .communicator.communicator import Communicator
    from .communicator.launch import get_communicator, init
    from .communicator.simulation import run_simulated
    from .data import shard
    from .engine.posted import PostedMessage
    from .engine.work import Work
    from .launcher.function import run
    from .operations import Op
    from .parallel import DDP, ZeroOptimizer
    from .pipeline.partitioning import partition
    from .pipeline.pipeline import Pipeline
    from .recovery.run import elastic
    from .recovery.state import State
    from .selection.config import CollectiveConfig
    from .stop import StopRequest
    from .topology import Grid

__version__ = "0.1.0"

# Each room is imported when one of its names is used first (PEP 562): commands, and programs that
# only prove or draw, start in half the time.  The imports above tell type checkers the same.
_LAZY = {
    "Checkpoint": "checkpoint.checkpoint",
    "CollectiveConfig": "selection.config",
    "Communicator": "communicator.communicator",
    "DDP": "parallel",
    "Faults": "backends.simulated",
    "Grid": "topology",
    "Op": "operations",
    "Pipeline": "pipeline.pipeline",
    "PostedMessage": "engine.posted",
    "SimulatedBackend": "backends.simulated",
    "State": "recovery.state",
    "StopRequest": "stop",
    "Work": "engine.work",
    "ZeroOptimizer": "parallel",
    "elastic": "recovery.run",
    "get_communicator": "communicator.launch",
    "init": "communicator.launch",
    "partition": "pipeline.partitioning",
    "run": "launcher.function",
    "run_simulated": "communicator.simulation",
    "shard": "data",
}
# `mpidist.NAME` is one of these after `import mpidist` alone; those meant for users first.
_MODULES = ("nn", "operations", "testing", "topology", "torch")
_ROOMS = (
    *("backends", "calls", "checkpoint", "communicator", "data", "device", "engine", "frameworks"),
    *("gpu", "interchange", "parallel", "pipeline", "selection", "shared_memory", "stop", "trace"),
)

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
    "RankFailed",
    "ReplicasDiffer",
    "ScheduleError",
    "SimulatedBackend",
    "State",
    "StopRequest",
    "Unsupported",
    "UnsupportedDtype",
    "Work",
    "ZeroOptimizer",
    "elastic",
    "get_communicator",
    "init",
    "partition",
    "run",
    "run_simulated",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    missing = f"module 'mpidist' has no attribute {name!r}"
    if name in _MODULES or name in _ROOMS:
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith(__name__):
                raise
            missing = f"mpidist.{name} needs {error.name}: pip install {error.name}"
    raise AttributeError(missing, name=name)


def __dir__() -> list[str]:
    """Return the public names and the modules meant for users, without the internal subpackages."""
    return sorted([*__all__, *_MODULES, "errors", "schedule", "__version__", "__doc__"])
