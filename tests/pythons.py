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
from pathlib import Path


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


def test(version: str, python: str, arguments: list[str]) -> tuple[bool, str]:
    """Install for a Python and test with it; return whether all passed, and the totals."""
    venv, mpich, results = f".venv-{version}", f".venv-mpich-{version}", f".test-{version}"
    launches = [word for word in arguments if re.match(r"serial$|alone$|openmpi-", word)]
    needs_mpich = not launches or any(word.startswith("mpich-") for word in arguments)
    stamps = [f"{venv}/.test", *[f"{mpich}/.test"] * needs_mpich]
    make = ["make", f"VENV={venv}", f"MPICH_VENV={mpich}", f"PYTHON={python}", "TORCH=cpu"]
    if subprocess.run([*make, *stamps]).returncode:
        return False, "could not be installed"
    pythons = ["--python", f"{venv}/bin/python", "--mpich-python", f"{mpich}/bin/python"]
    done = subprocess.run(
        [f"{venv}/bin/python", "tests/launch.py", *pythons, "--results", results, *arguments],
        env={**os.environ, "MPIDIST_MPICH_PYTHON": str(Path(mpich, "bin/python").absolute())},
    )
    summary = Path(results, "summary.txt")
    totals = summary.read_text().splitlines()[-1] if summary.exists() else "no test was run"
    return done.returncode == 0, totals


def main(versions: str, *arguments: str) -> int:
    if versions == "--find":
        print(find(*arguments) or "")
        return 0
    lines, passed, tested = [], True, False
    for version in versions.split():
        python = find(version)
        line = f"left out: there is no python{version}, and pyenv has none"
        if python:
            print(f"\n=== Python {version}: {python}", flush=True)
            well, line = test(version, python, list(arguments))
            passed, tested = passed and well, True
            line += " FAILED" * (not well)
        lines.append(f"Python {version}: {line}")
    print("", *lines, sep="\n")
    return 0 if passed and tested else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
