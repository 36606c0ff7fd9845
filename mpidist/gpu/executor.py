"""The base class of executors for arrays on a GPU."""

from __future__ import annotations

from ..backends.executor import Executor
from ..calls.call import Call

LIBRARIES = ("auto", "native")  # algorithms that allow NCCL's or the MPI library's collectives


class GpuExecutor(Executor):
    """Base class of executors of calls with arrays on a GPU.

    The attribute `name` is a key of :data:`~mpidist.gpu.executors.ORDER`.  Each call goes
    through :meth:`bind`, because the next may use other streams.
    """

    ready = False  # checked before every call

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether it is meant for a call; :meth:`why_not` may still reject it."""
        raise NotImplementedError
