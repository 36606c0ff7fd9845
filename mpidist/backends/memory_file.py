"""Files that exist in memory only, by which the processes of a node share memory.

An anonymous file has no name in any folder, so that nothing is left behind however the job is
killed.  The other processes open it through its creator's file descriptor in ``/proc``; where they
have another ``/proc`` (ranks in containers of their own) a file in ``/dev/shm`` is used instead.
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

_FILES = {  # of version 2 and 1: the limit, the usage, and the reclaimable part of the usage
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
}
_NONE = 1 << 60  # version 1 writes no limit as the largest number of whole pages


def cgroup_free(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float:
    """Return the bytes that this process may still allocate by its control groups' limits.

    It is the least that any of the groups leaves; infinity without a limit.
    """
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
    """Return the bytes left in one control group; infinity if it has no limit or is not visible.

    `root` is the folder of all groups, `group` a path below it, `version` that of cgroups: 1 or 2.
    """
    limit, use, spare = _FILES[version]
    folder = (root / limit).parent / group
    try:
        allowed = int((folder / Path(limit).name).read_text())
        if allowed >= _NONE:
            return float("inf")  # reading the other files is much slower
        used = int((folder / Path(use).name).read_text())
        known = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):  # also "max"
        return float("inf")
    return allowed - used + int(dict(zip(known[::2], known[1::2])).get(spare, 0))


ANONYMOUS, NAMED = "anonymous", "named"
KINDS = (ANONYMOUS, NAMED) if hasattr(os, "memfd_create") else (NAMED,)
"""The kinds of file, in the order in which they are tried."""
UNCHECKED_BYTES = 64 << 10
"""Length up to which :func:`create` does not read the memory limits, which takes 0.3 ms."""


def create(nbytes: int, purpose: str, kind: str = KINDS[0]) -> str:
    """Create a file of `nbytes` zeros and return the name by which :func:`attach` finds it.

    The creator calls :func:`remove` once all processes have attached.  `purpose` is a word in the
    file's name, such as "board"; `kind` is one of :data:`KINDS`: "named" is a file in ``/dev/shm``.

    Raises MemoryError if fewer bytes are free: writing to the file would end the process by a
    signal.
    """
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    free, where = (float("inf"), "") if kind == ANONYMOUS else (_left_in(folder), folder)
    if nbytes > UNCHECKED_BYTES:
        limits = [(cgroup_free(), "the memory limit of this job (its control group)")]
        if kind == ANONYMOUS:
            limits.append((_available(), "the machine"))
        free, where = min([(free, where), *limits])
    if free < nbytes:
        raise MemoryError(
            f"{nbytes} bytes of shared memory are needed; {where} has only {int(free)} free"
        )
    if kind == ANONYMOUS:
        name = f"mpidist-{purpose}-{secrets.token_hex(8)}"
        handle = os.memfd_create(name)
        path, made = "", f"/proc/{os.getpid()}/fd/{handle}:{name}"
    else:
        handle, path = tempfile.mkstemp(prefix=f"mpidist-{purpose}-", dir=folder)
        made = path
    try:
        os.ftruncate(handle, nbytes)
    except (OSError, OverflowError) as error:  # a limit of this process, such as ulimit -f
        os.close(handle)
        if path:
            os.unlink(path)
        raise MemoryError(f"{nbytes} bytes of shared memory: {error}") from error
    if path:
        os.close(handle)
    return made


def attach(made: str, nbytes: int) -> np.ndarray:
    """Map the file that :func:`create` named `made` as bytes, until nothing refers to the array.

    Raises OSError if this process cannot reach it.  ``mmap.mmap`` is not used: it keeps a file
    descriptor for each mapping, of which many systems allow 1024.
    """
    path, _, name = made.partition(":")
    handle = os.open(path, os.O_RDWR)
    try:
        # In another container the process number may belong to another process.
        if name and f":{name} " not in os.readlink(f"/proc/self/fd/{handle}"):
            raise FileNotFoundError(
                f"{path} is not {name} in this process: is it in another container?"
            )
        return map_file(handle, nbytes)
    finally:
        os.close(handle)


def map_file(handle: int, nbytes: int) -> np.ndarray:
    """Map an open file as an array of bytes; the file may be closed afterwards."""
    protection, library = mmap.PROT_READ | mmap.PROT_WRITE, _library()
    address = library.mmap(None, nbytes, protection, mmap.MAP_SHARED, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit, when other processes may still read it.  An object that holds `memory` itself,
    # not an array on it, must not be part of a cycle: the collector may finalize `memory` first.
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
    """Remove the name `made` of a file, in the process that created it; mappings stay valid."""
    path, _, name = made.partition(":")
    if name:
        os.close(int(path.rpartition("/")[2]))
    else:
        os.unlink(path)


def _left_in(folder: str) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def available() -> float:
    """Return the bytes that this process may still allocate, by its groups' limits and the machine.

    It is infinity where the system does not say.
    """
    return min(cgroup_free(), _available())


def _available() -> float:
    """Return the bytes available without swapping; infinity where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return float("inf")
