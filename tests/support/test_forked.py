"""A program forked from a process with its imports ends, and is ended, as one of its own would."""

import os
import signal
import subprocess

import pytest

from tests.support import processes
from tests.support.forked import Forked

PROGRAM = """
import os, signal, sys
print("fractions" in sys.modules, sys.argv[1:], os.environ["WORD"], os.getcwd(), flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "wait":
    print(os.getpid(), flush=True)
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    with Forked("fractions", env=processes.environment()) as program:

        def start(word):
            command, env = [program, str(script), word], {**os.environ, "WORD": "of the rank"}
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdout=pipe, text=True, cwd=tmp_path, env=env)

        yield start


@pytest.mark.parametrize(("word", "status"), [("0", 0), ("3", 3), ("kill", -signal.SIGKILL)])
def test_program_has_words_environment_and_folder_of_its_own_and_its_end(
    start, tmp_path, word, status
):
    job = start(word)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == status
    assert output == f"True {[word]} of the rank {tmp_path}\n"


def test_program_ends_with_its_stub(start):
    job = start("wait")
    job.stdout.readline()
    pid = int(job.stdout.readline())
    job.kill()
    assert job.stdout.read() == ""  # which is closed when the program has ended, too
    job.wait(60)
    assert pid != job.pid
