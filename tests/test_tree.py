"""The tests' tree is the package's, and no module of a room needs itself."""

import ast
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mpidist
from tests.conftest import SUFFIXES, has_ranks, kind_of

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(mpidist.__file__).resolve().parent
OTHERS = {"benchmarks", "docs", "slurm", "stress", "support"}  # rooms of tests alone

# Modules without a test file of their name, where their tests are, and why there.
ELSEWHERE = {
    "algorithms/*": ("algorithms/test_algorithms.py", "proves and counts all that are registered"),
    "backends/executor": ("engine/test_executors.py", "an interface, with a class made for it"),
    "backends/greeting": ("communicator/test_bad_input.py", "is seen in unlike calls of two nodes"),
    "backends/mpi_messages": ("backends/test_mpi_mpi.py", "is the backend's half for messages"),
    "backends/process_memory": ("engine/test_single_copy_mpi.py", "needs two processes that copy"),
    "backends/program": ("engine/test_programs.py", "is what the engine keeps and runs"),
    "backends/rendezvous": ("communicator/test_split_mpi.py", "sets up communicators"),
    "backends/roll_call": ("engine/test_failures.py", "tells of missing ranks on other nodes"),
    "calls/call": ("calls/test_prepare.py", "holds what is prepared"),
    "cli": ("commands/test_main.py", "is the list of the commands"),
    "commands/*": (
        "commands/test_main.py",
        "commands are called as a user does",
    ),
    "communicator/failure": ("engine/test_failures.py", "is what a rank says when it dies"),
    "communicator/launcher_notes": ("launcher/test_notes.py", "is half of what a launcher reads"),
    "demo/comparison": ("demo/test_training.py", "judges a training"),
    "demo/result": ("demo/test_training.py", "shows a training"),
    "device/array": ("device/test_recognise.py", "describes what was recognised"),
    "device/cuda": ("device/test_cuda_kernels.py", "needs cupy"),
    "engine/call_site": ("communicator/test_bad_input.py", "is shown in reports"),
    "engine/reach": ("engine/test_symmetric_mpi.py", "needs memory of several processes"),
    "engine/reports": ("engine/test_failures.py", "needs ranks that are missing"),
    "engine/rooted": ("shared_memory/test_in_place_mpi.py", "needs memory of several processes"),
    "engine/run": ("engine/test_background_mpi.py", "runs whatever is in the background"),
    "engine/schedules": ("engine/test_staged.py", "is the base of staged and single_copy"),
    "engine/sequencer": ("backends/test_simulated.py", "needs ranks that are late or missing"),
    "engine/service": ("engine/test_programs.py", "keeps programs"),
    "errors": ("engine/test_failures.py", "are asserted wherever they are raised"),
    "frameworks/arrays": ("frameworks/test_base.py", "one of the adapters"),
    "frameworks/generators": ("checkpoint/test_checkpoint.py", "states for checkpoints"),
    "gpu/executor": ("gpu/test_executors.py", "the base class of the executors"),
    "gpu/heap": ("gpu/test_ipc_mpi.py", "is the memory of that executor"),
    "gpu/messages": ("gpu/test_executors_mpi.py", "needs ranks with devices"),
    "gpu/nccl/calls": ("gpu/nccl/test_backend.py", "are called there as a user does"),
    "gpu/service": ("gpu/test_executors_mpi.py", "chooses among the executors"),
    "gpu/staged": ("gpu/test_executors_mpi.py", "serves what no other executor does"),
    "oracle/array_taps": ("oracle/test_check.py", "records a training of mpidist.nn"),
    "oracle/plan": ("oracle/test_check.py", "tells a process what to do"),
    "oracle/program": ("oracle/test_check.py", "is the program of each process"),
    "oracle/reference": ("oracle/test_check.py", "makes the reference of a script"),
    "parallel/gradient": ("parallel/test_reducer.py", "its states are those of the reducer"),
    "pipeline/schedules/messages": ("pipeline/schedules/test_prove.py", "a part of the prover"),
    "pipeline/schedules/sweep": ("pipeline/schedules/test_show.py", "is called by a command"),
    "pipeline/schedules/walk": ("pipeline/schedules/test_prove.py", "a part of the prover"),
    "pytest/*": ("test_pytest.py", "runs suites of a user's with the whole plugin"),
    "schedule/contract": ("calls/test_prepare.py", "compares every call with it"),
    "schedule/drawing": ("schedule/test_show.py", "is what pictures are drawn from"),
    "schedule/exchange": ("schedule/test_prove.py", "a part of the prover's machine"),
    "schedule/machine": ("schedule/test_prove.py", "a part of the prover"),
    "schedule/memories": ("schedule/test_one_sided.py", "says what a memory offers"),
    "schedule/memory": ("schedule/test_prove.py", "a part of the prover's machine"),
    "schedule/reading": ("schedule/test_show.py", "reads what pictures are drawn from"),
    "schedule/rounds": ("schedule/test_prove.py", "the words of the language"),
    "schedule/strand": ("schedule/test_prove.py", "a part of the prover's machine"),
    "schedule/terms": ("schedule/test_prove.py", "a part of the prover's machine"),
    "schedule/unrolled": ("engine/test_binding.py", "is what programs are bound from"),
    "selection/names": ("engine/test_executors.py", "constants"),
    "selection/rules": ("selection/test_choose.py", "stand behind the other ways to choose"),
    "shared_memory/barrier": ("shared_memory/test_steps.py", "an action among others"),
    "shared_memory/conditional": ("shared_memory/test_steps.py", "an action among others"),
    "shared_memory/host": ("shared_memory/test_in_place_mpi.py", "the base of those executors"),
    "shared_memory/kernel": ("shared_memory/test_steps.py", "parts of the actions"),
    "torch/losses": ("pipeline/test_loss.py", "compared with other losses"),
    "torch/taps": ("oracle/test_check.py", "records a training of PyTorch"),
    "torch/rendezvous": ("torch/test_scripts.py", "needs a script that was launched"),
    "trace": ("communicator/test_tracing.py", "is written by traced communicators"),
}


