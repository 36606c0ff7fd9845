"""Test with other Pythons, each with virtual environments of its own.

    python tests/pythons.py "3.10 3.12"                               # every test
    python tests/pythons.py 3.13 serial openmpi-2 --path tests/calls  # for tests/launch.py
    python tests/pythons.py --find 3.12                               # print where it is

A Python is python3.10 and so on of the PATH, or one of pyenv's.  One that is not found is left out,
and the closing lines say so.  PyTorch is installed where pip finds its build for CPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # in place of the folder of this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.support.environments import for_each, launch, make


def find(version: str) -> str | None:
    """Return an interpreter of a version such as "3.12", or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    # Each is asked: pyenv puts a python3.12 on the PATH that only says how to choose it.
    asked = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for python in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        try:
            told = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        if told.stdout.startswith(f"{version} "):
            return told.stdout.split(maxsplit=1)[1].strip()
    return None


def test(version: str, arguments: list[str]) -> tuple[bool | None, str]:
    """Install for a Python and test with it; return whether all passed, and the totals."""
    python = find(version)
    if not python:
        return None, f"left out: there is no python{version}, and pyenv has none"
    print(python, flush=True)
    venv, mpich = f".venv-{version}", f".venv-mpich-{version}"
    launches = [word for word in arguments if re.match(r"serial$|alone$|openmpi-", word)]
    needs_mpich = not launches or any(word.startswith("mpich-") for word in arguments)
    stamps = [f"{venv}/.test", *[f"{mpich}/.test"] * needs_mpich]
    if not make(*stamps, VENV=venv, MPICH_VENV=mpich, PYTHON=python, TORCH="cpu"):
        return False, "could not be installed"
    return launch(f"{venv}/bin/python", arguments, f".test-{version}", f"{mpich}/bin/python")


def main(versions: str, *arguments: str) -> int:
    if versions == "--find":
        print(find(*arguments) or "")
        return 0
    return for_each("Python", versions.split(), partial(test, arguments=list(arguments)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
