"""The starts of a job by ``mpidist run --max-restarts``: when again, and what is left for it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ..errors import MpidistError
from .failures import Failure
from .mpi import say
from .supervisor import Supervisor

PREFIX = "mpidist-vaults-"
ALIKE = 3  # ends in a row at one place, after which the job is not started again
SOON = 60.0  # seconds in which a start without records counts as one that got nowhere


class Restarts:
    """The starts of one job, of which there are at most ``most + 1``.

    Within a ``with`` block there is a folder in memory in which ``md.elastic`` leaves its records,
    if `in_memory`.  It is locked as long as this process runs: the next ``mpidist run`` of the user
    removes those that nobody locks.
    """

    def __init__(self, most: int, in_memory: bool):
        self.most, self.number = most, 0
        self._folder: Path | None = None
        self._in_memory, self._lock = in_memory and most > 0, -1
        self._ends: list[tuple[object, ...]] = []
        self._begun = time.monotonic()

    def __enter__(self) -> Restarts:
        while self._in_memory and self._folder is None:
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place()))
            # Another mpidist run may look between these two lines, and take it for one that is
            # left: then it is gone, or about to go.
            self._lock = _lock(made)
            if self._lock >= 0 and made.exists():
                self._folder = made
            elif self._lock >= 0:
                os.close(self._lock)
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables by which a start knows its number and the folder."""
        if not self.most:
            return {}
        folder = {"MPIDIST_VAULTS": str(self._folder)} if self._folder is not None else {}
        return {"MPIDIST_RESTART": str(self.number), **folder}

    def again(self, job: Supervisor, status: int) -> bool:
        """Return whether the job is to be started again after `job` ended so; print why or not.

        Not if it was a request: a signal to end, or exit code 75 (requeue).
        """
        if not self.most:
            return False
        now = time.monotonic()
        seconds, self._begun = now - self._begun, now
        number, all_of_them = self.number + 1, self.most + 1
        asked = job.interrupted or status == os.EX_TEMPFAIL or status - 128 in job.passed
        if status == 0 and number > 1:
            say(f"finished in start {number} of {all_of_them}")
        if status == 0 or asked:
            return False
        how, step = job.told or f"ended with exit code {status}", self._last_step()
        self._ends.append((step, *_where(job)))
        stays = len(self._ends) >= ALIKE and len(set(self._ends[-ALIKE:])) == 1
        if step is None:
            stays = stays and seconds < SOON
        if stays and number < all_of_them:
            where = "" if step is None else f" at step {step:,}"
            say(f"{how}; no progress: {ALIKE} starts in a row have ended alike{where}")
            return False
        if number >= all_of_them:
            say(f"{how}; that was start {number} of {all_of_them}")
            return False
        self.number += 1
        source = "" if step is None else f", from step {step:,} in memory"
        say(f"{how}; start {self.number + 1} of {all_of_them}{source}")
        return True

    def _last_step(self) -> int | None:
        if self._folder is None:
            return None
        from ..recovery.records import last_step  # here: mpidist run --help starts fast

        try:
            return last_step(self._folder)
        except (MpidistError, OSError, ValueError) as error:
            say(f"the records in memory cannot be read: {error}")
            return None


def _where(job: Supervisor) -> tuple[str, ...]:
    """Return what tells one failure of a job from another, whichever rank has it."""
    cause = job.cause
    if isinstance(cause, Failure):
        return (cause.kind, *re.findall(r'^ *File ".*", line \d+', cause.text, re.MULTILINE))
    return ("" if cause is None else cause.how,)


def remove_left() -> None:
    """Remove the folders that a killed ``mpidist run`` of this user has left."""
    for path in Path(_place()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid() and (handle := _lock(path)) >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(handle)


def _place() -> str:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def _lock(folder: Path) -> int:
    """Return a file that locks a folder until it is closed; -1 if another process has it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return -1
    return handle
