"""Slots: each rank copies what others need into a slot, where they read it; n bytes, p ranks.

Long arrays go piece by piece.  Where a rank writes a piece while others read the one before, the
pieces take turns in the two halves of a slot::

    slot0   write piece 0 |  read piece 0 | write piece 2 |  read piece 2 | …
    slot1                 | write piece 1 |  read piece 1 | write piece 3 | …

No meeting is needed at the end: two slots take turns, so one is used again only when all ranks
have met in the next call.  Every reduction combines in the order of ``direct``, so it has the same
bits.
"""

from collections.abc import Callable, Iterator, Sequence

from ..schedule.registry import algorithm
from ..schedule.rounds import Copy, Fold, Get, Meet, Round, Step
from .relabel import inward, onward, whole_fold

SLOT = "slot0"


@algorithm(
    "allreduce", "slots", blocks=lambda size: size, ordered=True, memory="slots", at_once=True
)
def allreduce_slots(rank: int, size: int, *, pieces: int) -> Iterator[Round]:
    """Rank d combines block d of all slots, then every rank fetches the blocks of the others.

    Rounds: 4 and 2 meetings for each piece.  Bytes per rank: 2(p-1)/p n read.

    Block 2 on 5 ranks::

        0, 1, 3, 4 --> 2 --> 0, 1, 3, 4
    """
    for k in range(pieces):
        yield from _combined(rank, size, pieces, k, here=True, there=True)
        yield _fetched(rank, size, pieces, k)


@algorithm(
    "allreduce",
    "slots_one_shot",
    blocks=lambda size: size,
    ordered=True,
    memory="slots",
    at_once=True,
)
def allreduce_slots_one_shot(rank: int, size: int) -> Iterator[Round]:
    """Every rank combines all blocks of all slots, each block in the order of its owner.

    Rounds: 2 and 1 meeting.  Bytes per rank: (p-1) n read.

    Into rank 2 of 5::

        0, 1, 3, 4 --> 2
    """
    every = range(size)
    yield Copy(every, every, target=SLOT)
    yield Meet(every)
    yield whole_fold(size, SLOT, own="in")


@algorithm("reduce", "slots", blocks=lambda size: size, ordered=True, memory="slots", at_once=True)
def reduce_slots(rank: int, size: int, *, root: int, pieces: int) -> Iterator[Round]:
    """Rank d combines block d of all slots, then the root fetches the blocks of the others.

    Rounds: 4 and 2 meetings for each piece.  Bytes per rank: (p-1)/p n read, by the root twice
    that.

    Block 2 on 5 ranks, root 0::

        0, 1, 3, 4 --> 2 --> 0
    """
    for k in range(pieces):
        yield from _combined(rank, size, pieces, k, here=rank == root)
        if rank == root:
            yield _fetched(rank, size, pieces, k)


