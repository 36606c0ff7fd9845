"""The boxes in which a launcher reports that a rank failed: held back from its output."""

from __future__ import annotations

import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

from .mpi import say

# Texts of help-prun.txt and help-mpi-api.txt of Open MPI (4 has a narrow frame too), of Hydra, and
# of MPICH's MPI_Abort.  Other boxes have the same frames, and say what mpidist does not know: they
# are not held back.
_DASHES, _NARROW, _DOUBLE = b"-" * 74 + b"\n", b"-" * 55 + b"\n", b"\n" + b"=" * 83 + b"\n"
_BODY = rb".{0,2000}?\n"
_JOB = rb"Primary job  terminated normally, but "
_OPEN_MPI = (
    rb"(?:MPI_ABORT was invoked on rank |[\w.-]+ (?:noticed that process rank "
    rb"|detected that one or more processes exited with non-zero "
    rb"|has exited due to process rank \d+ with PID \d+ on node \S+ calling\n)"
    rb"|" + _JOB + rb")"
)
_HYDRA = rb"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
_HYDRA_LAST = (
    rb"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: [^\n]*\n"
    rb"This typically refers to a problem with your application\.\n"
    rb"Please see the FAQ page for debugging suggestions\n"
)
_ABORT = rb"(?:\d+: )?Abort\(-?\d+\) on node \d+ [^\n]*: application called MPI_Abort\([^\n]*\n"
# Each box, after what it contains in any case: finding this costs little.
_BOXES = [
    (sign, re.compile(pattern, re.DOTALL))
    for sign, pattern in (
        (_NARROW, rb"(?<!-)" + _NARROW + _JOB + _BODY + _NARROW),
        (_DASHES, _DASHES + _OPEN_MPI + _BODY + _DASHES),
        (_DOUBLE, _DOUBLE + _HYDRA + rb"(?:=  [^\n]*\n){0,20}" + _DOUBLE[1:]),
        (b"YOUR APPLICATION TERMINATED", _HYDRA_LAST),
        (b"application called MPI_Abort(", _ABORT),
    )
]
# The end of what has arrived, if it may go on as a box: a part of a frame, the frame with a part of
# the next line, or a box without its end.
_BEGUN = re.compile(
    rb"(?:(?<!-)-{1,74}|\n={1,83}|(?<!-)(?:%b|%b)[^\n]{0,80}|%b[^\n]{0,80}"
    rb"|(?:%b%b|%b%b|%b%b).{0,2000})\Z"
    % (_DASHES, _NARROW, _DOUBLE, _DASHES, _OPEN_MPI, _NARROW, _JOB, _DOUBLE, _HYDRA),
    re.DOTALL,
)
_LONGEST = 2200  # bytes of a box
_GOES_ON_WITHIN = 0.3  # seconds; launchers write a box line by line, without a pause
SHOWN_WITHIN = 10.0  # seconds after which a box is shown if the job goes on


def write_fully(screen: int, data: bytes) -> None:
    """Write all of `data` to a file descriptor."""
    while data:
        try:
            data = data[os.write(screen, data) :]
        except BlockingIOError:  # a terminal that another program has made non-blocking
            select.select((), (screen,), ())


class Boxes:
    """Copies a launcher's output to that of this process at once, but holds its boxes back.

    A thread for each calls `write` with 1 (standard output) or 2 (standard error) and the bytes.
    """

    def __init__(self, write: Callable[[int, bytes], object] = write_fully) -> None:
        self._write = write
        self.told = False  # whether a rank's failure has been printed: then no box is shown
        self.lost: set[int] = set()  # 1 and 2, where output is lost: it cannot be written
        self._held: list[tuple[int, bytes, float]] = []  # file descriptor, text, time
        self._found = False  # whether there has been a box that is held back
        self._threads: list[threading.Thread] = []
        self._ended = False  # whether the launcher has ended

    def copy(self, launcher: subprocess.Popen, hold: bool = True) -> None:
        """Start to copy the output of a launcher whose stdout and stderr are pipes.

        Boxes are held back if `hold`.
        """
        for source, screen in ((launcher.stdout, 1), (launcher.stderr, 2)):
            thread = threading.Thread(target=self._copy, args=(source, screen, hold), daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self) -> None:
        """Wait until all output of the launcher, which has ended, has been copied."""
        self._ended = True
        for thread in self._threads:
            thread.join()

    def show(self, older: float = 0.0) -> None:
        """Write the boxes that have been held back for `older` seconds, unless `told`."""
        while self._held and self._held[0][2] <= time.monotonic() - older:
            screen, text, _ = self._held.pop(0)
            if not self.told:
                with suppress(OSError):
                    self._put(screen, text)

    def _copy(self, source: IO[bytes], screen: int, hold: bool) -> None:
        ready, rest, before = select.poll(), b"", b""
        ready.register(source, select.POLLIN)
        with source, suppress(OSError):  # the reader has gone: the launcher meets that as well
            over = False
            while not over:
                late = not ready.poll(1000 * _GOES_ON_WITHIN)
                part = b"" if late else os.read(source.fileno(), 1 << 16)
                over = not part and (self._ended or not late)  # a process left may hold the pipe
                data, rest = rest + part, b""
                framed = (before + data).rstrip(b"\0").endswith(b"-----\n")
                before = (before + data)[-16:]
                # All that surely belongs to no box goes on at once::
                #
                #     rest + part   | text | a box: held | text | perhaps a box's begin: rest |
                for sign, box in _BOXES:
                    if hold and sign in data:
                        data = box.sub(partial(self._hold, screen), data)
                last = data[-_LONGEST:]
                # prterun ends boxes with a zero byte, each of several at once when nodes are lost.
                if (self._found or framed) and data.endswith(b"\0"):
                    text = data.rstrip(b"\0")
                    data, rest = text, b"" if over else data[len(text) :]
                elif part and (last.endswith((b"-", b"=")) or _NARROW in last or _DOUBLE in last):
                    begun = _BEGUN.search(last) if hold else None
                    rest = begun[0] if begun is not None else b""
                    data = data[: len(data) - len(rest)]
                self._put(screen, data)

    def _put(self, screen: int, data: bytes) -> None:
        """Write output; drop it where writing has failed: the launcher and its job go on."""
        if screen in self.lost:
            return
        try:
            self._write(screen, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.lost.add(screen)
            name = "standard output" if screen == 1 else "standard error"
            with suppress(OSError):
                say(f"{name} cannot be written, and is lost from here on: {error.strerror}")

    def _hold(self, screen: int, box: re.Match[bytes]) -> bytes:
        self._found = True
        self._held.append((screen, box[0], time.monotonic()))
        return b""
