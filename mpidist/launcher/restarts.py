"""The starts of a job by ``mpidist run --max-restarts``: when again, and what is left for it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import MpidistError
from ..measure import counted
from .failures import Failure
from .mpi import say
from .nodes import ATTEMPTS, Nodes, short
from .supervisor import Supervisor

PREFIX = "mpidist-vaults-"
OF_NODES = f"{PREFIX}nodes-"  # as in rank_process.py
LEFT_AFTER = 600.0  # seconds without a record; between two starts nobody locks those of OF_NODES
ALIKE = 3  # ends in a row at one place, after which the job is not started again
SOON = 60.0  # seconds in which a start without records counts as one that got nowhere


class Restarts:
    """The starts of one job, of which there are at most ``most + 1``.

    Within a ``with`` block there is a folder in memory in which ``md.elastic`` leaves its records,
    if `in_memory`.  It is locked as long as this process runs: the next ``mpidist run`` of the user
    removes those that nobody locks.  Of several `nodes` each has one of this name, made and locked
    by the monitors of its ranks; those that are down are left out, if `min_ranks` are left.
    """

    def __init__(
        self, most: int, in_memory: bool, nodes: Nodes | None = None, min_ranks: int = 1
    ) -> None:
        self.most, self.number = most, 0
        self.ranks: int | None = None  # of the next start, once nodes were left out
        self._nodes, self._min_ranks = nodes, min_ranks
        self._folder: Path | None = None
        self._in_memory, self._lock = in_memory and most > 0, -1
        self._ends: list[tuple[object, ...]] = []
        self._from = 0, 0  # the training and the step with which the last start has begun
        self._begun = time.monotonic()

    def __enter__(self) -> Restarts:
        prefix = PREFIX if self._nodes is None else OF_NODES
        while self._in_memory and self._folder is None:
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=_place()))
            # Another mpidist run may look between these two lines, and take it for one that is
            # left: then it is gone, or about to go.
            self._lock = _lock(made)
            if self._lock >= 0 and made.exists():
                self._folder = made
            elif self._lock >= 0:
                os.close(self._lock)
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is None:
            return
        if self._nodes is not None:
            remove = ("sh", "-c", 'rm -rf "$0"; sleep 0.5', str(self._folder))
            done = self._nodes.ask(*remove, within=ATTEMPTS[:1])  # the user waits for the end
            left = [node for node, output in done.items() if output is None]
            if left:
                say(f"{_nodes(left)}: the records in {self._folder} could not be removed")
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

        Not if it was a request: a signal to end, StopRequest.leave(), or exit code 75 (requeue).
        """
        if not self.most:
            return False
        now = time.monotonic()
        seconds, self._begun = now - self._begun, now
        number, all_of_them = self.number + 1, self.most + 1
        asked = job.interrupted or job.stopped or status - 128 in job.passed
        asked = asked or status == os.EX_TEMPFAIL
        if status == 0 and number > 1:
            say(f"finished in start {number} of {all_of_them}")
        if status == 0 or asked:
            return False
        how = "" if job.told else f"ended with exit code {status}; "  # or the supervisor said it
        if number >= all_of_them:
            say(f"{how}that was start {number} of {all_of_them}")
            return False
        down, step = self._look()
        self._ends.append((step, *_where(job)))
        before, self._from = self._from, step or (0, 0)
        soon = step is not None or seconds < SOON
        again = "" if job.cause is None else job.cause.comes_again
        if again and not down and soon and self._from <= before:
            say(f"{how}no new start: {again} would come again")
            return False
        if soon and len(self._ends) >= ALIKE and len(set(self._ends[-ALIKE:])) == 1:
            where = "" if step is None else f" at step {step[1]:,}"
            say(f"{how}no progress: {ALIKE} starts in a row have ended alike{where}")
            return False
        if down:
            how += f"{_nodes(down)} {'are' if len(down) > 1 else 'is'} left out; "
            self._leave_out(down, job)
            assert self.ranks is not None
            if self.ranks < self._min_ranks:
                say(f"{how}{counted(self.ranks, 'rank')} left, --min-ranks {self._min_ranks}")
                return False
        self.number += 1
        on = "" if self.ranks is None else f" on {counted(self.ranks, 'rank')}"
        source = "" if step is None else f", from step {step[1]:,} in memory"
        say(f"{how}start {self.number + 1} of {all_of_them}{on}{source}")
        return True

    def _look(self) -> tuple[list[str], tuple[int, int] | None]:
        """Return the nodes that do not answer, and from which training and step the next goes on.

        If none answers, it is not for being down.
        """
        if self._folder is None:
            return [], None
        from ..recovery import records  # here: mpidist run --help starts fast

        try:
            if self._nodes is None:
                return [], records.last_step([records.offered(records.found(self._folder))])
            said = self._nodes.ask(sys.executable, "-m", records.__name__, str(self._folder))
            offers = {node: records.from_text(text or "") for node, text in said.items()}
            there = [offer for offer in offers.values() if offer is not None]
            down = [node for node, offer in offers.items() if offer is None]
            return down if there else [], records.last_step(there)
        except (MpidistError, OSError, ValueError) as error:
            say(f"the records in memory cannot be read: {error}")
            return [], None

    def _leave_out(self, down: Sequence[str], job: Supervisor) -> None:
        """Leave nodes out of the next start, with the ranks that they had."""
        assert self._nodes is not None
        share = len(self._nodes.names) - len(down), len(self._nodes.names)
        self._nodes.leave_out(down)
        there = {short(name) for name in self._nodes.names}
        ranks = sum(short(rank.host) in there for rank in job.known.values())
        # None is known if the launcher has met the lost node before it started a rank.
        self.ranks = ranks or max(job.ranks * share[0] // share[1], 1)


def _nodes(names: Sequence[str]) -> str:
    return f"node{'s' * (len(names) > 1)} {', '.join(names)}"


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
            if path.lstat().st_uid != os.getuid() or (handle := _lock(path)) < 0:
                continue
            try:
                last = max(each.lstat().st_mtime for each in (path, *path.iterdir()))
                if not path.name.startswith(OF_NODES) or time.time() > last + LEFT_AFTER:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
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
