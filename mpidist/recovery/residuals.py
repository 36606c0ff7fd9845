"""What a communication hook has left out of the gradients so far, which each rank alone has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import ref

from ..parallel.ddp import DDP

log = logging.getLogger("mpidist")


def leaves_out(hook: Any) -> bool:
    """Return whether a hook has a state that can be saved and restored, and uses it."""
    if not all(callable(getattr(hook, name, None)) for name in ("save", "restore")):
        return False
    return bool(getattr(hook, "feedback", True))


class Residuals:
    """The state of a DDP's hook; this does not keep the DDP alive."""

    def __init__(self, ddp: DDP):
        self._ddp = ref(ddp)

    def state(self) -> dict[str, Any] | None:
        """Return this rank's state for each bucket, and what these are; None once the DDP is gone.

        The buckets are told by the names of their parameters, and their lengths.
        """
        ddp = self._ddp()
        if ddp is None:
            return None
        hook: Any = ddp.reducer.hook
        return {"are": _described(ddp), "buckets": hook.save(ddp.buckets)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`; of other buckets the hook begins anew."""
        ddp = self._ddp()
        if ddp is None:
            return
        hook: Any = ddp.reducer.hook
        if state["are"] == _described(ddp):
            hook.restore(ddp.buckets, state["buckets"])
        elif ddp.comm.rank == 0:
            log.warning(
                "what the hook of a DDP has left out so far is lost, as it has other buckets now"
            )


def _described(ddp: DDP) -> list[list[Any]]:
    return [[*bucket.names, bucket.flat.size] for bucket in ddp.buckets]
