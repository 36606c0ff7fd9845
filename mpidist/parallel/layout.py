"""Which parameters share a bucket: few large messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def assign_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    bucket_bytes: int,
    first_bucket_bytes: int,
    order: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Assign parameters to buckets in the order in which a backward pass computes gradients.

    The first bucket is smaller so that communication begins early (the rule of PyTorch's reducer).

    Parameters
    ----------
    nbytes : sequence of int
        Size of each parameter in bytes.
    kinds : sequence
        Parameters of different kinds (dtypes) never share a bucket.
    bucket_bytes, first_bucket_bytes : int
        Most bytes in a bucket, and in the first one.  A larger parameter has a bucket for itself.
    order : sequence of int, optional
        The parameters' indices as their gradients become ready; by default the last parameter is
        the first, as in a module whose layers stand in the order in which forward meets them.

    Returns
    -------
    list of tuple of int
        Indices of parameters; buckets in the order in which they become complete.

    Examples
    --------
    >>> assign_buckets([4, 4, 4, 4], "aaaa", 8, 4)
    [(3,), (2, 1), (0,)]
    """
    order = list(reversed(range(len(nbytes)))) if order is None else list(order)
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    limit = first_bucket_bytes
    for index in order:
        kind = kinds[index]
        if kind in filling and nbytes[index] > room[kind]:
            closed.append(filling.pop(kind))
        if kind not in filling:
            filling[kind], room[kind] = [], limit
            limit = bucket_bytes
        filling[kind].append(index)
        room[kind] -= nbytes[index]
    complete = {index: moment for moment, index in enumerate(order)}
    return sorted(map(tuple, [*closed, *filling.values()]), key=lambda b: complete[b[-1]])
