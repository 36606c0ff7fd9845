"""The names of the shipped executors, by which calls and rules choose them.

The package imports this module, not the executors: no algorithm can take these names before.
"""

from ..schedule.registry import reserve

NATIVE, SYMMETRIC, STAGED, SINGLE_COPY = "native", "symmetric", "staged", "single_copy"
IPC, IPC_SLOTS, NCCL, MPI = "ipc", "ipc_slots", "nccl", "mpi"

reserve((NATIVE, SYMMETRIC, STAGED, SINGLE_COPY))
reserve((IPC, IPC_SLOTS, NCCL, MPI), on_host=False)
