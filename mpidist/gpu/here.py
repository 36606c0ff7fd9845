"""What this rank has to say when the paths are chosen; no device is needed for that."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ..device.find import find_device, kind_of_device, visible, why_no_device
from ..errors import ConfigError
from .aware import NO, VARIABLE, YES, Awareness, detect, loaded_library
from .choice import Seen
from .nccl import why_not_here
from .paths import Rank, forced_path
from .staged import CHUNK_BYTES

CHUNK = "MPIDIST_GPU_CHUNK_BYTES"


def this_rank(native: bool, environ: Mapping[str, str] = os.environ) -> Rank:
    """Say what the choice of paths has to know of this rank.

    Parameters
    ----------
    native : bool
        Whether messages go by an MPI library.
    environ : mapping
        The environment.
    """
    no_nccl = why_not_here()
    seen = None
    if why_no_device(environ) is None:
        device = find_device()
        mine, gpus = device.identity(), visible(environ)
        # The emulated one may have a name that only it knows.
        gpus, number = (gpus, gpus.index(mine)) if mine in gpus else ((mine,), 0)
        seen = Seen(socket.gethostname(), gpus, number)
    return Rank(
        awareness(native, environ), forced_path(environ), chunk_bytes(environ), no_nccl, seen
    )


def awareness(native: bool, environ: Mapping[str, str] = os.environ) -> Awareness:
    """Say whether messages can go from the device's memory."""
    if not native:
        return Awareness(NO, "messages do not go by MPI here")
    if kind_of_device(environ) == "host" and not environ.get(VARIABLE):
        return Awareness(YES, "an emulated device has addresses that any library takes")
    return detect(loaded_library(), environ)


def chunk_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Give the length of a chunk of the staged path."""
    text = environ.get(CHUNK, "").strip()
    if not text:
        return CHUNK_BYTES
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{CHUNK}={text!r}: allowed are whole numbers >= 1, in bytes")
    return int(text)
