"""The meaning of collectives: schedules, contracts, proofs, costs and pictures; no I/O, no MPI."""

from .contract import COLLECTIVES, Contract
from .machine import Proof
from .prove import prove
from .registry import Algorithm, Choice, algorithm, algorithms, find
from .rounds import (
    Copy,
    Fold,
    Get,
    Meet,
    Parallel,
    Put,
    Recv,
    Reduce,
    Send,
    blocks,
    on,
    parallel,
    segmented,
)

__all__ = [
    "COLLECTIVES",
    "Algorithm",
    "Choice",
    "Contract",
    "Copy",
    "Fold",
    "Get",
    "Meet",
    "Parallel",
    "Proof",
    "Put",
    "Recv",
    "Reduce",
    "Send",
    "algorithm",
    "algorithms",
    "blocks",
    "find",
    "on",
    "parallel",
    "prove",
    "segmented",
]
