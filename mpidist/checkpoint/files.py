"""Atomic changes to the file system: a kill at any point leaves no incomplete checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

SAVING = ".saving-"


def make_folder(parent: Path, name: str) -> Path:
    """Create a temporary folder for a checkpoint in `parent`, and return its path.

    The name of the folder ends with `name`.  Temporary folders left by killed jobs are removed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{SAVING}*"):
        shutil.rmtree(left, ignore_errors=True)
    made = parent / f"{SAVING}{name}"
    made.mkdir()
    return made


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to the disk."""
    try:
        with open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # "No space left on device" names no file
        raise


def publish(made: Path, final: Path) -> None:
    """Rename a complete folder to its final name, atomically and durably."""
    sync_folder(made)
    os.rename(made, final)
    sync_folder(final.parent)


def sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Remove a checkpoint: renamed first, so that a half-removed one is never loaded."""
    gone = folder.with_name(f"{SAVING}gone-{folder.name}")
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
