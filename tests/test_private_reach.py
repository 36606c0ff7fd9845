"""Nothing outside the rooms of the communicator touches its private attributes."""

import ast
from pathlib import Path

import pytest

import mpidist

PACKAGE = Path(mpidist.__file__).parent
INSIDE = ("communicator", "engine", "gpu")
PRIVATE = {"_service", "_messages", "_gpu", "_gpu_service", "_quick", "_short"}


def reached(source):
    """List the private attributes that a module reads of another object, by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = owner = None
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            owner, key = node.args[:2]
            name = key.value if isinstance(key, ast.Constant) else None
        if not isinstance(name, str) or not name.startswith("_") or name.startswith("__"):
            continue
        holder = getattr(owner, "attr", getattr(owner, "id", ""))
        private = name in PRIVATE and holder != "self"
        if private or holder.lstrip("_") in ("comm", "own", "communicator"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "line",
    ["comm._service.freed", "self.comm._gpu", "a.b._messages", "getattr(comm, '_quick', 0)"],
)
def test_it_finds(line):
    assert reached(f"x = {line}") and not reached("self._service, comm.rank, comm.__class__")


def test_private_attributes_of_a_communicator():
    modules = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in INSIDE]
    assert len(modules) > 100
    found = {str(p.relative_to(PACKAGE)): reached(p.read_text("utf-8")) for p in modules}
    assert {path: lines for path, lines in found.items() if lines} == {}
