"""The base class of executors for arrays on a GPU."""

from __future__ import annotations

from ..backends.executor import Executor


class GpuExecutor(Executor):
    """Base class of executors of calls with arrays on a GPU.

    Each call goes through :meth:`bind`, because the next may use other streams.  `unavailable` is
    why it serves no call of the communicator; None if it serves some.
    """

    on_device = True

    def __init__(self, unavailable: str | None):
        self.unavailable = unavailable
