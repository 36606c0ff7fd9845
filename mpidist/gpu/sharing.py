"""Which ranks are on one GPU, by host and UUID: what CUDA_VISIBLE_DEVICES says does not matter."""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[str, str]


def ranks_by_gpu(places: Sequence[Place | None]) -> dict[Place, list[int]]:
    """Group the ranks by the GPU that they work with; those without one are left out.

    Parameters
    ----------
    places : sequence of (str, str) or None
        The host and the UUID of the GPU of every rank.
    """
    owners: dict[Place, list[int]] = {}
    for number, place in enumerate(places):
        if place is not None:
            owners.setdefault(place, []).append(number)
    return owners


def together(place: Place, ranks: Sequence[int]) -> str:
    """Say which ranks are on one GPU."""
    host, gpu = place
    return f"ranks {', '.join(map(str, ranks))} are all on GPU {gpu} of {host}"


def shared_gpus(places: Sequence[Place | None]) -> str | None:
    """Name the ranks of the first GPU that has several, and the GPU, or give None."""
    for place, ranks in ranks_by_gpu(places).items():
        if len(ranks) > 1:
            return together(place, ranks)
    return None
