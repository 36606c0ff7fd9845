"""From which length on a result goes round the cache: one that would not stay in it anyway."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ..errors import ConfigError, InvalidArgument
from ..measure import format_size, parse_size
from .compiled import WHY_NOT, vector_width

VARIABLE = "MPIDIST_STREAM_BYTES"
LEAST_BYTES = 4 << 20
"""From here on: an allreduce and the first reading of its result, together, took 1.10 of the time
at 1 MiB, 1.03 at 2 MiB, 0.93 at 4 MiB, 0.82 at 16 MiB (2 ranks, 2 MiB of cache a core; 4 ranks on
these 2 cores 0.90 0.94 0.84 0.86; allgather alike).  A benchmark, which reads nothing, gains from
64 KiB on.
"""


def least_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Give the bytes of a result from which on it goes round the cache.

    Raises
    ------
    ConfigError
        If ``MPIDIST_STREAM_BYTES`` is neither a size nor ``none``.
    """
    text = environ.get(VARIABLE, "").strip()
    if text.lower() == "none":
        return sys.maxsize
    try:
        return parse_size(text) if text else LEAST_BYTES
    except InvalidArgument as error:
        raise ConfigError(f"{VARIABLE}={text!r}: allowed are none, and a size; {error}") from None


def streams(nbytes: int) -> bool:
    """Tell whether a result of so many bytes goes round the cache."""
    return nbytes >= least_bytes() and vector_width() > 0


def described() -> str:
    """Tell in a line what was compiled, and from where on results go round the cache."""
    if vector_width() == 0:
        return WHY_NOT
    least = least_bytes()
    never = f"no streaming stores: {VARIABLE}=none"
    which = never if least == sys.maxsize else f"streaming stores from {format_size(least)}"
    return f"{8 * vector_width()} bits, {which}"
