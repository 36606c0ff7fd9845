"""The work of a sweep: which proofs there are, cut into tasks and done on all cores."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from ..errors import MpidistError, UnknownName
from .prove import prove
from .registry import Algorithm, Groups, find

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
