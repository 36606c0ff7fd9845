"""The file into which a process writes its stacks, and the signal upon which it does."""

import os
import signal
import subprocess
import sys

from mpidist.communicator.launcher_notes import handles
from mpidist.communicator.stack_signal import SIGNAL, stack_file

PROGRAM = """
import os, signal
from mpidist.communicator.stack_signal import SIGNAL, register, stack_file
register()
first = stack_file(os.getpid())
register()  # by rank_program.py, and by init
assert stack_file(os.getpid()) == first
os.kill(os.getpid(), SIGNAL)
with open(first) as file:
    print(file.read())
os.execv("/bin/sh", ["sh", "-c", "ls -l /proc/$$/fd; grep SigCgt /proc/$$/status"])
"""


def test_register():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'File "<string>", line 8 in <module>' in done.stdout
    # Another program in this process has neither the file nor the handler.
    after = done.stdout.partition("total")[2]
    assert after and "memfd" not in after
    caught = int(after.split("SigCgt:")[1], 16)
    assert not caught >> SIGNAL - 1 & 1


OWN = """
import os, signal
from mpidist.communicator.stack_signal import SIGNAL, register, stack_file
signal.signal(SIGNAL, lambda *_: print("own"))
register()
os.kill(os.getpid(), SIGNAL)
print(stack_file(os.getpid()))
"""


def test_handler_of_the_program_is_kept():
    done = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("own\nNone\n", "")


def test_process_without():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert stack_file(child.pid) is None and not handles(child.pid, SIGNAL)
    finally:
        child.kill()
        child.wait()
    assert stack_file(child.pid) is None and stack_file(os.getppid() + (1 << 30)) is None


def test_signal_is_free():
    """Neither Python nor the C library uses it."""
    assert signal.SIGRTMIN < SIGNAL < signal.SIGRTMAX
