"""The elements of a schedule: steps, rounds and strands, without buffers, tags or I/O.

A *schedule* is an iterable of rounds for one rank.  A *round* is one step, a tuple of steps that
are in flight together, or a :class:`Parallel` of independent strands::

    yield Send(right, blocks=3), Reduce(left, blocks=2)     # one round: both at once
    yield parallel(upper, lower)                            # two schedules side by side

Ranks that share memory (see :mod:`.memories`) also reach each other's buffers::

    yield Meet(range(size))                                 # all have come this far
    yield Fold(range(size), blocks=rank)                    # combine the block of all ranks
    yield tuple(Get(peer, blocks=peer) for peer in others)  # fetch the blocks of the others
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from .ranks import ONE

Blocks = int | range | tuple[int, ...]
Buffer = str
BUFFERS = ("in", "out", "tmp")


@dataclass(slots=True, unsafe_hash=True)
class Send:
    """Send `blocks` of `buffer` to `peer` as one message."""

    peer: int
    blocks: Blocks = 0
    buffer: Buffer = "out"


@dataclass(slots=True, unsafe_hash=True)
class Recv:
    """Receive one message from `peer` into `blocks` of `buffer`, overwriting them."""

    peer: int
    blocks: Blocks = 0
    buffer: Buffer = "out"


@dataclass(slots=True, unsafe_hash=True)
class Reduce:
    """Receive one message from `peer` and combine it into `blocks` of `buffer`.

    The operand of the lower rank is the left one, so that all ranks that combine the same two
    values get the same bits.
    """

    peer: int
    blocks: Blocks = 0
    buffer: Buffer = "out"


@dataclass(slots=True, unsafe_hash=True)
class Copy:
    """Copy blocks within this rank, after the messages of the round have arrived.

    `source_blocks` of the buffer `source` go to `target_blocks` of the buffer `target`, in order.
    """

    source_blocks: Blocks
    target_blocks: Blocks
    source: Buffer = "in"
    target: Buffer = "out"


@dataclass(slots=True, unsafe_hash=True)
class Get:
    """Copy `blocks` of the buffer `source` of `peer` into blocks `to` of this rank's `target`.

    `to` are the same blocks by default, in :class:`Put` and :class:`Fold` too.
    """

    peer: int
    blocks: Blocks = 0
    source: Buffer = "out"
    target: Buffer = "out"
    to: Blocks | None = None


@dataclass(slots=True, unsafe_hash=True)
class Put:
    """Store `blocks` of this rank's buffer `source` in blocks `to` of `target` of `peer`."""

    peer: int
    blocks: Blocks = 0
    source: Buffer = "out"
    target: Buffer = "out"
    to: Blocks | None = None


@dataclass(slots=True, unsafe_hash=True)
class Fold:
    """Combine `blocks` of the buffer `source` of all `peers` into blocks `to` of this `target`.

    The block of the first peer is combined with those of the others in the order given; a rank
    lower than the first is the left operand.  ``(r, r-1, …, 0, r+1, …)`` is the order in which rank
    r combines in the algorithm ``direct``, and gives the same bits.  If `own` is a buffer, this
    rank's own operand is in its blocks `to`, instead of in `blocks` of `source`.
    """

    peers: range | tuple[int, ...]
    blocks: Blocks = 0
    source: Buffer = "in"
    target: Buffer = "out"
    to: Blocks | None = None
    own: Buffer | None = None


@dataclass(slots=True, unsafe_hash=True)
class Meet:
    """Wait until the ranks `awaits`, by default the whole `group`, have come to this meeting.

    What they did before is then visible.  All ranks of the group meet equally often; a meeting is
    a round of its own.
    """

    group: range | tuple[int, ...]
    awaits: range | tuple[int, ...] | None = None


@dataclass(slots=True, unsafe_hash=True)
class Combine:
    """Combine blocks of several places in the order given, and store the result in each target.

    A place is (rank, buffer, blocks), this rank's own too; all of them have equally many blocks.
    """

    operands: tuple[tuple[int, Buffer, Blocks], ...]
    targets: tuple[tuple[int, Buffer, Blocks], ...]


