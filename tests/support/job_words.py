"""What the ranks of a job say to the test that has started it, and to each other.

In files, one for each rank: a launcher that ends a job may drop the last lines of its output.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

FOLDER = "JOB_WORDS"  # the environment variable that names the folder
PATIENCE = 10.0  # seconds that a rank waits for the words of another


def say(comm, text: str) -> None:
    """Print it too, for who reads the output of a test that failed."""
    sys.stdout.write(f"<{comm.rank}> {text}\n")
    sys.stdout.flush()
    if folder := os.environ.get(FOLDER):
        with open(Path(folder) / str(comm.rank), "a", encoding="utf-8") as file:
            file.write(text + "\n")


def stay(ranks: Iterable[int], text: str = "", patience: float = PATIENCE) -> None:
    """Stay until all those ranks have said what begins so: the end of this one may end the job."""
    folder, until = os.environ.get(FOLDER), time.monotonic() + patience
    left = set(ranks) if folder else set()
    while left and time.monotonic() < until:
        left -= {rank for rank in left if any(w.startswith(text) for w in words(folder, rank))}
        time.sleep(0.01)


def words(folder: str, rank: int) -> list[str]:
    """Return the lines that a rank has said, each whole."""
    path = Path(folder) / str(rank)
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
