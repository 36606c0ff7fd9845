"""The sweep: proofs of many algorithms for many sizes, roots, arities and nodes, on all cores."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from ..errors import InvalidArgument, MpidistError, UnknownName
from ..measure import counted
from .machine import Proof
from .prove import prove
from .registry import Algorithm, Groups, find
from .registry import algorithms as registered_algorithms
from .rounds import Copy, Parallel, Schedule, block_tuple, steps_of
from .wave import Given, proofs_of

_SEATS = 16384  # most ranks of all proofs of a task
_MANY = 1_000_000  # blocks in the steps of all proofs that are done at once: about 150 MB
_SMALL = 2000  # ranks times roots: below, starting processes takes longer than the proofs
EVERY_ROOT = 16  # number of ranks up to which every root is proved with every grouping
_TOGETHER = 8  # times as many roots in a batch, since most of what they do may be the same
_LITTLE = 600  # blocks in the steps of all proofs, below which the Python machine is as fast
_PIECES = (1, 3)  # of each block, for algorithms that cut it themselves; above 16 ranks only 1


@dataclass(frozen=True)
class ProofTask:
    """A unit of work of the sweep: the proofs of one algorithm for one size and some roots.

    Each root is proved with all arities and with groupings of ranks by node; see :func:`_pairs`.
    """

    collective: str
    name: str
    module: str  # that defines the algorithm
    size: int
    roots: tuple[int, ...]
    arities: tuple[int, ...]

    @property
    def label(self) -> str:
        """What is proved, as text, but for the module."""
        parts = (self.size, *self.roots, "by", *self.arities)
        return f"{self.collective} {self.name} {' '.join(map(str, parts))}"


@dataclass(frozen=True)
class Result:
    """The result of a :class:`ProofTask`: counts of its proofs, and the first counter-example."""

    task: ProofTask
    proofs: int
    messages: int
    seconds: float
    counterexample: str | None
    before: bool = False  # whether an earlier sweep has proved it


def groupings(size: int) -> list[Groups]:
    """Return the groupings of ranks by node that are proved."""
    every = tuple(range(size))
    found = [
        (every,),
        tuple(every[i : i + 2] for i in range(0, size, 2)),  # nodes of two ranks
        (every[: (size + 1) // 2], every[(size + 1) // 2 :]),
        (every[:1], every[1:]),
        (every[::2], every[1::2]),
        tuple((rank,) for rank in every),
    ]
    return list(dict.fromkeys(tuple(filter(None, groups)) for groups in found))


def tasks_of(algorithm: Algorithm, size: int, arities: tuple[int, ...]) -> Iterator[ProofTask]:
    """Yield the proofs of an algorithm for one size as tasks of about equal length."""
    # In shared memory only some roots of many ranks: there a proof takes p² accesses for each root.
    roots = tuple(range(size)) if algorithm.contract.rooted else (0,)
    if algorithm.contract.rooted and algorithm.memory is not None and size > EVERY_ROOT:
        roots = (0, size // 2, size - 1)
    arities = arities if "arity" in algorithm.uses else arities[:1]
    module = algorithm.function.__module__
    step = max(1, _SEATS // size)
    for start in range(0, len(roots), step):
        part = roots[start : start + step]
        yield ProofTask(algorithm.collective, algorithm.name, module, size, part, arities)


def results_of(tasks: list[ProofTask], jobs: int | None) -> Iterator[Result]:
    """Yield the results of all tasks, as they are ready.

    Tasks whose algorithm can be imported are proved in `jobs` processes (None: one per core), the
    others, or all if there is little work, in this one.
    """
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    work = sum(task.size * len(task.roots) * len(task.arities) for task in tasks)
    if jobs < 2 or work < _SMALL:
        yield from map(_prove_all, tasks)
        return
    shared = [task for task in tasks if _importable(task)]
    others = set(tasks).difference(shared)
    context = multiprocessing.get_context("spawn")  # never fork: MPI may be initialised
    with ProcessPoolExecutor(jobs, context) as pool:
        try:
            futures: dict[Future, list[ProofTask]] = {
                pool.submit(_prove_batch, batch): batch for batch in _batches(shared)
            }
            yield from (_prove_all(task) for task in tasks if task in others)
            for future in as_completed(futures):
                yield from _collected(future, futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _collected(future: Future, batch: list[ProofTask]) -> Iterator[Result]:
    """Yield the results of a batch; if the other process could not prove it, this one does."""
    try:
        yield from future.result()
    except (ImportError, UnknownName, BrokenProcessPool):
        yield from map(_prove_all, batch)


def _importable(task: ProofTask) -> bool:
    """Return whether a worker process can get the task's algorithm by importing its module."""
    module = sys.modules.get(task.module)
    if module is None or task.module == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    function = find(task.collective, task.name).algorithm.function
    return getattr(module, function.__qualname__, None) is function


