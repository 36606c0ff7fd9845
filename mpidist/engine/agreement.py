"""``MPIDIST_DEBUG=1``: collectives are agreed on first, so that mismatches raise everywhere."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from ..errors import CollectiveMismatch, MpidistError
from .service import Service

log = logging.getLogger("mpidist")
_WARNED: set[tuple[str, ...]] = set()  # call sites of which the user has been told
_HERE = str(Path(__file__).parents[1]) + os.sep


def call_site() -> str:
    """Give file and line of the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def check_alike(service: Service, what: str, error: MpidistError | None = None) -> None:
    """Compare what the ranks are about to do.

    Parameters
    ----------
    service : Service
        Of the communicator.
    what : str
        This rank's collective in words: kind, op, root, count, dtype.
    error : MpidistError, optional
        What this rank's arguments raised; then `what` is not compared.

    Raises
    ------
    CollectiveMismatch
        With a table of who called what where, if the ranks differ or another rank raised.
    """
    told = f"raised {type(error).__name__}: {error}" if error is not None else what
    mine = (told, error is not None, call_site())
    everyone = service.set_up(
        what, lambda: service.everyone(mine), "agreement of MPIDIST_DEBUG=1", "an agreement"
    )
    sites = tuple(site for _, _, site in everyone)
    same = len({told for told, _, _ in everyone}) == 1
    failed = [failed for _, failed, _ in everyone]
    if error is not None and all(failed):
        raise error
    if same and not any(failed):
        if "in the background" in what and len(set(sites)) > 1 and sites not in _WARNED:
            _WARNED.add(sites)
            rows = ", ".join(f"rank {rank} at {site}" for rank, site in enumerate(sites))
            log.warning(
                "rank %d: %s is begun in different places: %s; operations in the background must "
                "be begun in the same order on every rank",
                *(service.backend.rank, what, rows),
            )
        return
    rows = "\n".join(
        f"  rank {rank}: {told}  at {site}" for rank, (told, _, site) in enumerate(everyone)
    )
    mismatch = CollectiveMismatch(f"the ranks do not call the same collective:\n{rows}")
    raise mismatch from error
