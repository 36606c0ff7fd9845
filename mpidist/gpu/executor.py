"""The base class of executors for arrays on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..calls.call import Call
from ..engine.work import Work

LIBRARIES = ("auto", "native")  # algorithms by which a call may go to NCCL, or to the MPI library


@dataclass(slots=True)
class GpuProgram:
    """A call that an executor is ready to serve.

    Attributes
    ----------
    run : callable
        Serves it, blocking: its result is on the stream of its arrays.
    start : callable
        ``start(result)`` begins it in the background; the Work gives `result`.
    """

    run: Callable[[], object]
    start: Callable[[Any], Work] | None = None


class GpuExecutor:
    """One way to serve calls whose arrays are on a GPU.

    Attributes
    ----------
    name : str
        Of the path, see :data:`~mpidist.gpu.paths.ORDER`.
    meets : bool
        Whether all ranks meet before a blocking call is run.
    """

    name: str
    meets = True

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether a call goes by this path, unless :meth:`why_not` has a reason."""
        raise NotImplementedError

    def why_not(self, call: Call) -> str | None:
        """Return why this path cannot serve a call, the same on every rank, or None."""

    def make_ready(self) -> None:
        """Make what the path needs; collective, before each call that it serves."""

    def agreed(self, call: Call, algorithm: str) -> str:
        """Return what else must be equal on all ranks that meet, in words."""
        raise NotImplementedError

    def bind(self, call: Call, algorithm: str) -> GpuProgram:
        """Return the program of a call; what comes before the ranks meet has been done."""
        raise NotImplementedError
