"""The beginning that a schedule has for all roots: it is run once, and its state is that of each.

A reduce often combines without regard to the root, and then sends the results to it::

    direct, block d on 4 ranks     root 0                root 1
    all roots together             0, 1, 2, 3 --> d
    each root                      d --> 0               d --> 1

A beginning has the first rounds of each rank, as many as are the same for all roots, and none whose
messages are sent or received in a later round.  What is in it then runs before all else and to its
end, whatever comes behind: in which order rounds run makes no difference to what they do.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .table import Form, Table

Forms = list[Form]
_ALL = np.int64(1 << 32)  # rounds: more than there are


def cut(forms: Forms, size: int, count: int) -> tuple[Forms, Forms] | None:
    """Return the forms of the beginning, for the first root, and of what follows, for all.

    Both have all seats.  None if there is no such beginning, or not for half of what is sent; or
    for a schedule with strands.
    """
    if any(form.families for form in forms):
        return None
    first = [part for form in forms if (part := form.of_first(size))]
    last = max(int(form.seats.max()) for form in forms) // size * size
    ends = [part for form in forms if (part := form.of((form.seats < size) | (form.seats >= last)))]
    if 2 * _sent(first, _agreeing(ends, size)) < _sent(first, np.full(size, _ALL)):
        return None
    lengths = _agreeing(forms, size)
    _shorten(lengths, Table(first, size, size, count))
    if not lengths.any():
        return None
    heads = [part for form in first for part in _parts(form, lengths[form.seats], False)]
    tails = [part for form in forms for part in _parts(form, lengths[form.seats % size], True)]
    return heads, tails


def _agreeing(forms: Forms, size: int) -> np.ndarray:
    """Return for each rank how many of its first rounds are the same for all roots.

    These are looked for among the first rounds that have the same steps on all ranks.
    """
    model = forms[0]
    alike = min(_same(model.signature, form.signature) for form in forms)
    rows = [*model.starts, len(model.numbers)][: alike + 1]
    first = np.empty((rows[-1], size), np.int32)  # of the first root, by rank
    for form in forms:
        mine = form.seats < size
        first[:, form.seats[mine]] = form.numbers[: rows[-1], mine]
    lengths = np.full(size, alike)
    for form in forms:
        ranks, numbers = form.seats % size, form.numbers
        for k, (begin, end) in enumerate(pairwise(rows)):
            differs = (numbers[begin:end] != first[begin:end].take(ranks, axis=1)).any(axis=0)
            if differs.any():
                lengths[ranks[differs]] = np.minimum(lengths[ranks[differs]], k)
                ranks, numbers = ranks[~differs], numbers[:, ~differs]
            if not ranks.size:
                break
    return lengths


def _sent(first: Forms, lengths: np.ndarray) -> int:
    """Return how many blocks are sent in the first rounds of each rank."""
    total = 0
    for form in first:
        blocks = np.append(0, np.cumsum(form.plan[:, 6]))
        total += blocks[np.minimum(lengths[form.seats], len(form.plan))].sum()
    return total


def _same(one: tuple, other: tuple) -> int:
    """Return how many of the first rounds of two signatures are the same."""
    pairs = zip(one, other)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _shorten(lengths: np.ndarray, table: Table) -> None:
    """Leave out rounds of each rank that have a message with a round that is not in."""
    ends = np.array([table.sender, table.receiver])
    seats, places = table.seat[ends], table.place[ends]
    while True:
        inside = places < lengths[seats]
        broken = inside & ~inside[::-1]
        if not broken.any():
            return
        np.minimum.at(lengths, seats[broken], places[broken])


def _parts(form: Form, lengths: np.ndarray, behind: bool) -> list[Form]:
    """Return the forms of one's seats up to the end of the beginning, or of those `behind` it."""
    last = len(form.signature)
    return [
        form.cut(np.flatnonzero(lengths == k), *((k, last) if behind else (0, k)))
        for k in np.unique(lengths).tolist()
    ]
