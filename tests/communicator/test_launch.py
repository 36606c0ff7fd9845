"""Importing mpidist starts nothing: MPI starts with the first communicator."""

import ast
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mpidist
from mpidist.cli import COMMANDS
from mpidist.commands.bench import bench_command
from mpidist.communicator import failure

_IMPORT_ALL = """
import importlib, pkgutil, sys
import mpidist
OF_MPI = tuple(f"mpidist.backends.{name}" for name in ("mpi", "native", "roll_call", "ulfm"))
for module in pkgutil.walk_packages(mpidist.__path__, "mpidist."):
    if not module.name.startswith(OF_MPI) and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("cupy", "torch"):
                raise
        assert "mpi4py.MPI" not in sys.modules, module.name
"""


def test_import_does_not_start_mpi():
    """Data loaders' workers import mpidist, as do `mpidist list`, `show` and `prove`."""
    code = "import mpidist, mpidist.commands.main, sys; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL], timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


_IMPORTED = """
import sys, mpidist
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("mpidist.")}
assert rooms == {"algorithms", "arguments", "errors", "measure", "schedule", "selection"}, rooms
assert "mpidist.selection.choose" not in sys.modules
assert {"statistics", "difflib", "click", "rich", "mpi4py", "numpy"} & set(sys.modules) == set()
from mpidist.schedule import algorithms
assert len(algorithms()) > 40, "registered before the first lookup"
from mpidist.schedule.registry import find
try:
    find("allreduce", "symmetric")
except mpidist.InvalidArgument as error:
    assert "not a schedule" in str(error)
"""


def test_import_loads_few_rooms():
    """What only proves, draws or asks for help does not wait for the executors to be imported."""
    done = subprocess.run([sys.executable, "-c", _IMPORTED], timeout=60, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


_STARTED = """
import os, sys
from mpidist.cli import main
try:
    main(prog_name="mpidist")
except SystemExit as ended:
    assert not ended.code, ended.code
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("mpidist.")}
few = {"algorithms", "arguments", "cli", "commands", "communicator", "errors", "foreign"}
assert rooms <= few | {"launcher", "measure", "schedule", "selection", "tables"}, rooms
assert {n for n in sys.modules if n.startswith("mpidist.selection.")} <= {"mpidist.selection.names"}
assert "mpidist.communicator.communicator" not in sys.modules
assert {"numpy", "rich", "mpi4py", "torch", "multiprocessing"} & set(sys.modules) == set()
"""


def started(*words, **environ):
    """Run ``mpidist`` with these words, and check what it has imported; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", _STARTED, *words],
        env={**os.environ, **environ},
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "command", ["", *COMMANDS, *(f"bench {b}" for b in bench_command.commands)]
)
def test_help_loads_few_rooms(command):
    """That of all commands imports each of them: none may import at its top what it runs."""
    assert f"Usage: mpidist {command}".rstrip() in started(*command.split(), "--help")


def test_completion_loads_few_rooms():
    """A shell starts mpidist each time the Tab key is pressed."""
    words = {"COMP_WORDS": "mpidist run --la", "COMP_CWORD": "2"}
    assert "--launcher" in started(_MPIDIST_COMPLETE="bash_complete", **words)


def test_public_names():
    """Each name is there after `import mpidist`, is pickled, and no type checker knows more."""
    code = "from mpidist import *; import mpidist; print(*{*mpidist.__all__} - {*globals()})"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60).strip() == b""
    for name in mpidist.__all__:
        value = getattr(mpidist, name)
        assert name in dir(mpidist) and value.__module__.startswith("mpidist.")
        assert pickle.loads(pickle.dumps(value)) is value
    tree = ast.parse(Path(mpidist.__file__).read_text())
    typed = {
        a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names
    }
    assert set(mpidist.__all__) <= typed


@pytest.mark.parametrize("name", ["nn", "pipeline", "parallel", "schedule", "testing", "topology"])
def test_modules_of_the_package(name):
    """`mpidist.nn` is the module, without an import of its own."""
    code = f"import mpidist; assert mpidist.{name}.__name__ == 'mpidist.{name}'"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_module_that_needs_another_package():
    code = "import sys, mpidist; sys.modules['torch'] = None; mpidist.torch"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, stderr=subprocess.PIPE)
    assert done.returncode == 1 and b"AttributeError" in done.stderr
    assert b"pip install torch" in done.stderr
    with pytest.raises(AttributeError, match="no attribute 'torsh'"):
        _ = mpidist.torsh


def own(x):
    raise ZeroDivisionError("in a function of the user's")


def test_tracebacks_leave_mpidist_out():
    """But for what is called back, for causes the same, and for tracebacks of mpidist alone."""

    def told(call, **environ):
        try:
            call()
        except Exception as error:
            return failure.written(type(error), error, error.__traceback__, environ)

    def wrong():
        mpidist.run_simulated(1, lambda comm: comm.allreduce(1, op="summ"))

    for environ in ({}, {"MPIDIST_FULL_TRACEBACK": "0"}):
        text = told(wrong, **environ)
        assert "unknown op 'summ'" in text and "in wrong" in text
        assert "mpidist/communicator/communicator.py" not in text
        assert "inside mpidist left out; MPIDIST_FULL_TRACEBACK=1 shows them" in text
    assert "mpidist run --full-traceback shows them" in told(wrong, MPIDIST_RUN_NOTES="a")
    text = told(wrong, MPIDIST_FULL_TRACEBACK="1")
    assert "mpidist/communicator/communicator.py" in text and "left out" not in text
    text = told(lambda: mpidist.run_simulated(1, own))
    assert "in own" in text and "mpidist/backends/" not in text
    try:
        mpidist.run_simulated(1, lambda comm: comm.allreduce(1, op="summ"))
    except mpidist.MpidistError as error:
        inside = error.__traceback__.tb_next
        while inside.tb_frame.f_code.co_filename == __file__:
            inside = inside.tb_next
        innermost = inside
        while innermost.tb_next is not None:
            innermost = innermost.tb_next
        alone = failure.written(type(error), error, innermost, {})
    assert "mpidist/" in alone.splitlines()[1] and "left out" not in alone