@dataclass(slots=True, unsafe_hash=True)
class Signal:
    """Post a word to `peer`, or to another strand of this rank, on a `channel`; do not wait.

    What earlier rounds did is visible to whoever waits for it; if `relaxed`, only what was before
    this strand.  One strand posts the words of a channel.
    """

    peer: int
    channel: str
    relaxed: bool = False


@dataclass(slots=True, unsafe_hash=True)
class Wait:
    """Wait for the next word that `peer` posts to this rank on a `channel`.

    Other waits may be in the round, and no other steps.  One strand waits for a channel's words.
    """

    peer: int
    channel: str
    relaxed: bool = False


Step = Send | Recv | Reduce | Copy | Get | Put | Fold | Meet | Combine | Signal | Wait
ONE_SIDED = (Get, Put, Fold, Meet, Combine, Signal, Wait)
"""The steps in the memory of other ranks, which send no message."""


@dataclass(slots=True)
class Parallel:
    """Strands: schedules that run side by side, at most `window` at a time (None: all of them).

    No strand may use a block that another one writes.  Messages match within a strand only.
    Strand ``k + window`` starts when strand k has ended.  This is the same on every rank, so the
    lowest unfinished strand is in progress on all ranks, and a window cannot cause a deadlock.
    """

    strands: tuple[Iterable, ...]
    window: int | None = field(default=None)


Round = Step | tuple[Step, ...] | Parallel
Schedule = Iterable[Round]


@dataclass(slots=True)
class Named:
    """A schedule with a name for each of its rounds, which counter-examples have.

    A ``Parallel`` is no round, and has no name.
    """

    rounds: list[Round]
    names: list[str]

    def __iter__(self) -> Iterator[Round]:
        return iter(self.rounds)