def test_every_folder_is_a_room():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    strange = [f for f in folders if str(f) not in OTHERS and not (PACKAGE / f).is_dir()]
    assert not strange


def test_tests_are_in_files_that_pytest_collects():
    """A file of another name would never be run."""
    named = [p for p in TESTS.rglob("*.py") if not p.name.startswith("test_")]
    assert [p.name for p in named if "\ndef test_" in p.read_text(encoding="utf-8")] == []


def has_tests(module):
    """Return whether a module, such as ``engine/door``, has a test file of its name."""
    path = TESTS / module
    names = [f"test_{path.name}.py", *(f"test_{path.name}_{suffix}.py" for suffix in SUFFIXES)]
    return any((path.parent / name).exists() for name in names)


def test_every_module_has_a_test_file_of_its_name():
    """Or stands in the list above, which names no module that has one."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    modules = [path.as_posix() for path in paths if not path.name.startswith("__")]
    without = [module for module in modules if not has_tests(module)]
    listed = [m for m in without if any(fnmatchcase(m, pattern) for pattern in ELSEWHERE)]
    assert [m for m in without if m not in listed] == []
    assert [p for p in ELSEWHERE if not any(fnmatchcase(m, p) for m in without)] == []
    assert [file for file, _ in ELSEWHERE.values() if not (TESTS / file).exists()] == []


def test_kind_of():
    """By the last word of the name, or by the folder."""
    room = TESTS / "gpu"
    assert kind_of(room / "test_executors.py") == "serial"
    for kind in ("mpi", "cuda", "alone"):
        assert kind_of(room / f"test_executors_{kind}.py") == kind
    assert kind_of(room) is None and kind_of(TESTS / "slurm") == "slurm"
    assert kind_of(TESTS / "slurm" / "test_ends.py") is None  # the folder was asked


def test_has_ranks(tmp_path):
    """By a test's argument, over several lines too; of no other kind of file."""
    for text, expected in (
        ("def test_x(comm):", True),
        ("def test_x(\n    kit, comm, tmp_path\n):", True),
        ("def test_x(kit):\n    def main(comm):", False),
        ("def helper(comm):", False),
        ("def test_x(communicator):", False),
    ):
        for name in ("test_x.py", "test_x_mpi.py", "x.py"):
            path = tmp_path / str(hash(text)) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            assert has_ranks(path) == (expected and name == "test_x.py"), (text, name)


def test_what_cannot_run_is_skipped():
    """A case that returned at this size would count as passed, and test nothing."""
    silent = []
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for line in node.body:
                first = line.body[0] if isinstance(line, ast.If) else None
                if isinstance(first, ast.Return) and first.value is None:
                    silent.append(f"{path.name}:{line.lineno}")
    assert not silent, "expected pytest.skip with a reason"


def imported(module, text):
    """Yield what a module imports, at any place of its text: names that may be modules or not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def circle_in(room):
    """Return the modules of a room that need each other in a circle; [] if none do."""
    root, graph = room.parent.parent, {}
    paths = {".".join(p.relative_to(root).with_suffix("").parts): p for p in room.rglob("*.py")}
    # ``from .a import b``: the module a.b, or a name in a, which may be a folder's own file.
    known = {name.removesuffix(".__init__"): name for name in paths}
    for module, path in paths.items():
        names = imported(module, path.read_text(encoding="utf-8"))
        found = (known.get(name, known.get(name.rpartition(".")[0])) for name in names)
        graph[module] = {other for other in found if other}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("room", [path.parent.name for path in PACKAGE.glob("*/__init__.py")])
def test_modules_of_a_room_import_without_a_circle(room):
    """Also of what a function imports, or a type checker alone: the lower file names what it needs.

    lint-imports compares rooms.
    """
    assert circle_in(PACKAGE / room) == []


@pytest.mark.parametrize(
    "line",
    (
        "from .upper import x",
        "from . import upper",
        "from ..room.upper import x",
        "from package.room.upper import x",
        "import package.room.upper",
        "def f():\n    from .upper import x",
        "if TYPE_CHECKING:\n    from .upper import x",
        "from .folder import x",
    ),
)
def test_circle_in_finds_a_circle(line, tmp_path):
    """Over several files, one of them a folder's own; and none where a file has no such line."""
    room = tmp_path / "package" / "room"
    (room / "folder").mkdir(parents=True)
    lower = room / "lower.py"
    (room / "upper.py").write_text("from .folder import x")
    (room / "folder" / "__init__.py").write_text("from ..lower import y")
    lower.write_text("from ..other import x\nfrom . import nothing")
    assert circle_in(room) == []
    lower.write_text(line)
    names = {name.removeprefix("package.room.") for name in circle_in(room)}
    assert {"lower", "folder.__init__"} <= names <= {"lower", "folder.__init__", "upper"}
