"""Orders of ranks that several families share, and renumbering of a schedule for any root."""

from collections.abc import Callable, Iterator

from ..schedule.ranks import choose, without
from ..schedule.rounds import Fold, Parallel, Recv, Round, Schedule, Send, on, steps_of


def turned(
    rank: int, size: int, root: int, schedule: Callable[[int, int], Schedule], blocks: bool = False
) -> Iterator[Round]:
    """Return a rank's part of a schedule written for root 0, renumbered for `root`.

    With `blocks`, block i belongs to rank i and is renumbered with it.
    """
    if isinstance(root, int) and root == 0:  # of many roots, 0 is as the others
        return iter(schedule(rank, size))

    def place(index: int) -> int:
        return (index + root) % size

    return on(place, schedule((rank - root) % size, size), place if blocks else None)


def sparing(root: int, rank: int, schedule: Schedule) -> Iterator[Round]:
    """Yield the schedule of `rank` without messages to `root`, which has all blocks already."""
    for item in schedule:
        if isinstance(item, Parallel):
            yield Parallel(tuple(sparing(root, rank, s) for s in item.strands), item.window)
            continue
        steps = steps_of(item)
        if rank == root:
            yield tuple([step for step in steps if not isinstance(step, Recv)])
        else:
            yield without(steps, [isinstance(s, Send) and s.peer == root for s in steps])


def outward(rank: int, size: int) -> list[int]:
    """Return the other ranks: the lower ones from near to far, then the higher ones alike.

    This keeps operands in rank order: each new one joins the partial result at an end.
    """
    if isinstance(rank, int):  # of one rank, without a question for each of the others
        return [*range(rank - 1, -1, -1), *range(rank + 1, size)]
    return [choose(i <= rank, rank - i, i) for i in range(1, size)]


def onward(rank: int, size: int) -> list[int]:
    """Return the other ranks from the right neighbour on: each rank begins with another one."""
    return [(rank + i) % size for i in range(1, size)]


def powers(size: int) -> list[int]:
    """Return 1, 2, 4, …: the powers of two below `size`."""
    return [1 << k for k in range((size - 1).bit_length())]


def inward(rank: int, size: int) -> tuple[int, ...]:
    """Return all ranks in the order in which `rank` combines them: itself, then `outward`."""
    return (rank, *outward(rank, size))


def whole_fold(size: int, source: str = "in", own: str | None = None) -> tuple[Fold, ...]:
    """Return the round that combines all blocks, each in the order of its owner.

    Two ranks have one order, and so one step.
    """
    if size <= 2:
        return (Fold(range(size), blocks=range(size), source=source, own=own),)
    return tuple(
        Fold(inward(block, size), blocks=block, source=source, own=own) for block in range(size)
    )
