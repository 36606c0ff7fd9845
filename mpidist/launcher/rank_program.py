"""The Python program of one rank, run as by ``python -m mpi4py``; ``mpidist run`` learns its end.

``python rank_program.py [--no-abort] SCRIPT… | -m MODULE… | -c CODE…``.  An exception that ends the
program is handed over to ``mpidist run``, which prints it once for all ranks.  With --no-abort the
module runs as by ``python -m MODULE``: mpi4py does not end the other ranks.

Standard library only, and no package of mpidist: the program decides what is imported, and when.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOM = Path(__file__).parents[1] / "communicator"


def load(name: str) -> ModuleType:
    """Load the module ``mpidist/communicator/NAME.py`` without its package."""
    spec = importlib.util.spec_from_file_location(f"_mpidist_{name}", _ROOM / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install_hook(notes: ModuleType) -> None:
    """Set a ``sys.excepthook`` that sends the exception ending this process to ``mpidist run``.

    If that fails, the hook prints the exception.

    `notes` is the module launcher_notes.py.
    """
    own = os.getpid()

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if os.getpid() != own:  # a child without a program of its own
            sys.__excepthook__(kind, error, trace)
            return
        failure = load("failure").describe(kind, error, trace, os.environ)
        if not notes.hand_over(failure):
            sys.stderr.write(failure["text"])

    sys.excepthook = hook


def run(arguments: list[str]) -> None:
    """Run the program as ``__main__``, under mpi4py unless the first argument is --no-abort."""
    # As with python -m: not the folder of this file, whose names would hide the program's.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.getcwd()
    if arguments[0] == "--no-abort":
        from runpy import run_module

        sys.argv[:] = arguments[2:]
        run_module(arguments[2], run_name="__main__", alter_sys=True)
    else:
        from mpi4py.run import main

        sys.argv[1:] = arguments
        main()


def begin(arguments: list[str]) -> None:
    """Run the program; notify ``mpidist run`` of its start, an exception and its exit code."""
    notes, own = load("launcher_notes"), os.getpid()
    notes.send_note()
    load("stack_signal").register()
    # The launcher was started without SIGQUIT, which a terminal sends to its group.
    if os.getpgrp() == os.getpid():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGQUIT,))
    install_hook(notes)

    def ends(code: int) -> None:
        if os.getpid() == own:  # not a child without a program of its own
            notes.send_note(exit=code)

    try:
        run(arguments)
    except SystemExit as leaving:
        code = leaving.code
        ends(0 if code is None else code if isinstance(code, int) else 1)
        raise
    ends(0)


if __name__ == "__main__":
    begin(sys.argv[1:])
