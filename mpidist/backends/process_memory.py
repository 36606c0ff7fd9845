"""The memory of other processes: Linux copies it without their help, where it allows that.

``process_vm_readv`` (man 2 process_vm_readv) may be refused: by the Yama security module
(``/proc/sys/kernel/yama/ptrace_scope``), by seccomp filters, or to another user.  A process number
may also mean another process, or none, where a peer is in a container of its own.  So before the
first use every rank reads a random word of each other.

Nothing is written in this way: a rank that comes late, after the others have given up, would write
into memory that they have put to another use.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import Unsupported

_LIMIT = 1 << 30  # bytes of one system call; Linux moves a little less than 2 GiB at most


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class ProcessMemory:
    """Reads what other processes have in their memory.

    Parameters
    ----------
    processes : list of int
        The process of each rank, as this one sees it.
    """

    def __init__(self, processes: list[int]):
        self._processes = processes

    def read(self, peer: int, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` from an address in the process of `peer` to an address in this one.

        Raises
        ------
        OSError
            If not all of it could be copied, for example since the process has ended.
        """
        function, process, moved = _function(), self._processes[peer], 0
        while moved < nbytes:
            left = min(nbytes - moved, _LIMIT)
            here, there = _Span(target + moved, left), _Span(source + moved, left)
            count = function(process, here, 1, there, 1, 0)
            if count <= 0:
                error = ctypes.get_errno() if count < 0 else errno.EFAULT
                raise OSError(
                    error,
                    f"{moved} of {nbytes} bytes were read from the memory of rank {peer} "
                    f"(process {process}): {os.strerror(error)}",
                )
            moved += count


def process_number() -> int:
    """Give the number by which this process knows itself."""
    return os.getpid()


def connect(rank: int, everyone: Callable[[Any], list[Any]]) -> ProcessMemory:
    """Reach the memory of all other ranks; collective.

    Parameters
    ----------
    rank : int
        Of this process.
    everyone : callable
        ``everyone(value)`` gives the values of all ranks.

    Raises
    ------
    Unsupported
        On every rank, if one of them cannot reach another; it says why.
    """
    word = ctypes.c_uint64(secrets.randbits(64))
    told = everyone((process_number(), ctypes.addressof(word), word.value))
    memory = ProcessMemory([process for process, _, _ in told])
    mine = _try_all(memory, rank, told)
    # Nobody comes out of this before all have read, so the words are still there.
    problems = [f"rank {r}: {text}" for r, text in enumerate(everyone(mine)) if text]
    if problems:
        raise Unsupported(f"the ranks cannot read each other's memory: {'; '.join(problems)}")
    return memory


def _try_all(memory: ProcessMemory, rank: int, told: list[tuple[int, int, int]]) -> str:
    """Read the word of every other rank; give what went wrong."""
    found = ctypes.c_uint64()
    try:
        for peer, (process, address, word) in enumerate(told):
            if peer == rank:
                continue
            memory.read(peer, address, ctypes.addressof(found), ctypes.sizeof(found))
            if found.value != word:
                return f"process {process} is here another one than rank {peer}"
    except OSError as error:
        return str(error.strerror)
    except Unsupported as error:
        return str(error)
    return ""


@cache
def _function() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, TypeError, AttributeError):
        raise Unsupported("this system has no process_vm_readv") from None
    spans, amount = ctypes.POINTER(_Span), ctypes.c_ulong
    function.argtypes = (ctypes.c_int, spans, amount, spans, amount, amount)
    function.restype = ctypes.c_ssize_t
    return function
