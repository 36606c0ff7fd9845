"""``MPIDIST_DEBUG=1``: ranks compare every collective before it runs; mismatches raise on all."""

from __future__ import annotations

import logging

from ..errors import CollectiveMismatch, MpidistError
from .call_site import call_site
from .sequencer import Sequencer

log = logging.getLogger("mpidist")
_WARNED: set[tuple[str, ...]] = set()  # call sites for which the warning has been logged


def check_same_call(
    sequencer: Sequencer, operation: str, error: MpidistError | None = None
) -> None:
    """Raise CollectiveMismatch on all ranks unless all are about to run the same collective.

    The error has a table of rank, call and call site.  `error` is what was raised for this rank's
    arguments: then `operation` is not compared, and the ranks raise their own errors if all have
    one.
    """
    summary = f"raised {type(error).__name__}: {error}" if error is not None else operation
    mine = (summary, error is not None, call_site())
    everyone = sequencer.set_up(
        operation, lambda: sequencer.everyone(mine), "agreement of MPIDIST_DEBUG=1", "an agreement"
    )
    sites = tuple(site for _, _, site in everyone)
    same = len({summary for summary, _, _ in everyone}) == 1
    failed = [failed for _, failed, _ in everyone]
    if error is not None and all(failed):
        raise error
    if same and not any(failed):
        if "in the background" in operation and len(set(sites)) > 1 and sites not in _WARNED:
            _WARNED.add(sites)
            rows = ", ".join(f"rank {rank} at {site}" for rank, site in enumerate(sites))
            log.warning(
                "rank %d: %s is begun in different places: %s; operations in the background must "
                "be begun in the same order on every rank",
                *(sequencer.backend.rank, operation, rows),
            )
        return
    rows = "\n".join(
        f"  rank {rank}: {summary}  at {site}" for rank, (summary, _, site) in enumerate(everyone)
    )
    mismatch = CollectiveMismatch(f"the ranks do not call the same collective:\n{rows}")
    raise mismatch from error
