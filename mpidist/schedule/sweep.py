"""``sweep``: prove many algorithms for many sizes, every root, arity and grouping, on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import InvalidArgument, UnknownName
from .registry import Algorithm, find
from .registry import algorithms as registered_algorithms
from .tasks import Result, results_of, tasks_of

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """What was proved of one algorithm.

    Attributes
    ----------
    collective, name : str
        The algorithm.
    sizes : tuple of int
        Sizes that were proved, or tried.
    refused : tuple of int
        Sizes that it declares it cannot serve, in any grouping.
    roots : int
        Pairs of size and root that were tried.
    proofs : int
        Proofs in all: sizes × roots × arities × groupings; of more than 16 ranks, the first, the
        middle and the last root with all groupings, the others with one of small nodes.
    messages : int
        Messages in all proofs together.
    seconds : float
        Time that it took, on all cores together.
    counterexample : str or None
        The first thing that could not be proved, of the smallest size; None where all is well.
    """

    collective: str
    name: str
    sizes: tuple[int, ...]
    refused: tuple[int, ...]
    roots: int
    proofs: int
    messages: int
    seconds: float
    counterexample: str | None

    @property
    def proved(self) -> bool:
        """Whether no counter-example was found."""
        return self.counterexample is None


def sweep(
    ranks: int | Iterable[int],
    collectives: Iterable[str] | None = None,
    algorithms: Iterable[str] | None = None,
    arities: Sequence[int] = (2, 3, 4, 8),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Prove algorithms for many sizes; every root, and every arity and grouping where they matter.

    Parameters
    ----------
    ranks : int or iterable of int
        The sizes.
    collectives, algorithms : iterable of str, optional
        Names; all by default.  ``"tree:4"`` proves the tree for that arity alone.
    arities : sequence of int
        For algorithms that have one.
    jobs : int, optional
        Processes; by default as many as there are cores, and none beside this one for little work.
        Algorithms that other processes cannot import (of a script, or made at run time) are proved
        in this one.
    progress : callable, optional
        ``(done, total, label)``: parts of the work, and what was done last.

    Returns
    -------
    list of Row
        One for each algorithm, in order of registration.
    """
    sizes = sorted({ranks} if isinstance(ranks, int) else set(ranks))
    if not sizes or sizes[0] < 1:
        raise InvalidArgument(f"ranks={sizes}: sizes must be whole numbers >= 1")
    chosen = _choose(collectives, algorithms, arities)
    tasks = [t for a, ks in chosen for size in sizes for t in tasks_of(a, size, ks)]
    tasks.sort(key=lambda task: -task.size * len(task.roots))
    results = []
    for result in results_of(tasks, jobs):
        results.append(result)
        if progress is not None:
            label = f"{result.task.collective} {result.task.name}"
            progress(len(results), len(tasks), label)
    return [_row(algorithm, sizes, results) for algorithm, _ in chosen]


def _choose(
    collectives: Iterable[str] | None, names: Iterable[str] | None, arities: Sequence[int]
) -> list[tuple[Algorithm, tuple[int, ...]]]:
    """Give the algorithms asked for, each with its arities."""
    wanted = None if collectives is None else set(collectives)
    for name in wanted or ():
        registered_algorithms(name)  # raises where there is no such collective
    known = [a for a in registered_algorithms() if wanted is None or a.collective in wanted]
    if names is None:
        return [(a, tuple(arities)) for a in known]
    chosen: dict[Algorithm, tuple[int, ...]] = {}
    for name in names:
        base = name.partition("/")[0].partition(":")[0]
        found = [find(a.collective, name) for a in known if a.name == base]
        if not found:
            raise UnknownName("algorithm", name, {a.name for a in known})
        for choice in found:
            ks = tuple(arities) if choice.arity is None else (choice.arity,)
            before = chosen.get(choice.algorithm, ())
            chosen[choice.algorithm] = tuple(dict.fromkeys((*before, *ks)))
    return [(a, ks) for k in known for a, ks in chosen.items() if a.function is k.function]


def _row(algorithm: Algorithm, sizes: list[int], results: list[Result]) -> Row:
    """Put the results of one algorithm together."""
    label = (algorithm.collective, algorithm.name)
    mine = [r for r in results if (r.task.collective, r.task.name) == label]
    mine.sort(key=lambda r: (r.task.size, r.task.roots.start))
    served = {r.task.size for r in mine if r.proofs or r.counterexample}
    return Row(
        *label,
        tuple(s for s in sizes if s in served),
        tuple(s for s in sizes if s not in served),
        sum(len(r.task.roots) for r in mine if r.task.size in served),
        sum(r.proofs for r in mine),
        sum(r.messages for r in mine),
        round(sum(r.seconds for r in mine), 6),
        next((r.counterexample for r in mine if r.counterexample), None),
    )
