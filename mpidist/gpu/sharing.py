"""Which ranks are on one GPU, by host and UUID: what CUDA_VISIBLE_DEVICES says does not matter."""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[str, str]


def shared_gpus(places: Sequence[Place | None]) -> str | None:
    """Name the ranks that are on one GPU, and the GPU, or give None.

    Parameters
    ----------
    places : sequence of (str, str) or None
        The host and the UUID of the GPU of every rank.
    """
    owners: dict[Place, list[int]] = {}
    for number, place in enumerate(places):
        if place is not None:
            owners.setdefault(place, []).append(number)
    for (host, gpu), ranks in owners.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} are all on GPU {gpu} of {host}"
    return None
