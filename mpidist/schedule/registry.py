"""Where algorithms are found: ``@algorithm``, lookup by name, what each declares about itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InvalidArgument, ScheduleError, UnknownName, Unsupported
from .contract import COLLECTIVES, Contract
from .rounds import Schedule

NATIVE = "native"

SYMMETRIC = "symmetric"
STAGED = "staged"
SINGLE_COPY = "single_copy"


class Registered:
    """A generator that was registered; a mixin of dataclasses with the field `function`."""

    function: Callable[..., Any]

    @property
    def doc(self) -> str:
        """The generator's docstring, dedented."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return self.doc.split("\n", 1)[0]


def check_name(name: object, kind: str, reserved: Container[str]) -> None:
    """Raise InvalidArgument if nothing can be registered under a name."""
    if not isinstance(name, str) or not name or {":", "/"} & set(name) or name in reserved:
        raise InvalidArgument(
            f"{name!r} cannot name {kind}: it is reserved, empty or has a ':' or '/'"
        )


def check_made(made: object, label: str, what: str, rank: int) -> None:
    """Raise ScheduleError if a function gave nothing to go through, as one without yield does."""
    if not isinstance(made, Iterable):
        raise ScheduleError(f"{label} gave {made!r}; it must yield its {what}", rank=rank)


KEYWORDS = ("root", "arity", "groups", "blocks", "local", "across")
EXECUTORS = ("native", "symmetric", "staged", "single_copy")
"""Executors that run no registered algorithm; their names stand where an algorithm's may."""
RESERVED = ("auto", *EXECUTORS)
"""Names of ways that are no algorithms."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Algorithm(Registered):
    """One registered algorithm: a generator and what it declares.

    Attributes
    ----------
    collective, name : str
        What it is called by.
    function : callable
        The generator ``(rank, size, *, root, arity, groups, blocks, local, across)``, keywords as
        far as it uses them.
    ordered : bool
        It claims to combine operands in rank order, and so serves non-commutative operations.
    equal_blocks : bool
        It moves blocks through places of other blocks, and so needs them all of one length.
    uses : frozenset of str
        Which keywords it takes: ``blocks`` is the number of blocks that the data are cut into.
    local, across : str
        The algorithms that it plays inside the nodes and between them, where it is made of others.
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

    @property
    def contract(self) -> Contract:
        """The promise of the collective."""
        return COLLECTIVES[self.collective]

    @property
    def label(self) -> str:
        """``"collective name"``, as in messages and listings."""
        return f"{self.collective} {self.name}"

    def unsupported(self, size: int, groups: Groups | None = None, **_: Any) -> str | None:
        """Give the reason why it cannot serve this size and these groups, or None if it can."""
        if self.requires is None:
            return None
        return self._ask(self.requires, size, groups)

    def block_count(self, size: int, groups: Groups | None = None, **_: Any) -> int:
        """Give the number of blocks that the data are cut into."""
        if self.blocks is None:
            return self.contract.default_blocks(size)
        if isinstance(self.blocks, int):
            return self.blocks
        return self._ask(self.blocks, size, groups)

    def _ask(self, function: Callable[..., Any], size: int, groups: Groups | None) -> Any:
        """Call what it declares, as :func:`_asking` made it."""
        known = {"groups": _groups(groups, size), "local": self.local, "across": self.across}
        return function(size, known)

    def schedule(
        self, rank: int, size: int, root: int = 0, arity: int = 2, groups: Groups | None = None
    ) -> Schedule:
        """Give the rounds of one rank.

        Raises
        ------
        Unsupported
            If the algorithm does not serve this size; the message names what does.
        ScheduleError
            If its function gives no rounds.
        """
        reason = self.unsupported(size, groups=groups)
        if reason is not None:
            able = [
                a.name
                for a in algorithms(self.collective)
                if a.unsupported(size, groups=groups) is None
            ]
            raise Unsupported(f"{self.label}: {reason}; served by {', '.join(able)} and native")
        values: dict[str, Any] = {
            "root": root,
            "arity": arity,
            "groups": _groups(groups, size),
            "local": self.local,
            "across": self.across,
        }
        if "blocks" in self.uses:
            values["blocks"] = self.block_count(size, groups)
        made = self.function(rank, size, **{k: values[k] for k in sorted(self.uses)})
        check_made(made, self.label, "rounds", rank)
        return made


@dataclass(frozen=True)
class Choice:
    """An algorithm with its parameter: ``"tree:4"`` is the tree with ``arity=4``."""

    algorithm: Algorithm
    arity: int | None = None

    @property
    def name(self) -> str:
        """The name it was asked for by, for example ``"tree:4"``."""
        suffix = "" if self.arity is None else f":{self.arity}"
        return self.algorithm.name + suffix


_registry: dict[tuple[str, str], Algorithm] = {}
GENERATION = [0]
"""The number that `generation` gives, to be read where a call of a function counts."""


