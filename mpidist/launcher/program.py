"""The program of each rank: what a user types for it, and what ``mpidist run`` starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument
from .mpi import folder_of

PYTHON = ("python", "python3")  # they mean this interpreter, also by its path
ABORT_ON_ERROR = ["-m", "mpi4py"]  # an exception on one rank ends the job on all
RANK_PROGRAM = str(Path(__file__).with_name("rank_program.py"))


@dataclass(frozen=True)
class Program:
    """The program of each rank, and how it runs."""

    python: list[str]  # the interpreter and its options; empty for a program of another kind
    words: list[str]  # the script, ``-m NAME`` or ``-c CODE``, and arguments; else the command
    aborts: bool = False  # whether an exception on one rank ends the job on all

    @classmethod
    def find(cls, words: Sequence[str], modules_too: bool = False) -> Program:
        """Return the program that the words after the options of ``mpidist run`` name.

        An exception in a script or ``-c`` ends the job on all ranks, even before
        ``mpidist.init()``; in a module only with `modules_too`: pytest, for example, would lose its
        last lines.  ``mpidist`` is the module of that name.
        """
        first, rest = words[0], list(words[1:])
        if first == "mpidist":
            return cls([sys.executable], ["-m", "mpidist", *rest])
        options: list[str] = []
        script = list(words)
        if first in PYTHON or os.path.abspath(first) in _own_python():
            count = count_options(rest)
            options, script = rest[:count], rest[count:]
        elif first.startswith("-"):
            if first not in ("-m", "-c"):
                raise InvalidArgument(
                    f"{first}: not an option of mpidist run; its options stand before the program"
                )
        elif first.endswith((".py", ".pyz")):
            if not Path(first).is_file():
                raise InvalidArgument(f"{first}: no such script in {folder_of(Path(first))}")
        elif shutil.which(first) is None:
            raise InvalidArgument(f"{first}: no such script or program")
        else:
            return cls([], script)
        given = script[:2] == ABORT_ON_ERROR
        aborts = given or bool(script) and (modules_too or script[0] != "-m")
        return cls([sys.executable, *options], script[2:] if given else script, aborts)

    def by_hand(self) -> list[str]:
        """Return the command as one would type it after mpirun, without ``mpidist run``."""
        return [*self.python, *ABORT_ON_ERROR * self.aborts, *self.words]

    def reporting(self) -> list[str]:
        """Return the command by which it also reports the exception that ends it.

        rank_program.py stands in place of ``-m mpi4py``.  Programs of another kind do not report.
        """
        if not self.python or not self.words:
            return self.by_hand()
        return [*self.python, RANK_PROGRAM, *["--no-abort"] * (not self.aborts), *self.words]

    def difference(self, monitored: bool) -> str:
        """Return how the command that is started differs from :meth:`by_hand`; empty if not."""
        place = "in place of -m mpi4py" if self.aborts else "before -m"
        words = [f"rank_program.py {place}"] * (self.reporting() != self.by_hand())
        return ", ".join([*words, *["a monitor beside each rank"] * monitored])


def _own_python() -> list[str]:
    """Return the paths that mean this interpreter, such as ``.venv/bin/python3``."""
    folder = os.path.dirname(sys.executable)
    return [sys.executable, *(os.path.join(folder, name) for name in PYTHON)]


def count_options(arguments: Sequence[str]) -> int:
    """Return how many arguments of Python are options, before the script, ``-m`` or ``-c``."""
    count = 0
    while count < len(arguments) and re.fullmatch("-[^mc].*", arguments[count]):
        if re.fullmatch("-[^WX-][a-zA-Z]*[mc]", arguments[count]):  # -Om module
            return len(arguments)
        count += 2 if arguments[count] in ("-W", "-X", "--check-hash-based-pycs") else 1
    return min(count, len(arguments))
