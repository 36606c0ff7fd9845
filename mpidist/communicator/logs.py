"""The library's log: lines that begin with the rank, by default of rank 0 only."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from ..arguments import one_of
from ..errors import ConfigError

LEVEL, RANKS = "MPIDIST_LOG", "MPIDIST_LOG_RANKS"
LEVELS = ("debug", "info", "warning", "error")
_handlers: list[logging.Handler] = []


def set_up_log(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Show the log on standard error, if ``MPIDIST_LOG`` sets a level.

    ``MPIDIST_LOG_RANKS`` is ``all`` or ranks like ``0,3``, by default 0.  Raises ConfigError if one
    of them has another value.
    """
    level = environ.get(LEVEL, "").strip().lower()
    wanted = environ.get(RANKS, "").strip() or "0"
    if level:
        one_of(LEVEL, level, LEVELS, error=ConfigError)
    if wanted != "all" and not all(part.strip().isdecimal() for part in wanted.split(",")):
        raise ConfigError(f"{RANKS}={wanted!r}: expected all, or ranks such as 0 or 0,3")
    log = logging.getLogger("mpidist")
    while _handlers:
        log.removeHandler(_handlers.pop())
    if not level or (wanted != "all" and rank not in map(int, wanted.split(","))):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    _handlers.append(handler)
