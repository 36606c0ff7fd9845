"""The launcher itself: what makes a launch fail, and that nothing stays behind."""

import ast
import fnmatch
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch import ALL, ALLOWED_SKIPS, REST, SHORT, refused
from tests.support import processes
from tests.support.throwaway import closing, command, launch


def test_unlisted_skip_fails(tmp_path):
    suite = """
def test_passes(): pass
def test_skipped(): pytest.skip("did not feel like it")
def test_expected(): pytest.xfail("some day")
"""
    status, output = launch(tmp_path, suite)
    assert status == 1
    line = output.splitlines()[-2]
    assert "not allowed: did not feel like it; expected failure: some day" in line
    assert closing(output) == "1 passed, 1 failed, 2 skipped"


def skip_reasons():
    """Yield the place and the reason of each skip in the tests whose reason is a text there.

    A part that is filled in is "*".
    """
    for path in sorted(Path("tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            given = [k.value for k in call.keywords if k.arg == "reason"]
            if name == "importorskip" and not given:
                given = [ast.Constant("could not import")]
            for reason in given if name in ("skipif", "importorskip") else call.args[:1]:
                if name not in ("skip", "skipif", "importorskip"):
                    continue
                parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
                texts = [p.value if isinstance(p, ast.Constant) else "*" for p in parts]
                if texts != ["*"]:
                    yield f"{path}:{call.lineno}", "".join(texts)


def test_every_reason_of_a_skip_is_listed():
    """Also those of a machine or a number of ranks that this run does not have."""
    found = list(skip_reasons())
    assert len(found) > 60
    listed = ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()
    unlisted = [
        (place, reason)
        for place, reason in found
        if refused([reason]) and not fnmatch.filter(listed, reason)
    ]
    assert unlisted == []


@pytest.mark.parametrize("path", sorted(Path("tests").rglob("test_*.py")), ids=str)
def test_what_needs_the_extra_docs_is_marked(path):
    text = path.read_text(encoding="utf-8")
    if re.search(r"(skip|reason=).*of the extra docs\"\)", text):
        assert "pytest.mark.docs" in text


@pytest.mark.long
def test_rest_and_short_are_all_tests_of_all_launches(tmp_path):
    assert {*SHORT, *REST} == set(ALL)
    suite = """
import pytest
@pytest.mark.long
def test_late(): pass
@pytest.mark.docs
def test_page(): pass
@pytest.mark.parametrize("case", range(20))
def test_cases(case): pass
"""
    cases = []
    for part, passed in (("--short", 4), ("--rest", 19)):
        status, output = launch(tmp_path, suite, "serial", part)
        assert status == 0 and closing(output) == f"{passed} passed, 0 failed, 0 skipped"
        ended = (tmp_path / "results/serial.jsonl").read_text(encoding="utf-8")
        cases += re.findall(r'"start", "test": "[^"]*test_cases\[(\d+)\]', ended)
    assert sorted(map(int, cases)) == [*range(20)]


def test_a_crash_is_counted_and_named(tmp_path):
    suite = """
def test_passes(): pass
def test_crashes():
    if world.rank == 0: os.kill(os.getpid(), signal.SIGKILL)
"""
    status, output = launch(tmp_path, suite)
    assert status == 1
    assert re.search(r"FAILED: crashed \(status \d+\) in test_suite.py::test_crashes", output)
    assert closing(output) == "1 passed, 1 failed, 0 skipped"


def test_a_launch_that_runs_no_test_fails(tmp_path):
    """One beside others too."""
    status, output = launch(tmp_path, "", "openmpi-2 slurm")
    assert status == 1
    assert len(re.findall("^(?:Open MPI|slurm) .*FAILED: ran no test", output, re.MULTILINE)) == 2


@pytest.mark.long
def test_a_serial_launch_starts_no_mpi(tmp_path):
    suite = "import sys\ndef test_it(): assert 'mpi4py' not in sys.modules\n"
    status, output = launch(tmp_path, suite, "serial")
    assert status == 0
    assert re.search(r"serial +1 passed +0 failed +0 skipped", output)
    assert closing(output) == "1 passed, 0 failed, 0 skipped"


def test_worker_crash(tmp_path):
    """Serial tests run two at a time: the other one goes on."""
    suite = """
import os, signal
def test_passes(): pass
def test_crashes(): os.kill(os.getpid(), signal.SIGKILL)
"""
    status, output = launch(tmp_path, suite, "serial", "--workers", "2")
    assert status == 1
    assert re.search(r"serial: failed: \S+::test_crashes: worker \S+ crashed", output)
    assert closing(output) == "1 passed, 1 failed, 0 skipped"


@pytest.mark.long
def test_limit_of_a_launch(tmp_path):
    pids = tmp_path / "pids"
    suite = f"""
def test_stops():
    open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
    while True:  # the launcher of MPI may wake up what has stopped
        os.kill(os.getpid(), signal.SIGSTOP)
"""
    status, output = launch(tmp_path, suite, "openmpi-2", "--limit", "20")
    assert status == 1
    # Woken up at the end they may yet fail the test: it is named as failed then, not as running.
    assert "FAILED: timed out" in output and "test_suite.py::test_stops" in output
    assert gone(pids) == 2


def test_ending_the_launcher_ends_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    suite = f"""
def test_hangs():
    open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
    world.recv(source=world.rank, tag=5)
"""
    started = command(tmp_path, suite, "openmpi-2 slurm")  # beside the two ranks
    launcher = subprocess.Popen(started, env=processes.environment(), stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 150
    while not (pids.exists() and pids.read_text().count("\n") == 3):
        assert time.monotonic() < limit and launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(90) == 143
    assert gone(pids) == 3


def gone(pids: Path) -> int:
    """Check that none of the processes is alive, and return how many there were."""
    limit, numbers = time.monotonic() + 60, [int(line) for line in pids.read_text().split()]
    while any(alive(pid) for pid in numbers):
        assert time.monotonic() < limit, f"still alive: {[pid for pid in numbers if alive(pid)]}"
        time.sleep(0.05)
    return len(numbers)


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}") and processes.stat(pid)[:1] != ["Z"]
