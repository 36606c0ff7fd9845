"""Whether a process still moves, by its flight record.

Standard library only: rank_process.py loads this file alone, without a package.
"""

from __future__ import annotations

import time
from pathlib import Path


class Movement:
    """Tells whether the flight record of a process has moved lately."""

    def __init__(self, folder: str, pid: int, seconds: float):
        self.pause = min(5.0, seconds / 5)  # between two looks
        self._files, self._seconds = list(Path(folder).glob(f"rank-*.{pid}")), seconds
        self._last, self._since = b"", time.monotonic()

    def still(self) -> bool | None:
        """Return whether the record has not moved for some seconds; None if it is gone."""
        try:
            text = self._files[0].read_bytes()
        except (OSError, IndexError):
            return None
        if text != self._last:
            self._last, self._since = text, time.monotonic()
        return time.monotonic() >= self._since + self._seconds
