"""Completion in real shells, by the script of ``mpidist completion``."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import environment

LIMIT = 60.0  # seconds, on a loaded machine
START = {"bash": ("--norc", "--noprofile", "-i"), "zsh": ("-f", "-i")}
SOURCE = {
    "bash": 'eval "$(mpidist completion bash)"',
    "zsh": 'autoload -Uz compinit; compinit -u; eval "$(mpidist completion zsh)"',
}


def read_until(shell, words, seconds=LIMIT):
    """Return what the shell writes until it contains `words`; fail past the limit."""
    text, end = "", time.monotonic() + seconds
    while words not in text:
        left = end - time.monotonic()
        assert left > 0, f"{words!r} is not in {text!r}"
        if select.select([shell], [], [], left)[0]:
            text += os.read(shell, 1 << 16).decode(errors="replace")
    return text


def prepare(name, folder):
    """Write two files into `folder`; return a shell's environment, which finds mpidist."""
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    (folder / "quadratic.py").write_text("")
    (folder / "quotients.json").write_text("{}")
    here = str(Path(sys.executable).parent)
    env = environment() | {"PATH": f"{here}:{os.environ['PATH']}", "TERM": "dumb"}
    return env | {"HOME": str(folder), "PS1": "> ", "INPUTRC": os.devnull}


@pytest.fixture(params=START)
def shell(request, tmp_path):
    """An interactive shell, which has read the completion script."""
    name = request.param
    env = prepare(name, tmp_path)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [name, *START[name]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(theirs)
    os.write(ours, f"{SOURCE[name]}; echo re''ady\n".encode())
    read_until(ours, "ready")
    yield ours
    process.kill()
    process.wait()
    os.close(ours)


CASES = [
    ("mpidist run -n 2 qua", "dratic.py"),
    ("mpidist prove --import quad", "ratic.py"),
    ("mpidist bench compare quo", "tients.json"),
    ("mpidist bench allreduce --json quo", "tients.json"),
    ("mpidist bench --iter", "ations"),
    ("mpidist show quadr", "atic.py"),
    ("mpidist slurm train_req", "ueue"),
    ("mpidist show allreduce rin", "g"),
]


@pytest.mark.parametrize(("typed", "completed"), CASES)
def test_a_tab_completes(shell, typed, completed):
    os.write(shell, f"{typed}\t".encode())
    written = read_until(shell, typed)
    rest = written.rpartition(typed)[2]
    if completed not in rest:
        read_until(shell, completed)


def test_fish_completes(tmp_path):
    lines = ["mpidist completion fish | source"]
    lines += [f'complete --do-complete "{typed}"' for typed, _ in CASES]
    command = ["fish", "--no-config", "-c", "\n".join(lines)]
    env = prepare("fish", tmp_path)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env=env, cwd=tmp_path
    )
    words = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert words == [typed.split()[-1] + rest for typed, rest in CASES], done.stderr
