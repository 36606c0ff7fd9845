"""Parameters that begin or cease to be learnt, or are replaced, after the wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvalidArgument
from .framework import Framework


class Frozen:
    """Which parameters are learnt, as it was at the wrapping.

    One that is learnt later would get each rank's own gradient, and one that is no longer would
    be given zeros, with which an optimizer's momentum and weight decay still move it.

    Nor would anything be sent of one that is put in the place of another, such as those of a new
    last layer, or of ``load_state_dict(assign=True)``.

    Parameters
    ----------
    framework : Framework
        Of the module.
    module : object
        Whose parameters.
    named : sequence of (str, parameter)
        Those that are averaged.

    Attributes
    ----------
    others : list of (str, parameter)
        The module's other parameters, which are not learnt.
    """

    def __init__(self, framework: Framework, module: Any, named: Sequence[tuple[str, Any]]):
        learnt = {id(p) for _, p in named}
        self._framework, self._module, self._ids = framework, module, learnt
        self._learnt = [(name, p) for name, p in named if hasattr(p, "requires_grad")]
        names = getattr(module, "named_parameters", lambda: enumerate(module.parameters()))
        self.others = [(str(name), p) for name, p in names() if id(p) not in learnt]
        self._note()

    def _note(self) -> None:
        """Note what is where, and keep it: an id is then nobody else's."""
        self._places = self._framework.places(self._module)
        self._kept = [list(place.values()) for place in self._places]
        self._there = [list(map(id, kept)) for kept in self._kept]

    def check(self, rank: int) -> None:
        """Compare with what is now.

        Raises
        ------
        InvalidArgument
            If it is not the same; the message names the parameters.
        """
        if [list(map(id, place.values())) for place in self._places] != self._there:
            self._compare(rank)
        changed = [name for name, p in self._learnt if not p.requires_grad]
        changed += [name for name, p in self.others if getattr(p, "requires_grad", False)]
        if changed:
            raise InvalidArgument(
                f"rank {rank}: requires_grad of {', '.join(changed)} is not what it was when the "
                "module was wrapped; close() this DDP and make another one"
            )

    def _compare(self, rank: int) -> None:
        """Raise if parameters were replaced; other changes of a module do not matter."""
        now = self._framework.parameters(self._module)
        new = [name for name, p in now if id(p) not in self._ids]
        lost = len(self._ids) - (len(now) - len(new))
        if new or lost:
            raise InvalidArgument(
                f"rank {rank}: since the module was wrapped {', '.join(new) or 'no parameter'} "
                f"came to it and {lost} went, as load_state_dict(assign=True) and new layers do; "
                "close() this DDP and make another one"
            )
        self._note()
