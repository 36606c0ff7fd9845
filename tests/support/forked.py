"""Python programs of ranks, forked from a process that has imported what they need.

Most of what a rank of a short job does is to import PyTorch.  In ``with Forked("torch", env=…) as
program:`` that program is started in place of ``python``, with a script and its arguments::

    driver -> Forked: imports, then waits
                 |---- fork -----> the program, with the environment and files of its stub
    mpidist run -> mpiexec -> monitor -> stub: waits for the program, ends as it did
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANK_PROGRAM = ROOT / "mpidist" / "launcher" / "rank_program.py"
STUB = """#!{python} -IS
import json, os, socket, sys
zygote = socket.socket(socket.AF_UNIX)
zygote.connect({address!r})
text = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(zygote, [len(text).to_bytes(8, "little")], [0, 1, 2])
zygote.sendall(text)
status = int.from_bytes(zygote.recv(4, socket.MSG_WAITALL), "little")
if os.WIFSIGNALED(status):
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


class Forked:
    """The process that imports modules in the environment `env`, and forks."""

    def __init__(self, *modules: str, env: dict[str, str], compiler: bool = False):
        self.modules, self.env, self.compiler = modules, env, compiler

    def __enter__(self) -> str:
        self.folder = tempfile.TemporaryDirectory(prefix="forked-")
        address, program = (os.path.join(self.folder.name, name) for name in ("socket", "program"))
        Path(program).write_text(STUB.format(python=sys.executable, address=address))
        os.chmod(program, 0o755)
        command = [sys.executable, __file__, address, str(int(self.compiler)), *self.modules]
        env = {**self.env, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"ready\n"
        return program

    def __exit__(self, *_: object) -> None:
        self.process.communicate()
        self.folder.cleanup()


def serve(address: str) -> list[str]:
    """Fork for each stub that connects; return in the child, with the words of its program."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    print("ready", flush=True)
    poll, stubs, children = select.poll(), {}, {}
    poll.register(0)
    poll.register(listening, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if file == 0:  # the driver has ended
                for _, pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            elif file == listening.fileno():
                stub, _ = listening.accept()
                found = _received(stub)
                pid = os.fork()
                if not pid:
                    return _become(*found)
                for one in found[1]:
                    os.close(one)
                child = os.pidfd_open(pid)
                stubs[stub.fileno()], children[child] = (stub, child), (stub, pid)
                poll.register(stub, select.POLLIN)
                poll.register(child, select.POLLIN)
            elif file in stubs:  # which has been killed
                poll.unregister(file)
                signal.pidfd_send_signal(stubs.pop(file)[1], signal.SIGKILL)
            elif file in children:
                poll.unregister(file)
                stub, pid = children.pop(file)
                if stubs.pop(stub.fileno(), None):
                    poll.unregister(stub)
                status = os.waitpid(pid, 0)[1]
                os.close(file)
                with suppress(OSError):
                    stub.sendall(status.to_bytes(4, "little"))
                stub.close()


def _received(stub: socket.socket) -> tuple[bytes, list[int]]:
    size, files, *_ = socket.recv_fds(stub, 8, 3)
    missing, text = int.from_bytes(size, "little"), b""
    while len(text) < missing:
        text += stub.recv(missing - len(text))
    return text, files


def _become(text: bytes, files: list[int]) -> list[str]:
    words, folder, environ = json.loads(text)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 4096)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    return words


def leave_out_compiler() -> None:
    """Let optimizers import no compiler, with which they decorate their methods and nothing else.

    It takes as long as PyTorch itself, in each of the ranks that tests start and kill.
    """
    compiler = types.ModuleType("torch._dynamo")
    compiler.disable = lambda function, recursive=True, wrapping=True: function
    compiler.graph_break = lambda: None
    sys.modules["torch._dynamo"] = compiler


def main(address: str, compiler: str, *modules: str) -> None:
    """Import the modules, and be the program of each stub in a process of its own."""
    if not int(compiler):
        leave_out_compiler()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a loss collects garbage in each rank: not what was imported, again and again
    sys.argv[:] = [str(RANK_PROGRAM), *serve(address)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
