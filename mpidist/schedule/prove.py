"""The prover: it runs all ranks of an algorithm symbolically, for a proof or counter-example."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Integral

from ..arguments import whole
from ..errors import InvalidArgument, InvalidRank, ScheduleError, UnknownName
from .contract import COLLECTIVES
from .machine import Machine, Proof
from .registry import KEYWORDS, Algorithm, Choice, Groups, find, find_memory, registered
from .rounds import Schedule


def prove(
    collective: str,
    schedule: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    root: int = 0,
    *,
    blocks: int | None = None,
    arity: int = 2,
    groups: Groups | None = None,
    equal_blocks: bool = False,
    segments: int = 1,
    window: int | None = None,
    memory: str | None = None,
) -> Proof:
    """Prove that a schedule fulfils the contract of its collective, for one size and root.

    Parameters
    ----------
    collective : str
        Name of the collective, for example ``"allreduce"``.
    schedule : str, Algorithm, Choice or callable
        A registered algorithm, or any generator function ``(rank, size, *, root, arity, groups)``.
    size : int
        Number of ranks, ≥ 1.
    root : int
        The root; ignored for collectives without one.
    blocks : int, optional
        Number of blocks that the data are cut into; by default the number that the algorithm
        declares, else one, or one per rank for collectives with a part per rank.
    arity : int
        Arity of the tree, for algorithms that have one.
    groups : tuple of tuple of int, optional
        The ranks of each node; by default all ranks are on one node.
    equal_blocks : bool
        Whether all blocks have one length, so that a block may be put into another block's place.
    segments : int
        Number of pieces of every block, each with its own strand (see
        :func:`~mpidist.schedule.segmented`).
    window : int, optional
        Largest number of segments in flight at a time; by default all.
    memory : str, optional
        Name of the memory that a generator function with the steps Get, Put, Fold and Meet needs,
        as for :func:`~mpidist.schedule.algorithm`; registered algorithms declare it.

    Returns
    -------
    Proof
        Counts of rounds, messages and blocks, and the properties of the schedule.

    Raises
    ------
    ScheduleError
        The counter-example: rank, round and block where the contract is violated.
    """
    known, machine = prepare(
        collective,
        schedule,
        size,
        root,
        blocks=blocks,
        arity=arity,
        groups=groups,
        equal_blocks=equal_blocks,
        segments=segments,
        window=window,
        memory=memory,
    )
    proof = machine.run()
    if known.ordered and machine.unordered is not None:
        rank, block = machine.unordered
        message = f"{known.label} claims to combine in rank order, but does not"
        last = machine.memory.written[rank].get(("out", block))
        raise ScheduleError(message, rank=rank, round=last, block=block)
    if known.at_once and machine.memory.partial is not None:
        rank, number, block = machine.memory.partial
        message = f"{known.label} claims to combine all contributions at once, but combines some"
        raise ScheduleError(f"{message} of them before", rank=rank, round=number, block=block)
    if known.combines_as_tree(size, groups) and machine.memory.off_tree is not None:
        rank, number, block = machine.memory.off_tree
        message = f"{known.label} claims to combine as the fixed tree, but does not"
        raise ScheduleError(message, rank=rank, round=number, block=block)
    return proof


def prepare(
    collective: str,
    schedule: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    root: int = 0,
    *,
    blocks: int | None = None,
    arity: int = 2,
    groups: Groups | None = None,
    equal_blocks: bool = False,
    segments: int = 1,
    window: int | None = None,
    memory: str | None = None,
    machine: Callable[..., Machine] = Machine,
) -> tuple[Algorithm, Machine]:
    """Return the algorithm, and a machine with all ranks of its schedule, ready to run.

    Proofs, costs and pictures are made with it.  Parameters are those of :func:`prove`; `machine`
    is the class of the machine.
    """
    known, arity = resolved(
        collective,
        schedule,
        size,
        root,
        blocks=blocks,
        arity=arity,
        equal_blocks=equal_blocks,
        segments=segments,
        memory=memory,
    )
    count = blocks if blocks is not None else known.block_count(size, groups=groups)
    if segments == 1:
        parts = known.schedules(range(size), size, root, arity, groups)
    else:
        given = {"root": root, "arity": arity, "groups": groups}
        parts = [known.segmented(rank, size, segments, window, **given) for rank in range(size)]
    return known, machine(
        COLLECTIVES[collective],
        parts,
        root,
        count * segments,
        known.equal_blocks,
        memory=known.memory,
        groups=groups,
    )


def resolved(
    collective: str,
    schedule: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    root: int = 0,
    *,
    blocks: int | None = None,
    arity: int = 2,
    equal_blocks: bool = False,
    segments: int = 1,
    memory: str | None = None,
) -> tuple[Algorithm, int]:
    """Return the algorithm that is meant, and its arity, after a check of all parameters.

    They are those of :func:`prove`.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    whole("size", size)
    if not isinstance(root, Integral) or not 0 <= root < size:
        raise InvalidRank(root, size, "root")
    whole("segments", segments)
    whole("arity", arity, 2)
    if isinstance(schedule, str):
        schedule = find(collective, schedule)
    if isinstance(schedule, Choice):
        arity, schedule = schedule.arity or arity, schedule.algorithm
    known = schedule if isinstance(schedule, Algorithm) else registered(schedule)
    if known is None:
        if not callable(schedule):
            raise InvalidArgument(
                f"schedule={schedule!r}: expected a name, an algorithm, or a generator function"
            )
        known = _unregistered(collective, schedule, blocks, equal_blocks, memory)
    return known, arity


def _unregistered(
    collective: str,
    function: Callable[..., Schedule],
    blocks: int | None,
    equal_blocks: bool,
    memory: str | None,
) -> Algorithm:
    uses = frozenset(KEYWORDS) & frozenset(inspect.signature(function).parameters)
    name = getattr(function, "__name__", "schedule")
    return Algorithm(
        collective,
        name,
        function,
        blocks=blocks,
        equal_blocks=equal_blocks,
        uses=uses,
        memory=None if memory is None else find_memory(memory),
    )
