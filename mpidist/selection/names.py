"""The names of the shipped executors, by which calls and rules choose them.

The package imports this module, not the executors: no algorithm can take these names before.
"""

from ..schedule.registry import reserve

NATIVE, SYMMETRIC, STAGED, SINGLE_COPY = "native", "symmetric", "staged", "single_copy"
IPC, NCCL, MPI = "ipc", "nccl", "mpi"

reserve((NATIVE, SYMMETRIC, STAGED, SINGLE_COPY))
reserve((IPC, NCCL, MPI), on_host=False)
