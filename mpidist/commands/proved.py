"""What earlier runs of ``mpidist prove`` have proved: a file in the user's cache.

It holds for the sources that its key was made of, those of the schedules and of their prover.  All
of them, since a hierarchical algorithm plays others by name; and only the algorithms that come with
mpidist, since an own one can stand in the place of one that others play.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from ..errors import MpidistError
from ..foreign import read_file, read_json
from ..schedule.registry import algorithms

# A proof is news where tests run: CI systems set the one variable, pytest the other.
NEVER = ("CI", "PYTEST_CURRENT_TEST")
_ROOMS = ("", "schedule", "algorithms")  # of the package: the modules that a proof rests on
Known = dict[str, list[int]]  # by task, its numbers of proofs and of messages


def earlier() -> tuple[Path, str, Known] | None:
    """Return the file, the key of the present sources, and what they have proved before.

    None if it is not to be used: on CI and in tests, with algorithms of others, without a folder.
    A file that is not such a file, or of another user, is ignored with a line on standard error.
    """
    ours = f"{__package__.partition('.')[0]}.algorithms."
    if any(name in os.environ for name in NEVER) or not all(
        each.function.__module__.startswith(ours) for each in algorithms(one_sided=True)
    ):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path, key = Path(base, "mpidist", "proofs.json"), _key()
    if not path.is_absolute():
        return None
    known: Known = {}
    try:
        known = _read(path, key)
    except (OSError, ValueError, MpidistError) as error:
        click.echo(f"ignored the earlier proofs in {path}: {error}", err=True)
    return path, key, known


def _read(path: Path, key: str) -> Known:
    """Return what the sources of a key have proved; an error if it is not such a file."""
    try:
        if path.stat().st_uid != os.getuid():
            raise PermissionError("it is of another user")
        content = read_json(read_file(path), str(path), dict[str, dict[str, list[int]]])
    except FileNotFoundError:
        return {}
    known = content.get(key, {})
    if not all(len(numbers) == 2 and min(numbers) >= 0 for numbers in known.values()):
        raise ValueError("expected two numbers for each proof")
    return known


def keep(path: Path, key: str, known: Known) -> None:
    """Write what the sources of a key have proved; a folder that cannot be written is no error."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError, ValueError, MpidistError):  # another run may have added to it meanwhile
        known = {**_read(path, key), **known}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({key: known}))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True) if part.parent.is_dir() else None


def _key() -> str:
    """Return a hash of the sources that a proof rests on, with Python's version and numpy's."""
    import numpy

    found = hashlib.sha256(f"{sys.version}\n{numpy.__version__}\n".encode())
    package = Path(__file__).parent.parent
    for room in _ROOMS:
        for path in sorted((package / room).glob("*.py")):
            text = path.read_bytes()
            found.update(f"{room}/{path.name} {len(text)}\n".encode() + text)
    return found.hexdigest()
