"""Checks that ranks agree on their parameters, and that these stay the wrapped ones."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np

from ..errors import InvalidArgument
from ..frameworks.base import Framework

Named = Sequence[tuple[str, Any]]


def check_alike(
    comm: Any,
    what: str,
    framework: Framework,
    named: Named,
    arrays: Named,
    given: Mapping[str, Any],
    refused: str = "",
) -> None:
    """Raise InvalidArgument on every rank where arguments, parameters or buffers differ.

    Compared are names, shapes and dtypes, in order; the message says which is the first to differ.
    `refused` is what this rank alone has to say against it: all must hear it, or they would wait.
    """
    mine = [(name, tuple(p.data.shape), str(framework.kind(p))) for name, p in named]
    mine += [(name, tuple(array.shape), str(array.dtype)) for name, array in arrays]
    options = {name: repr(value) for name, value in given.items()}
    refusals, options_of, layouts = zip(*comm.allgather_object((refused, options, mine)))
    if any(refusals):
        raise InvalidArgument(refused or next(filter(None, refusals)))
    for rank, there in enumerate(options_of):
        for name, value in options_of[0].items():
            if there[name] != value:
                raise InvalidArgument(
                    f"{what}: rank {rank} has {name}={there[name]} where rank 0 has {value}; "
                    "arguments must be the same on all ranks"
                )
    for rank, layout in enumerate(layouts):
        for there, here in zip_longest(layout, layouts[0], fillvalue="nothing"):
            if there != here:
                raise InvalidArgument(
                    f"{what}: rank {rank} has {there} where rank 0 has {here}; the modules must "
                    "have the same parameters on all ranks"
                )


class Uncopied:
    """What neither :mod:`copy` nor :mod:`pickle` can make another one of."""

    _comm: Any

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            f"rank {self._comm.rank}: a {type(self).__name__} holds a communicator and cannot be "
            "copied or pickled: copy a module or state_dict(), or save it with a Checkpoint"
        )


_lock = threading.Lock()
_claims: WeakSet[Claim] = WeakSet()


class Claim:
    """The parameters of a wrapper, which has them from `begin` until it is closed or dropped.

    Two wrappers of one parameter would both send its gradient, each from a buffer of its own.

    Parameters
    ----------
    named : sequence of (str, parameter)
        The parameters.
    """

    def __init__(self, named: Sequence[tuple[str, Any]]):
        self._names = {id(p): name for name, p in named}
        self._kept = [p for _, p in named]  # while it is alive nobody else has its id

    def refusal(self, rank: int) -> str:
        """Say that another wrapper has some of them, if one has.

        A dropped one may be alive on some ranks only, as the garbage collector comes when it
        likes: so whoever asks tells the other ranks.
        """
        taken = self._taken()
        if taken:
            gc.collect()  # what a traceback or a cycle holds was dropped by the user
            taken = self._taken()
        names = ", ".join(taken)
        said = f"rank {rank}: the module has {names}, which another DDP averages: close() that one"
        return f"{said} first" if taken else ""

    def _taken(self) -> list[str]:
        with _lock:
            others = [claim._names for claim in _claims]
        return [name for i, name in self._names.items() if any(i in names for names in others)]

    def begin(self) -> None:
        """Keep them: the wrapper is made; one that could not be made, a traceback may hold."""
        with _lock:
            _claims.add(self)

    def end(self) -> None:
        """Let others have them."""
        with _lock:
            _claims.discard(self)


class Unused:
    """What it means that a parameter got no gradient: nothing, or an error.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    named : sequence of (str, parameter)
        The parameters.
    how : {"zero", "error"}
        See :class:`~mpidist.parallel.DDP`.
    """

    HOW = ("zero", "error")

    def __init__(self, comm: Any, named: Sequence[tuple[str, Any]], how: str):
        if how not in self.HOW:
            raise InvalidArgument(
                f"rank {comm.rank}: unused={how!r}: allowed are {', '.join(map(repr, self.HOW))}"
            )
        self._comm, self._how = comm, how
        self._names = [name for name, _ in named]

    def check(self, touched: np.ndarray) -> None:
        """Look at what was used since the last time, and forget it.

        Raises
        ------
        InvalidArgument
            On every rank alike, with names and ranks, if that is an error.
        """
        if self._how == "error" and len(touched):
            used = self._comm.allgather(touched[None])
            missing = [
                f"{name} (on rank {', '.join(map(str, np.flatnonzero(column == 0)))})"
                for name, column in zip(self._names, used.T, strict=True)
                if not column.all()
            ]
            if missing:
                touched[:] = 0
                raise InvalidArgument(
                    f"rank {self._comm.rank}: parameters without a gradient: {'; '.join(missing)}; "
                    "unused='zero' takes zeros for those"
                )
        touched[:] = 0


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
