"""Files that exist in memory only: how processes of one node share a piece of it.

An anonymous file has no name in any folder, so that nothing can be left behind, whenever and
however the job is killed.  The others open it through the maker's open file in ``/proc``; where
they see another ``/proc`` (ranks in containers of their own) a file in ``/dev/shm`` serves instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_FILES = {  # of version 2 and 1: limit, use, and what of it can be given up at once
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
}
_NONE = 1 << 60  # version 1 writes no limit as the largest number of whole pages


def room(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float:
    """Give the bytes that are left under all limits; infinite where there is none."""
    try:
        lines = membership.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return float("inf")
    least = float("inf")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version = 2
        elif "memory" in controllers.split(","):
            version = 1
        else:
            continue
        group = Path(path.lstrip("/"))
        for inner in (group, *group.parents):
            least = min(least, _left(root, inner, version))
    return least


def _left(root: Path, group: Path, version: int) -> float:
    """Give what one group has left; infinite if it has no limit or cannot be seen from here."""
    limit, use, spare = _FILES[version]
    folder = (root / limit).parent / group
    try:
        allowed = int((folder / Path(limit).name).read_text())
        if allowed >= _NONE:
            return float("inf")  # the other files take the kernel much longer
        used = int((folder / Path(use).name).read_text())
        known = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):  # also "max"
        return float("inf")
    return allowed - used + int(dict(zip(known[::2], known[1::2])).get(spare, 0))


ANONYMOUS, NAMED = "anonymous", "named"
KINDS = (ANONYMOUS, NAMED) if hasattr(os, "memfd_create") else (NAMED,)
"""The kinds of file, to be tried in this order."""


def create(nbytes: int, purpose: str, kind: str = KINDS[0]) -> str:
    """Make a file of zeros and give what :func:`attach` finds it by; then it is to be removed.

    Raises
    ------
    MemoryError
        If there is not so much free: writing to it would end the process by a signal.
    """
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    free, where = (_available(), "the machine") if kind == ANONYMOUS else (_room(folder), folder)
    limited = room()
    if limited < free:
        free, where = limited, "the memory limit of this job (its control group)"
    if free < nbytes:
        raise MemoryError(
            f"{nbytes} bytes of shared memory are wanted; {where} has not so much free"
        )
    if kind == ANONYMOUS:
        name = f"mpidist-{purpose}-{secrets.token_hex(8)}"
        handle = os.memfd_create(name)
        os.ftruncate(handle, nbytes)
        return f"/proc/{os.getpid()}/fd/{handle}:{name}"
    handle, path = tempfile.mkstemp(prefix=f"mpidist-{purpose}-", dir=folder)
    os.ftruncate(handle, nbytes)
    os.close(handle)
    return path


def attach(made: str, nbytes: int) -> np.ndarray:
    """Map the file, as bytes, until nothing refers to it; OSError if this process cannot reach it.

    Not by ``mmap.mmap``: that keeps a file open for each mapping, of which many systems allow 1024.
    """
    path, _, name = made.partition(":")
    handle = os.open(path, os.O_RDWR)
    try:
        # Another process may have that number here.
        if name and f":{name} " not in os.readlink(f"/proc/self/fd/{handle}"):
            raise FileNotFoundError(f"{path} is another file here")
        return _map(handle, nbytes)
    finally:
        os.close(handle)


def _map(handle: int, nbytes: int) -> np.ndarray:
    """Map an open file, which may be closed then."""
    protection, library = mmap.PROT_READ | mmap.PROT_WRITE, _library()
    address = library.mmap(None, nbytes, protection, mmap.MAP_SHARED, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at the end of the program, when others may still look at it.  What holds `memory` itself,
    # not an array on it, must be part of no cycle: there it may be gone before the others.
    weakref.finalize(memory, library.munmap, address, nbytes).atexit = False
    return np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)  # off_t is a long
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def remove(made: str) -> None:
    """Take the file's name away, on the rank that made it; it lives on while it is mapped."""
    path, _, name = made.partition(":")
    if name:
        os.close(int(path.rpartition("/")[2]))
    else:
        os.unlink(path)


def _room(folder: str) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _available() -> float:
    """Give the bytes that can be had without swapping, as far as the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return float("inf")
