"""Python stacks on demand: faulthandler writes them into a file in memory, upon a signal.

``mpidist run`` and ``mpidist rollcall`` send it, to a process that has such a file and a handler.
Standard library only: ``launcher/rank_program.py`` loads this file alone, before any package.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress

SIGNAL = signal.SIGRTMIN + 8
_NAME = "mpidist-stacks"


def stack_file(pid: int) -> str | None:
    """Return the path of the file with the stacks of a process; None if it has none."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for entry in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{entry}").startswith(f"/memfd:{_NAME} "):
                    return f"{folder}/{entry}"
    return None


def register() -> None:
    """Have faulthandler write the stacks of all threads of this process on SIGRTMIN + 8.

    Not if the program has its own handler of this signal.
    """
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    # The file is known by its name, for rank_program.py and the package load this module apart.
    with suppress(OSError, AttributeError):  # no memfd_create: no stacks
        if stack_file(os.getpid()) is None:
            faulthandler.register(SIGNAL, os.memfd_create(_NAME), all_threads=True)
