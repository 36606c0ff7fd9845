"""Agreement on parameters: between ranks, between wrappers, and from step to step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np

from ..communicator.agreement import check_same, on_all_ranks
from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..frameworks.base import Framework

Named = Sequence[tuple[str, Any]]


def check_alike(
    comm: Communicator,
    what: str,
    framework: Framework,
    named: Named,
    arrays: Named,
    options: Mapping[str, Any],
    why_not: str = "",
) -> None:
    """Check that options, and shapes and dtypes of parameters, agree on all ranks; collective.

    `named` are parameters and `arrays` buffers, with their names; `why_not` is an error text if
    this rank refuses the module, else "".  InvalidArgument on every rank names the first
    difference, or the reason of the rank that refuses; it begins with `what`, the wrapper.
    """
    mine = [(name, tuple(p.data.shape), str(framework.kind(p))) for name, p in named]
    mine += [(name, tuple(array.shape), str(array.dtype)) for name, array in arrays]

    def settings() -> tuple[Mapping[str, Any], list[tuple]]:
        if why_not:
            raise InvalidArgument(why_not)
        return options, mine

    every, layouts = zip(*on_all_ranks(comm, settings, f"{what}: the module"))
    check_same(what, every)
    for rank, layout in enumerate(layouts):
        for other, first in zip_longest(layout, layouts[0], fillvalue="nothing"):
            if other != first:
                raise InvalidArgument(
                    f"{what}: rank {rank} has {other} where rank 0 has {first}; the modules must "
                    "have the same parameters on all ranks"
                )


class NotCopyable:
    """Base class of objects that cannot be copied or pickled, because they hold a communicator.

    `instead` is what to do in place of a copy.
    """

    instead = "take its state_dict(), or save it with a Checkpoint"
    comm: Communicator

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            f"rank {self.comm.rank}: a {type(self).__name__} holds a communicator and cannot be "
            f"copied or pickled: {self.instead}"
        )


# Of all DDPs of this process; simulated ranks are threads of it.
_lock = threading.Lock()
_owners: WeakSet[Ownership] = WeakSet()


class Ownership:
    """The parameters that one DDP owns, from :meth:`begin` until it is closed or deleted.

    Two DDPs of one parameter would both send its gradient, each from a buffer of its own.
    """

    def __init__(self, named: Named):
        self._names = {id(p): name for name, p in named}
        self._parameters = [p for _, p in named]  # while one is alive its id is not used again

    def why_not(self, rank: int) -> str:
        """Return an error text if some of the parameters belong to another DDP, else "".

        The answer may differ between ranks, as a deleted DDP lives on until the garbage collector
        finds it, so the caller must exchange it.
        """
        shared = self._shared()
        if shared:
            gc.collect()  # frees wrappers that only a traceback or a cycle refers to
            shared = self._shared()
        names = ", ".join(shared)
        text = f"rank {rank}: the module has {names}, which another DDP averages: close() that one"
        return f"{text} first" if shared else ""

    def _shared(self) -> list[str]:
        with _lock:
            others = [owner._names for owner in _owners]
        return [name for i, name in self._names.items() if any(i in names for names in others)]

    def begin(self) -> None:
        """Register as owner of the parameters.

        A DDP calls it at the end of its construction: one that fails before then owns nothing.
        """
        with _lock:
            _owners.add(self)

    def end(self) -> None:
        """Release the parameters, so that another DDP may own them."""
        with _lock:
            _owners.discard(self)


def check_used(comm: Communicator, names: Sequence[str], touched: np.ndarray) -> None:
    """Check that every parameter has a gradient on every rank; collective.

    `touched` has a 1 for each parameter with a gradient on this rank.  InvalidArgument on every
    rank alike, with the names of the parameters and the ranks.
    """
    if not len(names):
        return
    used = comm.allgather(touched[None])
    missing = [
        f"{name} (on rank {', '.join(map(str, np.flatnonzero(column == 0)))})"
        for name, column in zip(names, used.T, strict=True)
        if not column.all()
    ]
    if missing:
        raise InvalidArgument(
            f"rank {comm.rank}: parameters without a gradient: {'; '.join(missing)}; "
            "unused='skip' and unused='zero' allow that"
        )


class ParameterGuard:
    """Checks that a module still has, and still trains, the parameters it was wrapped with.

    A parameter that is unfrozen later would get each rank's own gradient.  One that is frozen later
    would get zeros, with which an optimizer's momentum and weight decay still move it.  One that
    replaces another, as in a new last layer or ``load_state_dict(assign=True)``, would not be sent.
    """

    def __init__(self, framework: Framework, module: Any, named: Named):
        trained, ignored = {id(p) for _, p in named}, framework.ignored(module)
        self._framework, self._module, self._ids = framework, module, trained
        self._trained = [(name, p) for name, p in named if hasattr(p, "requires_grad")]
        names = getattr(module, "named_parameters", lambda: enumerate(module.parameters()))
        # The module's other parameters, which are not trained; without the ignored ones.
        self.frozen = [
            (str(name), p) for name, p in names() if id(p) not in trained and name not in ignored
        ]
        self._note()

    def _note(self) -> None:
        """Record the module's registered parameters and submodules, to detect a replacement.

        They are kept alive, so that their ids are not reused.
        """
        self._registries = self._framework.registries(self._module)
        self._objects = [list(registry.values()) for registry in self._registries]
        self._object_ids = [list(map(id, objects)) for objects in self._objects]

    def check(self, rank: int) -> None:
        """Raise InvalidArgument if parameters were added, removed, frozen or unfrozen."""
        # In every step, so by the ids; the module is walked through only if one of them differs.
        if [list(map(id, registry.values())) for registry in self._registries] != self._object_ids:
            self._check_replaced(rank)
        changed = [name for name, p in self._trained if not p.requires_grad]
        changed += [name for name, p in self.frozen if getattr(p, "requires_grad", False)]
        if changed:
            raise InvalidArgument(
                f"rank {rank}: requires_grad of {', '.join(changed)} has changed since the "
                "module was wrapped; close() this DDP and make another one"
            )

    def _check_replaced(self, rank: int) -> None:
        """Raise InvalidArgument if parameters were added or removed since the module was wrapped.

        Submodules may have been replaced by others that have the same parameters.
        """
        now = self._framework.parameters(self._module)
        new = [name for name, p in now if id(p) not in self._ids]
        lost = len(self._ids) - (len(now) - len(new))
        if new or lost:
            raise InvalidArgument(
                f"rank {rank}: since the module was wrapped, {', '.join(new) or 'no parameter'} "
                f"was added and {lost} removed, as by load_state_dict(assign=True) or new layers; "
                "close() this DDP and make another one"
            )
        self._note()
