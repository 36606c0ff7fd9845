"""The base class of executors for arrays on a GPU."""

from __future__ import annotations

from ..backends.executor import Executor
from ..calls.call import Call

LIBRARIES = ("auto", "native")  # algorithms by which a call may go to NCCL, or to the MPI library


class GpuExecutor(Executor):
    """One way to serve calls whose arrays are on a GPU.

    The names are those of :data:`~mpidist.gpu.paths.ORDER`.  Programs are bound for one run, as the
    arrays' streams may be others the next time.
    """

    ready = False  # asked before every call

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether a call goes by this path, unless :meth:`why_not` has a reason."""
        raise NotImplementedError
