"""A Ctrl-C of a terminal."""

import contextlib
import os
import pty
import sys

import pytest

from tests.support.launcher_kits import (
    python,
)
from tests.support.processes import environment

COUNT = """
import signal, sys, time
count = 0
def more(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, more)
print("ready", flush=True)
until = time.monotonic() + 100.0
while not count and time.monotonic() < until:
    time.sleep(0.05)
time.sleep(0.5)  # for a second one
print(f"heard {count}", flush=True)
"""
WATCHED = """
import os, sys
from tests.support.launcher_kits import Connections, Notes, supervised
supervised(0, {}).run(sys.argv[1:], os.environ)
"""


@pytest.mark.parametrize("kind", ["Connections", "Notes"])
def test_control_c_reaches_the_launcher_once(kind):
    """A terminal sends it to both; srun and mpirun take a second one for impatience."""
    number, screen = pty.fork()
    if not number:
        os.execve(sys.executable, [*python(WATCHED.format(kind)), *python(COUNT)], environment())
    text = b""
    with contextlib.suppress(OSError):  # EIO at the end
        while part := os.read(screen, 1000):
            text += part
            if b"ready" in part:
                os.write(screen, b"\x03")
    os.waitpid(number, 0)
    os.close(screen)
    assert b"heard 1" in text, text
