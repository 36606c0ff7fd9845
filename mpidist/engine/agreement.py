"""``MPIDIST_DEBUG=1``: ranks compare every collective before it runs; mismatches raise on all."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ..errors import CollectiveMismatch, MpidistError
from .service import Service

log = logging.getLogger("mpidist")
_WARNED: set[tuple[str, ...]] = set()  # call sites for which the warning has been logged
_HERE = str(Path(__file__).parents[1]) + os.sep


_WRAPPERS = ("contextlib", "functools", "typing_extensions", "warnings")


class _Within(dict[str, bool]):
    """Whether a source file, the key, belongs to this package, to PyTorch, or to `_WRAPPERS`.

    Those are the modules whose functions stand between PyTorch's and the user's in a call.
    """

    def __missing__(self, filename: str) -> bool:
        torch = getattr(sys.modules.get("torch"), "__file__", None)  # loaded if a file of it runs
        packages = _HERE if torch is None else (_HERE, str(Path(torch).parent) + os.sep)
        wrappers = [getattr(sys.modules.get(name), "__file__", None) for name in _WRAPPERS]
        self[filename] = filename.startswith(packages) or filename in wrappers
        return self[filename]


WITHIN = _Within()


def users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame, from `frame` outwards, of neither this package nor PyTorch."""
    while WITHIN[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


_BEGUN = threading.local()  # site: where the operation was begun that this thread performs


def begun_here(act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls `act`, in which :func:`call_site` is that of this call.

    It may be called in another thread, or where the operation is waited for.
    """
    site = call_site()

    def performed() -> None:
        _BEGUN.site = site
        try:
            act()
        finally:
            _BEGUN.site = None

    return performed


def call_site() -> str:
    """Return "FILE:LINE" of the innermost frame outside this package and PyTorch.

    In a function of :func:`begun_here`, it is the place where that was made.
    """
    begun = getattr(_BEGUN, "site", None)
    if begun is not None:
        return begun
    frame = users_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def check_same_call(service: Service, operation: str, error: MpidistError | None = None) -> None:
    """Raise CollectiveMismatch on all ranks unless all are about to run the same collective.

    Parameters
    ----------
    service : Service
        The service of the communicator.
    operation : str
        Description of this rank's collective: kind, op, root, count, dtype.
    error : MpidistError, optional
        The error raised for this rank's arguments; `operation` is then not compared.  If all ranks
        have one, it is raised.

    Raises
    ------
    CollectiveMismatch
        If the ranks differ or another rank raised; with a table of rank, call and call site.
    """
    summary = f"raised {type(error).__name__}: {error}" if error is not None else operation
    mine = (summary, error is not None, call_site())
    everyone = service.set_up(
        operation, lambda: service.everyone(mine), "agreement of MPIDIST_DEBUG=1", "an agreement"
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
                *(service.backend.rank, operation, rows),
            )
        return
    rows = "\n".join(
        f"  rank {rank}: {summary}  at {site}" for rank, (summary, _, site) in enumerate(everyone)
    )
    mismatch = CollectiveMismatch(f"the ranks do not call the same collective:\n{rows}")
    raise mismatch from error
