"""A constant of a module is assigned once: two measurements once shared one length by accident."""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mpidist"


def assigned_twice(source):
    """Return the names in capitals to which the module's own lines assign more than once."""
    names = Counter(
        name.id
        for line in ast.parse(source).body
        if isinstance(line, (ast.Assign, ast.AnnAssign))
        for target in (line.targets if isinstance(line, ast.Assign) else [line.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and name.id.isupper()
    )
    return [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("source", ["A, B = 1, 2\nB = 3", "B: int = 1\nB = 2"])
def test_it_finds(source):
    assert assigned_twice(source) == ["B"]


def test_the_package():
    found = {str(path): assigned_twice(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 200 and not {path: names for path, names in found.items() if names}
