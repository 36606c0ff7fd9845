"""The base class of executors for arrays on a GPU."""

from __future__ import annotations

from ..backends.executor import Executor
from ..calls.call import Call

LIBRARIES = ("auto", "native")  # algorithms by which a call may go to NCCL, or to the MPI library


class GpuExecutor(Executor):
    """An executor of calls with arrays on a GPU.

    Its name is one of :data:`~mpidist.gpu.paths.ORDER`.  Programs are bound for one run, as the
    arrays' streams may be others the next time.
    """

    ready = False  # checked before every call

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether a call takes this path, unless :meth:`why_not` has a reason."""
        raise NotImplementedError
