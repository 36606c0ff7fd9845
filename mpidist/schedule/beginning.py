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

import numpy as np

from .table import Form, Table

Forms = list[Form]


def cut(forms: Forms, size: int, count: int) -> tuple[Forms, Forms] | None:
    """Return the forms of the beginning, for the first root, and of what follows, for all.

    Both have all seats.  None if there is no such beginning, or a schedule with strands.
    """
    if any(form.families for form in forms):
        return None
    lengths = _agreeing(forms, size)
    if not lengths.any():
        return None
    first = [part for form in forms if (part := form.of_first(size))]
    _shorten(lengths, Table(first, size, size, count))
    if not lengths.any():
        return None
    heads = [part for form in first for part in _parts(form, lengths[form.seats], False)]
    tails = [part for form in forms for part in _parts(form, lengths[form.seats % size], True)]
    return heads, tails


def _agreeing(forms: Forms, size: int) -> np.ndarray:
    """Return for each rank how many of its first rounds are the same for all roots."""
    lengths = np.full(size, np.iinfo(np.int32).max, np.int64)
    for model in forms:
        column = np.full(size, -1)
        mine = np.flatnonzero(model.seats < size)
        column[model.seats[mine]] = mine
        for form in forms:
            here = np.flatnonzero(column[form.seats % size] >= 0)  # so far alike
            rows = [*form.starts, len(form.numbers)]
            for k in range(_same(model.signature, form.signature)):
                span, ranks = slice(rows[k], rows[k + 1]), form.seats[here] % size
                one = form.numbers[span].take(here, axis=1)
                differs = (one != model.numbers[span].take(column[ranks], axis=1)).any(axis=0)
                lengths[ranks[differs]] = np.minimum(lengths[ranks[differs]], k)
                here = here[~differs]
            ranks = form.seats[here] % size
            lengths[ranks] = np.minimum(lengths[ranks], _same(model.signature, form.signature))
    return lengths


def _same(one: tuple, other: tuple) -> int:
    """Return how many of the first rounds of two signatures are the same."""
    pairs = zip(one, other)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _shorten(lengths: np.ndarray, table: Table) -> None:
    """Leave out rounds of each rank that have a message with a round that is not in."""
    place = np.empty(len(table.seat), np.int64)  # of each round among those of its seat
    rounds, k = table.first, 0
    while rounds.size:
        place[rounds] = k
        rounds, k = table.following[rounds], k + 1
        rounds = rounds[rounds >= 0]
    ends = np.array([table.sender, table.receiver])
    seats, places = table.seat[ends], place[ends]
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
