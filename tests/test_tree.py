"""The tests' tree is the package's."""

import ast
from pathlib import Path

import mpidist
from tests.conftest import has_ranks, kind_of

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(mpidist.__file__).resolve().parent
OTHERS = {"benchmarks", "docs", "slurm", "stress", "support"}  # rooms of tests alone


def test_every_folder_is_a_room():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    strange = [f for f in folders if str(f) not in OTHERS and not (PACKAGE / f).is_dir()]
    assert not strange


def test_tests_are_in_files_that_pytest_collects():
    """A file of another name would never be run."""
    named = [p for p in TESTS.rglob("*.py") if not p.name.startswith("test_")]
    assert [p.name for p in named if "\ndef test_" in p.read_text(encoding="utf-8")] == []


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
    for path in [*TESTS.rglob("test_*.py"), *TESTS.rglob("*_cases.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            if path.name.startswith("test_") and not node.name.startswith("test_"):
                continue
            for line in node.body:
                first = line.body[0] if isinstance(line, ast.If) else None
                if isinstance(first, ast.Return) and first.value is None:
                    silent.append(f"{path.name}:{line.lineno}")
    assert not silent, "expected pytest.skip with a reason"
