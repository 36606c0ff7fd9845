"""The registry of algorithms: the decorator ``@algorithm``, look-up by name, declarations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InvalidArgument, ScheduleError, UnknownName, Unsupported
from .contract import COLLECTIVES, Contract
from .memories import MEMORIES, Memory
from .rounds import Schedule, segmented


class Registered:
    """A registered generator; a mixin for dataclasses with the field `function`."""

    function: Callable[..., Any]

    @property
    def doc(self) -> str:
        """The generator's docstring, dedented."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """The first line of the generator's docstring."""
        return self.doc.split("\n", 1)[0]


def check_name(name: object, kind: str, reserved: Container[str]) -> None:
    """Raise InvalidArgument for a name that is reserved, empty, or has a colon or slash."""
    if not isinstance(name, str) or not name or {":", "/"} & set(name) or name in reserved:
        raise InvalidArgument(
            f"name={name!r}: not a name for {kind}: expected a str, not empty or reserved, "
            "without ':' and '/'"
        )


def check_made(made: object, label: str, items: str, rank: int) -> None:
    """Raise ScheduleError if a schedule's function returned no iterable, for want of a yield."""
    if not isinstance(made, Iterable):
        raise ScheduleError(f"{label} returned {made!r}; it must yield its {items}", rank=rank)


KEYWORDS = ("root", "arity", "groups", "blocks", "local", "across", "pieces")
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Algorithm(Registered):
    """One registered algorithm: a generator and its declarations.

    Attributes
    ----------
    collective, name : str
        Name of the collective, and of the algorithm.
    function : callable
        The generator ``f(rank, size, *, root, arity, groups, blocks, local, across, pieces)``, with
        those keywords that it uses.  One with `pieces` cuts each block into so many itself: piece k
        of block b is block ``b * pieces + k``.
    blocks : int, callable or None
        Number of blocks that the data are cut into, or ``f(size, known)`` that returns it from
        `size` and a dict of ``groups``, ``local`` and ``across``; None for the contract's default.
    ordered : bool
        Whether operands are combined in rank order, as non-commutative operations need it.
    at_once : bool
        Whether all contributions to a result are combined in one round, or by one Fold, and none of
        them before, as correctly rounded sums need it.
    tree : bool or callable
        Whether contributions are combined as the fixed tree over the ranks, ``order="tree"``, or
        ``f(size, known)`` that returns it; what combines at once can do so always.
    requires : callable or None
        ``f(size, known)`` returns why a size with these groups cannot be served, or None.
    equal_blocks : bool
        Whether all blocks must have one length, because they move through each other's places.
    uses : frozenset of str
        The keywords that `function` has as parameters, such as ``root``.
    local, across : str
        Names of the algorithms inside and between the nodes, for hierarchical algorithms.
    memory : Memory or None
        The memory that it needs, if ranks of a node reach each other's buffers; None if all its
        data are in messages.
    """

    collective: str
    name: str
    function: Callable[..., Schedule]
    blocks: int | Callable[..., int] | None = None
    ordered: bool = False
    requires: Callable[..., str | None] | None = None
    equal_blocks: bool = False
    uses: frozenset[str] = field(default_factory=frozenset)
    local: str = ""
    across: str = ""
    memory: Memory | None = None
    at_once: bool = False
    tree: bool | Callable[..., bool] = False

    @property
    def contract(self) -> Contract:
        """The contract of the collective."""
        return COLLECTIVES[self.collective]

    @property
    def label(self) -> str:
        """The name in messages and listings: ``"collective name"``."""
        return f"{self.collective} {self.name}"

    def unsupported(self, size: int, groups: Groups | None = None) -> str | None:
        """Return why the algorithm cannot serve this size and these groups, or None if it can."""
        if self.memory is not None and "groups" not in self.uses and groups and len(groups) > 1:
            return f"{len(groups)} nodes: expected one node, whose ranks share memory"
        return None if self.requires is None else self._ask(self.requires, size, groups)

    def combines_as_tree(self, size: int, groups: Groups | None = None) -> bool:
        """Return whether contributions are combined as the fixed tree, or can be: all at once."""
        if callable(self.tree):
            return self.at_once or self._ask(self.tree, size, groups)
        return self.at_once or self.tree

    def block_count(self, size: int, groups: Groups | None = None) -> int:
        """Return the number of blocks that the data are cut into, for a number of ranks."""
        if self.blocks is None:
            return self.contract.default_blocks(size)
        if isinstance(self.blocks, int):
            return self.blocks
        return self._ask(self.blocks, size, groups)

    def _ask(self, function: Callable[..., Any], size: int, groups: Groups | None) -> Any:
        """Return what `requires`, `blocks` or `tree` returns for a size and groups."""
        known = {"groups": _groups(groups, size), "local": self.local, "across": self.across}
        return function(size, known)

    def schedule(
        self,
        rank: int,
        size: int,
        root: int = 0,
        arity: int = 2,
        groups: Groups | None = None,
        pieces: int = 1,
    ) -> Schedule:
        """Return the rounds of one rank; see :meth:`schedules`."""
        return self.schedules((rank,), size, root, arity, groups, pieces)[0]

    def schedules(
        self,
        ranks: Iterable[int],
        size: int,
        root: int = 0,
        arity: int = 2,
        groups: Groups | None = None,
        pieces: int = 1,
    ) -> list[Schedule]:
        """Return the rounds of each of some ranks.

        `pieces` is for algorithms with this keyword; see :meth:`segmented` for all.

        Raises
        ------
        Unsupported
            If the algorithm does not serve this size; the message names algorithms that do.
        ScheduleError
            If the generator function returns no iterable, as one without a ``yield`` does.
        """
        reason = self.unsupported(size, groups=groups)
        if reason is not None:
            able = [
                a.name
                for a in algorithms(self.collective, one_sided=self.memory is not None)
                if a.unsupported(size, groups=groups) is None
            ]
            raise Unsupported(f"{self.label}: {reason}; served by {', '.join(able)} and native")
        values: dict[str, Any] = {
            "root": root,
            "arity": arity,
            "local": self.local,
            "across": self.across,
            "pieces": pieces,
        }
        if "groups" in self.uses:
            values["groups"] = _groups(groups, size)
        if "blocks" in self.uses:
            values["blocks"] = self.block_count(size, groups)
        given = {name: values[name] for name in sorted(self.uses)}
        schedules = []
        for rank in ranks:
            made = self.function(rank, size, **given)
            check_made(made, self.label, "rounds", rank)
            schedules.append(made)
        return schedules

    def segmented(
        self, rank: int, size: int, segments: int = 1, window: int | None = None, **known: Any
    ) -> Schedule:
        """Return the rounds of one rank with every block cut into `segments` pieces.

        The pieces are strands, at most `window` in flight, or those of the algorithm itself if it
        has the keyword `pieces`.  Other parameters are those of :meth:`schedule`.
        """
        if segments == 1 or "pieces" in self.uses:
            return self.schedule(rank, size, pieces=segments, **known)
        return segmented(lambda: self.schedule(rank, size, **known), size, segments, window)


