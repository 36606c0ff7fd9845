"""Files that exist in memory only: how processes of one node share a piece of it."""

from __future__ import annotations

import mmap
import os
import tempfile


def create(nbytes: int, purpose: str) -> str:
    """Make a file of zeros; the others open it by its path, then it is to be unlinked.

    Raises
    ------
    MemoryError
        If there is not so much free: writing to it would end the process by a signal.
    """
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < nbytes:
        raise MemoryError(
            f"{nbytes} bytes of shared memory are wanted; {folder} has not so much free"
        )
    handle, path = tempfile.mkstemp(prefix=f"mpidist-{purpose}-", dir=folder)
    os.ftruncate(handle, nbytes)
    os.close(handle)
    return path


def attach(path: str, nbytes: int) -> mmap.mmap:
    """Map the file."""
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)