def _batches(tasks: list[ProofTask]) -> Iterator[list[ProofTask]]:
    """Yield batches of tasks large enough that passing them to a process costs little."""
    batch: list[ProofTask] = []
    weight = 0
    for task in tasks:
        batch.append(task)
        weight += task.size * len(task.roots) * len(task.arities)
        if weight >= _SMALL:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def _prove_batch(batch: list[ProofTask]) -> list[Result]:
    """Run in a worker process: import the algorithms of a batch and return its results."""
    importlib.import_module(f"{__package__.rpartition('.')[0]}.algorithms")
    for module in {task.module for task in batch}:
        importlib.import_module(module)
    for task in batch:
        if find(task.collective, task.name).algorithm.function.__module__ != task.module:
            raise ImportError(
                f"{task.collective} {task.name} is not from {task.module} in this process"
            )
    return [_prove_all(task) for task in batch]


def _prove_all(task: ProofTask) -> Result:
    """Return the result of a task; an error in a generator counts as a counter-example."""
    # Of a million steps that are alive at once hardly one is in a cycle; to look takes 10 %.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _prove_each(task)
    finally:
        if collects:
            gc.enable()


def _prove_each(task: ProofTask) -> Result:
    begin = time.process_time()
    algorithm = find(task.collective, task.name).algorithm
    every = groupings(task.size) if "groups" in algorithm.uses else [(tuple(range(task.size)),)]
    served = [groups for groups in every if algorithm.unsupported(task.size, groups) is None]
    cuts = _PIECES if "pieces" in algorithm.uses and task.size <= EVERY_ROOT else (1,)
    proved: list[Proof] = []
    faults: list[tuple[int, str]] = []  # root and text
    for batch, fast in _batched(task, algorithm, served, cuts):
        for result in _results(algorithm, task.size, batch, fast):
            if isinstance(result, Proof):
                proved.append(result)
            else:
                faults.append(result)
    messages = sum(proof.messages for proof in proved)
    fault = min(faults, key=lambda item: item[0])[1] if faults else None
    return Result(task, len(proved), messages, time.process_time() - begin, fault)


