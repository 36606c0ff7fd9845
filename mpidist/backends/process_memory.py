"""Reading the memory of other processes of the node, where Linux allows it.

``process_vm_readv`` (man 2 process_vm_readv) may be forbidden: by the Yama security module
(``/proc/sys/kernel/yama/ptrace_scope``), by seccomp filters, or for processes of another user.  A
process number may also belong to another process, or none, where a peer is in a container of its
own.  So before the first use every rank reads a random word of each other rank.

Memory is only read, never written: a late rank would write into memory that the others, after their
deadline, may have put to another use.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ..errors import Unsupported

_LIMIT = 1 << 30  # bytes of one system call; Linux moves a little less than 2 GiB at most


class _Span(ctypes.Structure):
    """The C type ``struct iovec``: an address and a length."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class ProcessMemory:
    """Reads memory in the processes of the other ranks, by their ids in this PID namespace."""

    def __init__(self, processes: list[int]):
        self._processes = processes

    def read(self, peer: int, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` from an address in the process of `peer` to an address in this one.

        Raises OSError if not all could be copied, for example because the process has ended.
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
    """Return the id of this process in its own PID namespace."""
    return os.getpid()


def connect(rank: int, ranks: Sequence[int], everyone: Callable[[Any], list[Any]]) -> ProcessMemory:
    """Return a reader of the memory of a node's ranks, once each has read from all; collective.

    `rank` is the place of this rank among the node's `ranks`; ``everyone(value)`` returns the
    values of all of them.  Raises Unsupported on every rank, with the reason, if any rank cannot
    read the memory of another.
    """
    word = ctypes.c_uint64(secrets.randbits(64))
    words = everyone((process_number(), ctypes.addressof(word), word.value))
    memory = ProcessMemory([process for process, _, _ in words])
    mine = _try_all(memory, ranks[rank], ranks, words)
    # This exchange ends when all ranks have read, so no word is freed too early.
    problems = [f"rank {r}: {text}" for r, text in enumerate(everyone(mine)) if text]
    if problems:
        raise Unsupported(f"the ranks cannot read each other's memory: {'; '.join(problems)}")
    return memory


def _try_all(
    memory: ProcessMemory, rank: int, ranks: Sequence[int], words: list[tuple[int, int, int]]
) -> str:
    """Read a random word of each other rank of the node; return the first problem, or "".

    `words` has, by rank, the process id, the address of the word, and its value.
    """
    found = ctypes.c_uint64()
    try:
        for peer in ranks:
            if peer == rank:
                continue
            process, address, word = words[peer]
            memory.read(peer, address, ctypes.addressof(found), ctypes.sizeof(found))
            if found.value != word:
                return f"process {process} is not rank {peer} in this container"
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
        raise Unsupported("the C library of this system has no process_vm_readv") from None
    spans, amount = ctypes.POINTER(_Span), ctypes.c_ulong
    function.argtypes = (ctypes.c_int, spans, amount, spans, amount, amount)
    function.restype = ctypes.c_ssize_t
    return function
