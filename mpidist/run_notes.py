"""What a rank tells the process beside it under ``mpidist run``: that it starts MPI, and has."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

NOTES = "MPIDIST_RUN_NOTES"
"""Environment variable: the abstract address of the process that is beside this rank."""
STARTING, STARTED = "starting", "started"


def tell_run(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the process beside this rank; nothing where there is none.

    Parameters
    ----------
    state : {"starting", "started"}
        Of MPI in this process.
    """
    name = environ.get(NOTES)
    if name:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(state.encode(), f"\0{name}")
