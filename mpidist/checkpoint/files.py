"""What a checkpoint does to the file system: each function leaves it in order wherever it ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

SAVING = ".saving-"


def make_folder(parent: Path, name: str) -> Path:
    """Make a folder for a checkpoint in the making, and remove those of jobs that were killed."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{SAVING}*"):
        shutil.rmtree(left, ignore_errors=True)
    made = parent / f"{SAVING}{name}"
    made.mkdir()
    return made


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file that is on the disk when this returns."""
    try:
        with open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # a full disk does not say which
        raise


def publish(made: Path, final: Path) -> None:
    """Give a complete folder its name, in one step."""
    sync_folder(made)
    os.rename(made, final)
    sync_folder(final.parent)


def sync_folder(path: Path) -> None:
    """See that the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, so that no half of it can be taken for one."""
    gone = folder.with_name(f"{SAVING}gone-{folder.name}")
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
