"""``sweep``: prove many algorithms for many sizes, every root, arity and grouping, on all cores."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from ..errors import InvalidArgument, MpidistError, UnknownName
from .prove import prove
from .registry import Algorithm, Groups, find
from .registry import algorithms as registered_algorithms

_SMALL = 2000  # ranks times roots: below, starting processes takes longer than proving
_EVERY_PAIR = 16  # ranks up to which every root meets every grouping


@dataclass(frozen=True)
class Task:
    """Some roots of one algorithm and size, with every arity, and with groupings."""

    collective: str
    name: str
    module: str
    size: int
    roots: range
    arities: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """What came of a task."""

    task: Task
    proofs: int
    messages: int
    seconds: float
    counterexample: str | None


def groupings(size: int) -> list[Groups]:
    """Give ways to put ranks on nodes: one, pairs, halves, uneven, scattered, a rank each."""
    every = tuple(range(size))
    ways = [
        (every,),
        tuple(every[i : i + 2] for i in range(0, size, 2)),
        (every[: (size + 1) // 2], every[(size + 1) // 2 :]),
        (every[:1], every[1:]),
        (every[::2], every[1::2]),
        tuple((rank,) for rank in every),
    ]
    return list(dict.fromkeys(tuple(group for group in way if group) for way in ways))


def tasks_of(algorithm: Algorithm, size: int, arities: tuple[int, ...]) -> Iterator[Task]:
    """Cut the proofs of one size into parts of about equal length."""
    roots = range(size) if algorithm.contract.rooted else range(1)
    arities = arities if "arity" in algorithm.uses else arities[:1]
    module = algorithm.function.__module__
    step = max(1, 1024 // (size * len(arities)))
    for start in range(0, len(roots), step):
        part = roots[start : start + step]
        yield Task(algorithm.collective, algorithm.name, module, size, part, arities)


def results_of(tasks: list[Task], jobs: int | None) -> Iterator[Result]:
    """Do all tasks, in other processes as far as these can import the algorithms."""
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    work = sum(task.size * len(task.roots) * len(task.arities) for task in tasks)
    if jobs < 2 or work < _SMALL:
        yield from map(_prove_all, tasks)
        return
    shared = [task for task in tasks if _importable(task)]
    others = set(tasks).difference(shared)
    context = multiprocessing.get_context("spawn")  # never fork: MPI may have been started
    with ProcessPoolExecutor(jobs, context) as pool:
        try:
            futures: dict[Future, list[Task]] = {
                pool.submit(_prove_batch, batch): batch for batch in _batches(shared)
            }
            yield from (_prove_all(task) for task in tasks if task in others)
            for future in as_completed(futures):
                yield from _collected(future, futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _collected(future: Future, batch: list[Task]) -> Iterator[Result]:
    """Give the results of a batch; do here what the other process could not."""
    try:
        yield from future.result()
    except (ImportError, UnknownName, BrokenProcessPool):
        yield from map(_prove_all, batch)


def _importable(task: Task) -> bool:
    """Tell whether another process finds this very algorithm by importing its module."""
    module = sys.modules.get(task.module)
    if module is None or task.module == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    function = find(task.collective, task.name).algorithm.function
    return getattr(module, function.__qualname__, None) is function


def _batches(tasks: list[Task]) -> Iterator[list[Task]]:
    """Put small tasks together, so that handing them over costs little."""
    batch: list[Task] = []
    weight = 0
    for task in tasks:
        batch.append(task)
        weight += task.size * len(task.roots) * len(task.arities)
        if weight >= _SMALL:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _prove_batch(batch: list[Task]) -> list[Result]:
    """Prove in another process, which has to import the algorithms first."""
    importlib.import_module(f"{__package__.rpartition('.')[0]}.algorithms")
    for module in {task.module for task in batch}:
        importlib.import_module(module)
    for task in batch:
        if find(task.collective, task.name).algorithm.function.__module__ != task.module:
            raise ImportError(f"{task.collective} {task.name} is another one here")
    return [_prove_all(task) for task in batch]


def _prove_all(task: Task) -> Result:
    """Prove one task; what a faulty generator raises is a counter-example like any other."""
    begin = time.perf_counter()
    algorithm = find(task.collective, task.name).algorithm
    ways = groupings(task.size) if "groups" in algorithm.uses else [(tuple(range(task.size)),)]
    served = [way for way in ways if algorithm.unsupported(task.size, groups=way) is None]
    proofs = messages = 0
    fault = None
    for root, groups in _pairs(task, served):
        for arity in task.arities:
            try:
                proof = prove(
                    task.collective, algorithm, task.size, root, arity=arity, groups=groups
                )
            except Exception as error:
                fault = fault or _describe(algorithm, task.size, root, arity, groups, error)
                continue
            proofs += 1
            messages += proof.messages
    return Result(task, proofs, messages, time.perf_counter() - begin, fault)


def _pairs(task: Task, served: list[Groups]) -> Iterator[tuple[int, Groups]]:
    """Give the roots with the groupings to prove them with.

    Of many ranks, the first, the middle and the last root are proved with all groupings, the others
    with nodes of two, or of one where the ranks are odd and the nodes must be equal.
    """
    ends = (0, task.size // 2, task.size - 1)
    small = [way for way in served if len(way[0]) == 2] or served[-1:]
    for root in task.roots:
        every = task.size <= _EVERY_PAIR or root in ends
        yield from ((root, groups) for groups in (served if every else small[:1]))


def _describe(
    algorithm: Algorithm, size: int, root: int, arity: int, groups: Groups, error: Exception
) -> str:
    """Say where a counter-example is: the settings that the algorithm has, and the error."""
    where = [f"{size} rank{'s' if size > 1 else ''}"]
    if algorithm.contract.rooted:
        where.append(f"root {root}")
    if "arity" in algorithm.uses:
        where.append(f"arity {arity}")
    if "groups" in algorithm.uses:
        where.append(f"groups {groups}")
    what = str(error) if isinstance(error, MpidistError) else f"{type(error).__name__}: {error}"
    return f"{', '.join(where)}: {what}"


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
