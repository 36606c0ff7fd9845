"""Install and test in virtual environments of their own: other Pythons, PyTorchs, MPIs.

Standard library only: any Python runs it before something is installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def for_each(
    what: str, names: Iterable[str], test: Callable[[str], tuple[bool | None, str]]
) -> int:
    """Test all of the names, print a line for each in the end, and return the exit code.

    ``test(name)`` returns whether all passed (None if it was left out), and the line.
    """
    lines, outcomes = [], []
    for name in names:
        print(f"\n=== {what} {name}", flush=True)
        passed, line = test(name)
        outcomes += [passed] * (passed is not None)
        lines.append(f"{what} {name}: {line}{' FAILED' * (passed is False)}")
    print("", *lines, sep="\n")
    return 0 if outcomes and all(outcomes) else 1


def make(*stamps: str, **variables: str) -> bool:
    """Have make install virtual environments; return whether it could."""
    words = [f"{name}={value}" for name, value in variables.items()]
    return not subprocess.run(["make", *words, *stamps]).returncode


def launch(
    python: str, arguments: Sequence[str], results: str, mpich: str = "", **env: str
) -> tuple[bool, str]:
    """Run tests/launch.py; return whether all passed, and the totals.

    The launches under MPICH have the Python `mpich`, if given.
    """
    pythons = ["--python", python, *["--mpich-python", mpich] * bool(mpich)]
    other = str(Path(mpich or python).absolute())
    done = subprocess.run(
        [python, "tests/launch.py", *pythons, "--results", results, *arguments],
        env={**os.environ, "MPIDIST_MPICH_PYTHON": other, **env},
    )
    summary = Path(results, "summary.txt")
    totals = summary.read_text().splitlines()[-1] if summary.exists() else "no test was run"
    return not done.returncode, totals
