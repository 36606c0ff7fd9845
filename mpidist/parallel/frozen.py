"""Parameters that begin or cease to be learnt after the wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvalidArgument


class Frozen:
    """Which parameters are learnt, as it was at the wrapping.

    One that is learnt later would get each rank's own gradient, and one that is no longer would
    be given zeros, with which an optimizer's momentum and weight decay still move it.

    Parameters
    ----------
    module : object
        Whose parameters.
    named : sequence of (str, parameter)
        Those that are averaged.
    """

    def __init__(self, module: Any, named: Sequence[tuple[str, Any]]):
        learnt = {id(p) for _, p in named}
        self._learnt = [(name, p) for name, p in named if hasattr(p, "requires_grad")]
        names = getattr(module, "named_parameters", lambda: enumerate(module.parameters()))
        self._others = [(str(name), p) for name, p in names() if id(p) not in learnt]

    def check(self, rank: int) -> None:
        """Compare with what is now.

        Raises
        ------
        InvalidArgument
            If it is not the same; the message names the parameters.
        """
        changed = [name for name, p in self._learnt if not p.requires_grad]
        changed += [name for name, p in self._others if getattr(p, "requires_grad", False)]
        if changed:
            raise InvalidArgument(
                f"rank {rank}: requires_grad of {', '.join(changed)} is not what it was when the "
                "module was wrapped; close() this DDP and make another one"
            )