def blocks(n: int, p: int) -> list[slice]:
    """Cut ``range(n)`` into `p` contiguous blocks, the first ``n % p`` of them one longer.

    Parameters
    ----------
    n : int
        Number of elements, ≥ 0.
    p : int
        Number of blocks, ≥ 1.

    Returns
    -------
    list of slice
        `p` slices that cover ``range(n)`` in order; empty ones where ``n < p``.

    Examples
    --------
    >>> blocks(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    if n < 0 or p < 1:
        raise ValueError(f"blocks(n={n}, p={p}): expected n >= 0 and p >= 1")
    base, longer = divmod(n, p)
    starts = [i * base + min(i, longer) for i in range(p + 1)]
    return [slice(a, b) for a, b in zip(starts, starts[1:])]


def block_tuple(spec: Blocks) -> tuple[int, ...]:
    """Return the block numbers of `spec`, in the order in which a message has them."""
    return (spec,) if isinstance(spec, ONE) else tuple(spec)


def steps_of(item: Step | tuple[Step, ...]) -> tuple[Step, ...]:
    """Return a round as a tuple of steps, also if it is a single step."""
    return item if isinstance(item, tuple) else (item,)


def parallel(*schedules: Schedule, window: int | None = None) -> Parallel:
    """Return schedules as concurrent strands: none may use a block that another writes.

    A message of a strand is received by the same strand of the peer.

    Parameters
    ----------
    *schedules : iterable of rounds
        The strands, in the same order on every rank.
    window : int, optional
        Largest number of strands in progress at a time; by default all.

    Returns
    -------
    Parallel
        The strands, for ``yield parallel(a, b)``.
    """
    if window is not None and window < 1:
        raise ValueError(f"parallel(window={window}): expected a number >= 1")
    return Parallel(tuple(schedules), window)


def on(
    group: Sequence[int] | Callable[[int], int],
    schedule: Schedule,
    blocks: Callable[[int], Blocks] | None = None,
    buffers: Mapping[Buffer, Buffer] | None = None,
) -> Iterator[Round]:
    """Yield a schedule that was written for ranks ``0 … p - 1``, for those in `group`.

    Parameters
    ----------
    group : sequence of int, or callable
        ``group[i]``, or ``group(i)``, is the rank that takes the place of rank `i` of `schedule`.
    schedule : iterable of rounds
        This rank's rounds, with ranks numbered within the group.
    blocks : callable, optional
        Maps a block of `schedule` to one or more blocks of the enclosing schedule; by default to
        the same block.
    buffers : mapping, optional
        Buffers to use in place of others: ``{"in": "out"}`` where the input of `schedule` is what
        an earlier part has left in ``out``.  Copies of blocks onto themselves are left out.

    Yields
    ------
    Round
        The same rounds with ranks, blocks and buffers of the enclosing schedule.
    """
    ranks = group if callable(group) else group.__getitem__
    for item in schedule:
        if isinstance(item, Parallel):
            strands = tuple(on(ranks, s, blocks, buffers) for s in item.strands)
            yield Parallel(strands, item.window)
        elif buffers is not None:
            placed = (_rename(_place(s, ranks, blocks), buffers) for s in steps_of(item))
            yield tuple([step for step in placed if step is not None])
        elif isinstance(item, tuple):
            yield tuple([_place(step, ranks, blocks) for step in item])
        else:
            yield _place(item, ranks, blocks)


def _place(step: Step, ranks: Callable[[int], int], to: Callable[[int], Blocks] | None) -> Step:
    if isinstance(step, (Send, Recv, Reduce)):
        blocks = step.blocks
        if to is not None:
            blocks = to(blocks) if isinstance(blocks, ONE) else _refine(blocks, to)
        return type(step)(ranks(step.peer), blocks, step.buffer)
    if isinstance(step, Copy):
        if to is None:
            return step
        return Copy(
            _refine(step.source_blocks, to),
            _refine(step.target_blocks, to),
            step.source,
            step.target,
        )
    if isinstance(step, Meet):
        awaits = None if step.awaits is None else tuple(map(ranks, step.awaits))
        return Meet(tuple(map(ranks, step.group)), awaits)
    if isinstance(step, (Signal, Wait)):
        return replace(step, peer=ranks(step.peer))
    if isinstance(step, Combine):
        operands, targets = (
            tuple((ranks(r), b, n if to is None else _refine(n, to)) for r, b, n in places)
            for places in (step.operands, step.targets)
        )
        return Combine(operands, targets)
    blocks = step.blocks if to is None else _refine(step.blocks, to)
    target = step.to if step.to is None or to is None else _refine(step.to, to)
    if isinstance(step, Fold):
        peers = tuple(map(ranks, step.peers))
        return Fold(peers, blocks, step.source, step.target, target, step.own)
    return type(step)(ranks(step.peer), blocks, step.source, step.target, target)


_BUFFER_FIELDS = ("buffer", "source", "target", "own")


def _rename(step: Step, buffers: Mapping[Buffer, Buffer]) -> Step | None:
    """Return a step with its buffers renamed; None for what is then a copy onto itself."""
    if isinstance(step, Combine):
        operands, targets = (
            tuple((rank, buffers.get(b, b), blocks) for rank, b, blocks in places)
            for places in (step.operands, step.targets)
        )
        return Combine(operands, targets)
    if isinstance(step, (Meet, Signal, Wait)):
        return step
    old = {name: getattr(step, name) for name in _BUFFER_FIELDS if hasattr(step, name)}
    step = replace(step, **{name: buffers.get(buffer, buffer) for name, buffer in old.items()})
    if not isinstance(step, Copy) or step.source != step.target:
        return step
    same = block_tuple(step.source_blocks) == block_tuple(step.target_blocks)
    return None if same else step


def _refine(spec: Blocks, to: Callable[[int], Blocks]) -> Blocks:
    if isinstance(spec, ONE):
        return to(spec)
    return tuple(fine for coarse in spec for fine in block_tuple(to(coarse)))


def segmented(
    make: Callable[[], Schedule], size: int, segments: int, window: int | None = None
) -> Schedule:
    """Return a schedule pipelined over segments: each block is cut into `segments` pieces.

    Segmentation is ``parallel`` over segments: strand k runs the whole schedule on piece k of
    every block.  (Merging the segments into one sequence of rounds would deadlock reduce +
    broadcast trees deeper than two.)

    Parameters
    ----------
    make : callable
        Returns a new copy of this rank's schedule.
    size : int
        Number of ranks.
    segments : int
        Pieces per block; piece k of block b is block ``b * segments + k`` of the result.
    window : int, optional
        Largest number of segments in progress at a time; by default all.
    """
    if segments == 1:
        return make()
    everyone = range(size)
    strands = (
        on(everyone, make(), partial(_piece, segments=segments, k=k)) for k in range(segments)
    )
    return (parallel(*strands, window=window),)


def _piece(block: int, segments: int, k: int) -> int:
    return block * segments + k