def _batched(
    task: ProofTask, algorithm: Algorithm, served: list[Groups], cuts: tuple[int, ...]
) -> Iterator[tuple[list[Given], bool]]:
    """Yield the proofs of a task in batches that are done at once, and whether arrays are faster.

    In shared memory, and where the roots are many, each is a batch.
    """
    batch: list[Given] = []
    total = seats = 0
    for groups, roots in _roots(task, served):
        given = {"root": roots[0], "arity": task.arities[0], "groups": groups}
        each = _work(algorithm, task.size, given)
        for arity, pieces in product(task.arities, cuts):
            work = each * pieces
            few = max(1, _MANY // max(1, work))
            step = few if algorithm.memory is not None else few * _TOGETHER
            for i in range(0, len(roots), step):
                part = Given(tuple(roots[i : i + step]), arity, groups, pieces, few)
                cost = work * min(few, len(part.roots))
                many = total + cost > _MANY or seats + len(part.roots) * task.size > _SEATS
                if batch and (many or algorithm.memory is not None):
                    yield batch, total >= _LITTLE
                    batch, total, seats = [], 0, 0
                batch.append(part)
                total += cost
                seats += len(part.roots) * task.size
    if batch:
        yield batch, total >= _LITTLE


def _results(
    algorithm: Algorithm, size: int, batch: list[Given], fast: bool
) -> Iterator[Proof | tuple[int, str]]:
    """Yield the proofs of a batch, or for one that is not found the root and the text of why."""
    found = proofs_of(algorithm, size, batch) if fast else None
    if found is not None:
        yield from chain(*found)
    elif fast and len(batch) > 1:
        for given in batch:
            yield from _results(algorithm, size, [given], fast)
    elif fast and len(batch[0].roots) > batch[0].few:
        (given,) = batch
        for i in range(0, len(given.roots), given.few):
            part = replace(given, roots=given.roots[i : i + given.few])
            yield from _results(algorithm, size, [part], fast)
    else:
        for given in batch:
            for root in given.roots:
                yield _by_machine(algorithm, size, root, given)


def _by_machine(
    algorithm: Algorithm, size: int, root: int, given: Given
) -> Proof | tuple[int, str]:
    """Return the Python machine's proof, or the root and the text of its counter-example."""
    arity, groups, pieces = given.arity, given.groups, given.pieces
    try:
        return prove(
            algorithm.collective,
            algorithm,
            size,
            root,
            arity=arity,
            groups=groups,
            segments=pieces,
        )
    except Exception as error:
        return root, _describe(algorithm, size, root, given, error)


def _work(algorithm: Algorithm, size: int, given: dict[str, Any]) -> int:
    """Return about how many blocks the steps of all ranks have, from those of one or two ranks."""
    ranks = sorted({0, size - 1}) if algorithm.contract.rooted else [size - 1]
    try:
        found = [_blocks(part) for part in algorithm.schedules(ranks, size, **given)]
    except Exception:  # of a faulty generator: its proof describes it
        return 0
    return sum(found) * size // len(ranks)


def _blocks(schedule: Schedule) -> int:
    number = 0
    for item in schedule:
        if isinstance(item, Parallel):
            number += sum(map(_blocks, item.strands))
            continue
        for step in steps_of(item):
            spec = step.source_blocks if isinstance(step, Copy) else getattr(step, "blocks", 0)
            group = getattr(step, "peers", None) or getattr(step, "group", None)  # Fold, Meet
            each = len(group) if group is not None else 1
            number += each * max(1, len(block_tuple(spec)))
    return number


def _roots(task: ProofTask, served: list[Groups]) -> Iterator[tuple[Groups, list[int]]]:
    """Yield each grouping of ranks of a task with the roots for which it is proved.

    `served` has the groupings that the algorithm serves.  With more than 16 ranks, the first,
    middle and last root are proved with all groupings, the other roots with one: nodes of two ranks
    if that is served, else the last grouping.
    """
    ends = (0, task.size // 2, task.size - 1)
    small = [groups for groups in served if len(groups[0]) == 2] or served[-1:]
    for groups in served:
        every = task.size <= EVERY_ROOT or groups in small[:1]
        roots = [root for root in task.roots if every or root in ends]
        if roots:
            yield groups, roots


def _describe(algorithm: Algorithm, size: int, root: int, given: Given, error: Exception) -> str:
    """Return the text of a counter-example: the algorithm's parameters and the error."""
    where = [counted(size, "rank")]
    if algorithm.contract.rooted:
        where.append(f"root {root}")
    if "arity" in algorithm.uses:
        where.append(f"arity {given.arity}")
    if "groups" in algorithm.uses:
        where.append(f"groups {given.groups}")
    if given.pieces > 1:
        where.append(f"{given.pieces} pieces")
    text = str(error) if isinstance(error, MpidistError) else f"{type(error).__name__}: {error}"
    return f"{', '.join(where)}: {text}"


Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """The results of one algorithm.

    Attributes
    ----------
    collective, name : str
        Name of the collective, and of the algorithm.
    sizes : tuple of int
        Sizes that were proved, or had a counter-example.
    refused : tuple of int
        Sizes that the algorithm declares as unsupported with every grouping.
    roots : int
        Number of pairs of size and root; for algorithms in shared memory on more than 16 ranks only
        the first, middle and last root.
    proofs : int
        Number of proofs: sizes × roots × arities × groupings × pieces.  With more than 16 ranks,
        only the first, middle and last root are proved with all groupings, the others with nodes of
        two, and blocks are not cut into pieces.
    messages : int
        Number of messages in all proofs together.
    seconds : float
        CPU time of the proofs, on all cores together.
    counterexample : str or None
        The first counter-example, of the smallest size; None if everything was proved.
    before : int
        Number of proofs that were `known`, of an earlier sweep.
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
    before: int = 0

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
    known: dict[str, list[int]] | None = None,
) -> list[Row]:
    """Prove algorithms for many sizes; every root, and every arity and grouping where they matter.

    Parameters
    ----------
    ranks : int or iterable of int
        Numbers of ranks.
    collectives, algorithms : iterable of str, optional
        Names of collectives and algorithms; by default all.  ``"tree:4"`` proves the tree for that
        arity only.
    arities : sequence of int
        Arities, for algorithms that have one.
    jobs : int, optional
        Number of processes; by default the number of cores, and only this process for little work.
        Algorithms that other processes cannot import (of a script, or defined at run time) are
        proved in this one.
    progress : callable, optional
        Called as ``progress(done, total, label)`` with the number of finished and of all tasks, and
        the algorithm of the task that has just finished.
    known : dict, optional
        What earlier sweeps of the same sources have proved, with the numbers of proofs and messages
        of each task by its label.  It is not proved again, and what is proved now is added.

    Returns
    -------
    list of Row
        A row for each algorithm, in order of registration.
    """
    sizes = sorted({ranks} if isinstance(ranks, int) else set(ranks))
    if not sizes or sizes[0] < 1:
        raise InvalidArgument(f"ranks={sizes}: expected whole numbers >= 1")
    chosen = _choose(collectives, algorithms, arities)
    tasks = [t for a, ks in chosen for size in sizes for t in tasks_of(a, size, ks)]
    tasks.sort(key=lambda task: -task.size * len(task.roots))
    known = {} if known is None else known
    results = [
        Result(task, proofs, messages, 0.0, None, before=True)
        for task in tasks
        if task.label in known
        for proofs, messages in (known[task.label],)
    ]
    for result in results_of([task for task in tasks if task.label not in known], jobs):
        results.append(result)
        if result.counterexample is None:
            known[result.task.label] = [result.proofs, result.messages]
        if progress is not None:
            label = f"{result.task.collective} {result.task.name}"
            progress(len(results), len(tasks), label)
    return [_row(algorithm, sizes, results) for algorithm, _ in chosen]


def _choose(
    collectives: Iterable[str] | None, names: Iterable[str] | None, arities: Sequence[int]
) -> list[tuple[Algorithm, tuple[int, ...]]]:
    """Return the algorithms with these collectives and names (None: all), each with its arities.

    A name may end in an arity or in levels, as :func:`.registry.find` takes it: "tree:4",
    "hierarchical/direct/ring".  An arity of the name stands in place of `arities`; an algorithm
    that is named several times has all of these.
    """
    wanted = None if collectives is None else set(collectives)
    for name in wanted or ():
        registered_algorithms(name)  # raises for an unknown collective
    every = registered_algorithms(one_sided=True)
    known = [a for a in every if wanted is None or a.collective in wanted]
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
    # In order of registration.  A name with levels gave a copy of the registered algorithm, which
    # has its function.
    ordered: list[tuple[Algorithm, tuple[int, ...]]] = []
    for registered in known:
        ordered += [(a, ks) for a, ks in chosen.items() if a.function is registered.function]
    return ordered


def _row(algorithm: Algorithm, sizes: list[int], results: list[Result]) -> Row:
    """Return the Row that sums up an algorithm's results over all sizes."""
    label = (algorithm.collective, algorithm.name)
    mine = [r for r in results if (r.task.collective, r.task.name) == label]
    mine.sort(key=lambda r: (r.task.size, r.task.roots[0]))
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
        sum(r.proofs for r in mine if r.before),
    )