@algorithm(
    "reduce", "slots_one_shot", blocks=lambda size: size, ordered=True, memory="slots", at_once=True
)
def reduce_slots_one_shot(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The root combines all slots, each block in the order of its owner.

    Rounds: 2 and 1 meeting.  Bytes per rank: (p-1) n read by the root.

    5 ranks, root 0::

        1, 2, 3, 4 --> 0
    """
    every = range(size)
    if rank != root:
        yield Copy(every, every, target=SLOT)
    yield Meet(every)
    if rank == root:
        yield whole_fold(size, SLOT, own="in")


@algorithm("reduce_scatter", "slots", ordered=True, memory="slots", at_once=True)
def reduce_scatter_slots(rank: int, size: int, *, pieces: int) -> Iterator[Round]:
    """Rank d combines block d of all slots.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank:
    (p-1)/p n read.

    Block 2 on 5 ranks::

        0, 1, 3, 4 --> 2
    """
    others = tuple(onward(rank, size))

    def write(k: int, half: str) -> list[Step]:
        return [Copy(tuple(b * pieces + k for b in others), others, target=half)]

    def read(k: int, half: str) -> list[Step]:
        return [Fold(inward(rank, size), rank, half, to=rank * pieces + k, own="in")]

    yield from _pipelined(size, pieces, write, read)


@algorithm("allgather", "slots", memory="slots")
def allgather_slots(rank: int, size: int, *, pieces: int) -> Iterator[Round]:
    """Every rank fetches the blocks of the others from their slots.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank:
    (p-1)/p n read.

    Block 2 on 5 ranks::

        2 --> 0, 1, 3, 4
    """
    yield from _concatenated(rank, size, pieces, sends=True, receives=True)


@algorithm("gather", "slots", memory="slots")
def gather_slots(rank: int, size: int, *, root: int, pieces: int) -> Iterator[Round]:
    """The root fetches the blocks of the others from their slots.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank:
    (p-1)/p n read by the root.

    5 ranks, root 0::

        1, 2, 3, 4 --> 0
    """
    yield from _concatenated(rank, size, pieces, sends=rank != root, receives=rank == root)


@algorithm("broadcast", "slots", memory="slots")
def broadcast_slots(rank: int, size: int, *, root: int, pieces: int) -> Iterator[Round]:
    """The others fetch each piece from the root's slot, while it writes the next one.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank: n
    read.

    5 ranks, root 0::

        0 --> 1, 2, 3, 4
    """

    def write(k: int, half: str) -> list[Step]:
        return [Copy(k, 0, target=half)] if rank == root else []

    def read(k: int, half: str) -> list[Step]:
        return [Copy(k, k) if rank == root else Get(root, 0, source=half, to=k)]

    yield from _pipelined(size, pieces, write, read)


@algorithm("scatter", "slots", memory="slots")
def scatter_slots(rank: int, size: int, *, root: int, pieces: int) -> Iterator[Round]:
    """Every rank fetches its block from the root's slot.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank: n/p
    read.

    5 ranks, root 0::

        0 --> 1, 2, 3, 4
    """
    others = tuple(onward(rank, size))

    def write(k: int, half: str) -> list[Step]:
        if rank != root:
            return []
        return [Copy(tuple(peer * pieces + k for peer in others), others, target=half)]

    def read(k: int, half: str) -> list[Step]:
        to = rank * pieces + k
        return [Copy(to, to) if rank == root else Get(root, rank, source=half, to=to)]

    yield from _pipelined(size, pieces, write, read)


@algorithm("alltoall", "slots", memory="slots")
def alltoall_slots(rank: int, size: int, *, pieces: int) -> Iterator[Round]:
    """Every rank fetches its block from the slots of all others.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank:
    (p-1)/p n read.

    5 ranks, what rank 2 fetches::

        0, 1, 3, 4 --> 2
    """
    others = tuple(onward(rank, size))

    def write(k: int, half: str) -> list[Step]:
        return [Copy(tuple(peer * pieces + k for peer in others), others, target=half)]

    def read(k: int, half: str) -> list[Step]:
        own = Copy(rank * pieces + k, rank * pieces + k)
        return [own, *(Get(peer, rank, source=half, to=peer * pieces + k) for peer in others)]

    yield from _pipelined(size, pieces, write, read)


@algorithm("scan", "slots", ordered=True, memory="slots")
def scan_slots(rank: int, size: int, *, pieces: int) -> Iterator[Round]:
    """Every rank combines the slots of the ranks up to itself.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank: at
    most (p-1) n read.

    Into rank 2 of 5::

        0, 1 --> 2
    """

    def read(k: int, half: str) -> list[Step]:
        return [Fold(range(rank + 1), 0, half, to=k, own="in")]

    yield from _pipelined(size, pieces, _unless_last(rank, size), read)


@algorithm("exscan", "slots", ordered=True, memory="slots")
def exscan_slots(rank: int, size: int, *, pieces: int) -> Iterator[Round]:
    """Every rank combines the slots of the ranks before it.

    Rounds: 2 and 1 meeting for each piece, in the halves of a slot in turn.  Bytes per rank: at
    most (p-1) n read.

    Into rank 2 of 5::

        0, 1 --> 2
    """

    def read(k: int, half: str) -> list[Step]:
        return [Fold(range(rank), 0, half, to=k)] if rank else []

    yield from _pipelined(size, pieces, _unless_last(rank, size), read)


# -- parts ----------------------------------------------------------------------------------------


def _combined(
    rank: int, size: int, pieces: int, k: int, here: bool, there: bool = False
) -> Iterator[Round]:
    """Yield the rounds that combine piece k of block `rank`: `here` for this rank's result.

    If `there`, or not `here`, the others, if there are some, fetch it from the slot.  They have
    read what was in the slot before, when all have met.
    """
    others, piece = tuple(onward(rank, size)), rank * pieces + k
    target = "out" if here else "tmp"
    yield Copy(tuple(block * pieces + k for block in others), others, target=SLOT)
    yield Meet(range(size))
    yield Fold(inward(rank, size), rank, SLOT, target, to=piece, own="in")
    if others and (there or not here):
        yield Copy(piece, rank, target, SLOT)
    yield Meet(range(size))


def _fetched(rank: int, size: int, pieces: int, k: int) -> Round:
    """Return the round that fetches piece k of the others' blocks, which they have combined."""
    return tuple(Get(peer, peer, SLOT, to=peer * pieces + k) for peer in onward(rank, size))


def _concatenated(
    rank: int, size: int, pieces: int, sends: bool, receives: bool
) -> Iterator[Round]:
    """Yield the rounds of allgather and gather: which ranks write their block, and which read."""

    def write(k: int, half: str) -> list[Step]:
        return [Copy(rank * pieces + k, 0, target=half)] if sends else []

    def read(k: int, half: str) -> list[Step]:
        if not receives:
            return []
        own = Copy(rank * pieces + k, rank * pieces + k)
        peers = onward(rank, size)
        return [own, *(Get(peer, 0, source=half, to=peer * pieces + k) for peer in peers)]

    yield from _pipelined(size, pieces, write, read)


def _unless_last(rank: int, size: int) -> Callable[[int, str], Sequence[Step]]:
    """Return what copies a piece of a whole input for the ranks behind this one."""
    return lambda k, half: [Copy(k, 0, target=half)] if rank + 1 < size else []


def _pipelined(
    size: int,
    pieces: int,
    write: Callable[[int, str], Sequence[Step]],
    read: Callable[[int, str], Sequence[Step]],
) -> Iterator[Round]:
    """Yield the rounds that write each piece in the round in which they read the one before.

    ``write(k, half)`` returns the steps that copy piece k into that half of this rank's slot, and
    ``read(k, half)`` those that read it in the slots of the others.
    """
    yield tuple(write(0, "slot0"))
    for k in range(pieces):
        half, other = f"slot{k % 2}", f"slot{(k + 1) % 2}"
        yield Meet(range(size))
        yield (*read(k, half), *(write(k + 1, other) if k + 1 < pieces else ()))