def algorithm(
    collective: str,
    name: str,
    *,
    blocks: int | Callable[..., int] | None = None,
    ordered: bool = False,
    requires: Callable[..., str | None] | None = None,
    equal_blocks: bool = False,
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register a schedule generator as an algorithm of `collective`.

    Parameters
    ----------
    collective : str
        One of :data:`~mpidist.schedule.contract.COLLECTIVES`.
    name : str
        What users write in ``algorithm=``; registering a name again replaces the older one.
    blocks : int or callable, optional
        Number of blocks the data are cut into; a callable gets `size`, and `groups`, `local` and
        `across` as far as it names them.
        By default one per rank where the collective deals in blocks per rank, else 1.
    ordered : bool
        Claim that operands are combined in rank order (proved).
    requires : callable, optional
        Gets what `blocks` gets; returns why that cannot be served, or None.
    equal_blocks : bool
        Declare that all blocks must have one length.

    Returns
    -------
    callable
        A decorator that returns the generator unchanged.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    check_name(name, "an algorithm", RESERVED)

    def register(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        named = inspect.signature(function).parameters
        uses = frozenset(KEYWORDS) & frozenset(named)
        levels = [str(named[k].default) if k in named else "" for k in ("local", "across")]
        count = _asking(blocks) if callable(blocks) else blocks
        needs = None if requires is None else _asking(requires)
        _registry[collective, name] = Algorithm(
            collective, name, function, count, ordered, needs, equal_blocks, uses, *levels
        )
        GENERATION[0] += 1
        return function

    return register


def algorithms(collective: str | None = None) -> list[Algorithm]:
    """List the registered algorithms, of one collective or of all, in order of registration."""
    if collective is not None and collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    return [a for a in _registry.values() if collective in (None, a.collective)]


def find(collective: str, name: str) -> Choice:
    """Look an algorithm up by name.

    ``"tree:4"`` gives a tree its arity, ``"hierarchical/direct/ring"`` names the algorithms that
    one made of two levels plays inside the nodes and between them.

    Raises
    ------
    UnknownName
        With the nearest names, if there is none.
    InvalidArgument
        If the part after the colon is not an arity ≥ 2, or the algorithm has none; or it has no
        levels, or is not given two.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    top, slash, levels = str(name).partition("/")
    found = _registry.get((collective, top))
    if slash and found is not None:
        return Choice(_with_levels(found, levels, name))
    base, colon, parameter = str(name).partition(":")
    if base in RESERVED:
        raise InvalidArgument(
            f"{collective} algorithm {name!r}: {base} is no schedule, but a way to serve a call"
        )
    found = _registry.get((collective, base))
    if found is None:
        known = [a.name for a in algorithms(collective)]
        raise UnknownName(f"{collective} algorithm", name, [*known, *RESERVED])
    if not colon:
        return Choice(found)
    if "arity" not in found.uses:
        raise InvalidArgument(f"{collective} algorithm {name!r}: {base} has no arity")
    if not parameter.isdigit() or int(parameter) < 2:
        raise InvalidArgument(f"{collective} algorithm {name!r}: the arity must be a number >= 2")
    return Choice(found, int(parameter))


def _with_levels(found: Algorithm, levels: str, name: str) -> Algorithm:
    """Give a two-level algorithm that is made of others than by default."""
    if not found.local:
        raise InvalidArgument(f"{found.collective} algorithm {name!r}: {found.name} has no levels")
    local, slash, across = levels.partition("/")
    if not local or not across or "/" in across:
        raise InvalidArgument(
            f"{found.collective} algorithm {name!r}: give two algorithms, as in "
            f"{found.name}/{found.local}/{found.across}"
        )
    return replace(found, name=name, local=local, across=across)


def generation() -> int:
    """Give a number that changes with every registration, for those who keep what they found."""
    return GENERATION[0]


def unregister(collective: str, name: str) -> None:
    """Forget an algorithm, for example one that a test registered."""
    _registry.pop((collective, name), None)
    GENERATION[0] += 1


def registered(function: Callable[..., Schedule]) -> Algorithm | None:
    """Give the algorithm that `function` was registered as, or None."""
    return next((a for a in _registry.values() if a.function is function), None)


def _asking(function: Callable[..., Any]) -> Callable[[int, dict[str, Any]], Any]:
    """Return ``ask(size, known)``: `function` of the size and those known values that it names.

    The signature is read once: that takes 20 µs, and every binding asks.
    """
    parameters = inspect.signature(function).parameters

    def ask(size: int, known: dict[str, Any]) -> Any:
        return function(size, **{name: known[name] for name in known if name in parameters})

    return ask


def _groups(groups: Iterable[Iterable[int]] | None, size: int) -> Groups:
    """Give the groups as tuples; by default every rank is in one group."""
    return (tuple(range(size)),) if groups is None else tuple(tuple(g) for g in groups)
