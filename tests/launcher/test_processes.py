"""Programs with a time limit, which end with every process that they started."""

import os
import subprocess
import sys
import time
from pathlib import Path

from mpidist.communicator.launcher_notes import handles
from mpidist.launcher.processes import (
    descendants,
    end_processes,
    families,
    remove_session_files,
    run_limited,
    stat,
    working_folder,
)
from mpidist.launcher.stacks import Stack, _stack

# With a child in a session of its own, as an mpiexec gives to each rank.
LEAVES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid):
    """Return whether a process ends soon: one that got SIGKILL is there for a moment still."""
    limit = time.monotonic() + 10
    while stat(pid)[:1] not in ([], ["Z"]):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def test_run_limited_program_in_time():
    lines = []
    program = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    done = run_limited([sys.executable, "-c", program], 100, on_line=lines.append)
    assert (done.status, done.timed_out, done.output) == (3, False, "out\nerr\n")
    assert "".join(lines) == done.output


def test_run_limited_too_late_ends_all_below():
    begun, seen = time.monotonic(), []

    def left():
        """As long as nothing was printed, a moment more."""
        return 0.0 if seen or time.monotonic() > begun + 100 else 0.1

    done = run_limited([sys.executable, "-c", LEAVES], left, on_line=seen.append)
    assert done.timed_out and gone(int(seen[0]))


def test_end_processes_spares_another_process(monkeypatch):
    """One that has got the number of a process that was below."""
    killed = []
    monkeypatch.setattr("mpidist.launcher.processes._birth", lambda pid: str(time.monotonic_ns()))
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))

    class Process:
        pid = os.getpid()

        def terminate(self):
            pass

        def wait(self, patience=None):
            return 0

    end_processes(Process())
    assert not killed


def test_descendants_of_this_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        found = dict(descendants(os.getpid()))
        assert found[child.pid] == stat(child.pid)[19] and os.getpid() in found
    finally:
        child.kill()
        child.wait()


def test_remove_session_files(tmp_path):
    for name in ("ompi.7", "ompi.8"):
        Path(tmp_path, name).mkdir()
        Path(tmp_path, name, "file").touch()
    remove_session_files(7, {"TMPDIR": "/elsewhere", "PRTE_MCA_prte_tmpdir_base": str(tmp_path)})
    assert os.listdir(tmp_path) == ["ompi.8"]


def test_process_whose_name_is_no_text():
    """Of any program of the host: its name may be any bytes."""
    named = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([0xff, 41, 32])); "
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", named], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            assert stat(child.pid)[1] == str(os.getpid())
            assert child.pid in families()[os.getpid()] and not handles(child.pid, 12)
        finally:
            child.kill()


def test_working_folder_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert working_folder() == f"{tmp_path}{os.sep}"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert working_folder() == ""
    assert _stack([("/a/b.py", "3", "f")]) == Stack(("b.py:3 f",))