@dataclass(frozen=True)
class Choice:
    """An algorithm, with its arity if one was given: ``"tree:4"`` is the tree with ``arity=4``."""

    algorithm: Algorithm
    arity: int | None = None

    @property
    def name(self) -> str:
        """The name of the choice, for example ``"tree:4"``."""
        suffix = "" if self.arity is None else f":{self.arity}"
        return self.algorithm.name + suffix


_registry: dict[tuple[str, str], Algorithm] = {}
_reserved = {"auto": True}  # no algorithm can have these names; whether host arrays allow them
GENERATION = [0]
"""A number that each registration and removal increases, so that caches notice them.

In a list: its readers cannot afford a function call.
"""


def algorithm(
    collective: str,
    name: str,
    *,
    blocks: int | Callable[..., int] | None = None,
    ordered: bool = False,
    requires: Callable[..., str | None] | None = None,
    equal_blocks: bool = False,
    memory: str | None = None,
    at_once: bool = False,
    tree: bool | Callable[..., bool] = False,
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register a schedule generator as an algorithm of `collective`.

    Parameters
    ----------
    collective : str
        Name of the collective, one of :data:`~mpidist.schedule.contract.COLLECTIVES`.
    name : str
        Name for ``algorithm=``; registering a name again replaces the older algorithm.
    blocks : int or callable, optional
        Number of blocks the data are cut into, or a function that returns it.  The function gets
        `size`, and those of `groups`, `local` and `across` that are among its parameters.  By
        default one block per rank for collectives with parts per rank, else 1.
    ordered : bool
        Whether operands are combined in rank order (the prover checks it).
    requires : callable, optional
        Function with parameters as for `blocks`, which returns why the algorithm cannot serve this
        size or these groups, as "…: expected …", or None if it can.
    equal_blocks : bool
        Whether all blocks must have one length, because a block may move to another's place.
    memory : str, optional
        Name of the memory that the steps Get, Put, Fold and Meet need, one of
        :data:`~mpidist.schedule.memories.MEMORIES`.  By default all data are in messages.
    at_once : bool
        Whether all contributions to a result are combined in one round, or by one Fold, and no
        partial results before (the prover checks it).
    tree : bool or callable
        Whether partial results are combined as the fixed tree that splits the ranks at the largest
        power of two below their number, or a function, with parameters as for `blocks`, that
        returns it (the prover checks it).  What combines `at_once` need not declare it.

    Returns
    -------
    callable
        A decorator that returns the generator unchanged.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    check_name(name, "an algorithm", _reserved)
    reached = None if memory is None else find_memory(memory)

    def register(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        named = inspect.signature(function).parameters
        uses = frozenset(KEYWORDS) & frozenset(named)
        levels = [str(named[k].default) if k in named else "" for k in ("local", "across")]
        count = _asking(blocks) if callable(blocks) else blocks
        needs = None if requires is None else _asking(requires)
        in_tree = _asking(tree) if callable(tree) else tree
        _registry[collective, name] = Algorithm(
            collective,
            name,
            function,
            count,
            ordered,
            needs,
            equal_blocks,
            uses,
            local=levels[0],
            across=levels[1],
            memory=reached,
            at_once=at_once,
            tree=in_tree,
        )
        GENERATION[0] += 1
        return function

    return register


def reserve(names: Iterable[str], on_host: bool = True) -> None:
    """Reserve the names of executors, which no algorithm can have; again makes no difference.

    Those `on_host` are values of ``algorithm=`` for host arrays, the others for arrays on a GPU.
    """
    for name in names:
        if name in _reserved:
            continue
        taken = [a.label for a in _registry.values() if a.name == name]
        if taken:
            raise InvalidArgument(f"executor {name!r}: {taken[0]} is an algorithm of that name")
        _reserved[name] = on_host


def reserved() -> list[str]:
    """Return the values of ``algorithm=`` that name no algorithm: "auto", and executors."""
    return [name for name, on_host in list(_reserved.items()) if on_host]


def find_memory(name: str) -> Memory:
    """Return the memory of a name; raise UnknownName if there is none."""
    if name not in MEMORIES:
        raise UnknownName("memory", name, MEMORIES)
    return MEMORIES[name]


def algorithms(collective: str | None = None, *, one_sided: bool = False) -> list[Algorithm]:
    """Return the registered algorithms, of one collective or of all, in order of registration.

    Those that need shared memory are among them only with `one_sided`: a call by messages cannot
    use them.
    """
    if collective is not None and collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    return [
        a
        for a in _registry.values()
        if collective in (None, a.collective) and (one_sided or a.memory is None)
    ]


def find(collective: str, name: str) -> Choice:
    """Return the algorithm of a name, with the arity or the levels that the name has.

    ``"tree:4"`` is a tree of arity 4; ``"hierarchical/direct/ring"`` is a hierarchical algorithm
    with two levels: ``direct`` inside the nodes and ``ring`` between them.

    Raises
    ------
    UnknownName
        If the name is not registered; the message has the most similar names.
    InvalidArgument
        If the part after the colon is not an arity ≥ 2 or the algorithm has no arity; if the
        algorithm has no levels, or the name does not have two; if the name is "auto" or that of an
        executor.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    top, slash, levels = str(name).partition("/")
    found = _registry.get((collective, top))
    if slash and found is not None:
        return Choice(_with_levels(found, levels, name))
    base, colon, parameter = str(name).partition(":")
    if _reserved.get(base):
        raise InvalidArgument(
            f"{collective} algorithm {name!r}: {base} is not a schedule; only the algorithm= of a "
            "call allows it"
        )
    found = _registry.get((collective, base))
    if found is None:
        known = [a.name for a in algorithms(collective, one_sided=True)]
        raise UnknownName(f"{collective} algorithm", name, [*known, *reserved()])
    if not colon:
        return Choice(found)
    if "arity" not in found.uses:
        raise InvalidArgument(f"{collective} algorithm {name!r}: {base} has no arity")
    if not parameter.isdecimal() or int(parameter) < 2:
        raise InvalidArgument(
            f"{collective} algorithm {name!r}: arity {parameter!r}: expected a number >= 2"
        )
    return Choice(found, int(parameter))


def _with_levels(found: Algorithm, levels: str, name: str) -> Algorithm:
    """Return a hierarchical algorithm with `levels` ("LOCAL/ACROSS"), under its whole name."""
    if not found.local:
        raise InvalidArgument(
            f"{found.collective} algorithm {name!r}: {found.name} has no levels; only hierarchical "
            "algorithms allow /LOCAL/ACROSS"
        )
    local, slash, across = levels.partition("/")
    if not local or not across or "/" in across:
        raise InvalidArgument(
            f"{found.collective} algorithm {name!r}: expected {found.name}/LOCAL/ACROSS, "
            f"for example {found.name}/{found.local}/{found.across}"
        )
    inner = local.partition(":")[0]
    memory = next((a.memory for a in algorithms(one_sided=True) if a.name == inner), None)
    return replace(found, name=name, local=local, across=across, memory=memory)


def unregister(collective: str, name: str) -> None:
    """Remove an algorithm, for example one that a test registered; an unknown one is ignored."""
    _registry.pop((collective, name), None)
    GENERATION[0] += 1


def registered(function: Callable[..., Schedule]) -> Algorithm | None:
    """Return the algorithm that `function` was registered as, or None."""
    return next((a for a in _registry.values() if a.function is function), None)


def _asking(function: Callable[..., Any]) -> Callable[[int, dict[str, Any]], Any]:
    """Return ``ask(size, known)``: it calls `function` with those of `known` that it has.

    The signature is read only once, because that takes 20 µs and every binding calls ``ask``.
    """
    parameters = inspect.signature(function).parameters

    def ask(size: int, known: dict[str, Any]) -> Any:
        return function(size, **{name: known[name] for name in known if name in parameters})

    return ask


def _groups(groups: Iterable[Iterable[int]] | None, size: int) -> Groups:
    """Return groups of ranks (the nodes) as tuples; by default all ranks are one group."""
    return (tuple(range(size)),) if groups is None else tuple(map(tuple, groups))


# -- listings -------------------------------------------------------------------------------------

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
_UNEVEN = ((0, 1, 2), (3, 4))


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's declarations and documented costs as a dict, for JSON listings."""
    rounds, moved = documented_costs(algorithm.doc)
    return {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "rounds": rounds,
        "bytes_per_rank": moved,
        "ordered": algorithm.ordered,
        "at_once": algorithm.at_once,
        "equal_blocks": algorithm.equal_blocks,
        "requires": requirement(algorithm),
        "uses": sorted(algorithm.uses),
        "memory": algorithm.memory and algorithm.memory.name,
        "summary": algorithm.summary,
    }


def documented_costs(doc: str) -> tuple[str, str]:
    """Return the rounds and the bytes per rank, as text, that an algorithm's docstring states.

    It states them as ``Rounds: …. Bytes per rank: ….``; both texts are empty if it does not.
    """
    found = re.search(r"Rounds:\s*(.*?)\.\s+Bytes per rank:\s*(.*?)\.(?:\n|$)", doc, re.DOTALL)
    if not found:
        return "", ""
    return " ".join(found[1].split()), " ".join(found[2].split())


def requirement(algorithm: Algorithm) -> str | None:
    """Return the sizes or nodes that an algorithm needs, as text; None if it serves all.

    A few sizes and uneven nodes are tried; the text is what follows "expected" in the first reason
    why one cannot be served.
    """
    reasons = [algorithm.unsupported(size) for size in _SIZES]
    reasons.append(algorithm.unsupported(5, groups=_UNEVEN))
    reason = next(filter(None, reasons), None)
    return reason and reason.rpartition("expected ")[2]
