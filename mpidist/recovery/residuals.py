"""What a communication hook has left out of the gradients so far, as an object of a State."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

from ..parallel.ddp import DDP

PREFIX = "what the hook leaves out of DDP "
"""The names of these objects begin so; the number of the DDP follows."""


def has_some(ddp: DDP) -> bool:
    """Return whether a DDP has a hook with a state, which is another one on each rank."""
    return getattr(ddp.reducer.hook, "save", None) is not None


class Residuals:
    """The state of a DDP's hook, which the DDP keeps alive, and not this."""

    def __init__(self, ddp: DDP):
        self._ddp = ref(ddp)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for each bucket; of none once the DDP is gone."""
        ddp = self._ddp()
        hook: Any = None if ddp is None else ddp.reducer.hook
        return {"buckets": [] if ddp is None else hook.save(ddp.buckets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`, of the same buckets."""
        ddp, saved = self._ddp(), state["buckets"]
        if ddp is not None and saved:
            hook: Any = ddp.reducer.hook
            hook.restore(ddp.buckets, saved)
