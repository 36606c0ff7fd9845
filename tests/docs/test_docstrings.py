"""Sections in numpydoc's form stand on what a page of the docs shows; elsewhere a sentence does.

``python -m tests.docs.test_docstrings`` lists the others.
"""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.training_kits import NEEDS_TORCH, torch

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)
OPTION = re.compile(r"^   :([\w-]+): *(.*)$", re.MULTILINE)
SECTION = re.compile(
    r"^(?:(?:Other )?Parameters|Attributes|Methods|Returns|Yields|Receives|Raises|Warns|Warnings"
    r"|See Also|Notes|References|Examples)\n-{3,}$",
    re.MULTILINE,
)
MODULES = {
    re.sub(r"\.?__init__$", "", ".".join(path.relative_to(ROOT).with_suffix("").parts)): path
    for path in sorted((ROOT / "mpidist").rglob("*.py"))
}


def place(thing):
    """The module and the qualified name that the source has for an object."""
    while isinstance(thing, (property, staticmethod, classmethod)):
        thing = thing.fget if isinstance(thing, property) else thing.__func__
    thing = inspect.unwrap(thing) if callable(thing) else thing
    return getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")


def resolve(name, kind):
    """The object that a page names; a function may have the name of the module that it is in."""
    parts = name.split(".")
    for count in range(len(parts) - (kind != "module"), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name == "torch":
                raise
            continue
        for part in parts[count:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


def members(thing, options):
    """The members that autodoc shows with these options, by their names."""
    if "members" not in options:
        return {}
    if options["members"]:
        names = options["members"].split(", ")
    elif inspect.ismodule(thing):
        names = getattr(thing, "__all__", None) or [
            name for name, value in vars(thing).items() if place(value)[0] == thing.__name__
        ]
    else:
        names = list(vars(thing))
    names = [name for name in names if name[0] != "_"]
    if inspect.ismodule(thing):
        return {name: getattr(thing, name) for name in names}
    return {name: inspect.getattr_static(thing, name) for name in names}


def shown(page):
    """The places of all docstrings that a page shows."""
    for kind, name, given in DIRECTIVE.findall(page):
        if kind == "summary":
            continue
        try:
            thing = resolve(name, kind)
        except ModuleNotFoundError:
            if torch is not None:
                raise
            continue
        options = dict(OPTION.findall(given))
        below = members(thing, options)
        if inspect.ismodule(thing):
            yield thing.__name__, ""
            # The members of a module's classes are shown with the same options.
            below |= {
                f"{own}.{name}": member
                for own, value in below.items()
                if inspect.isclass(value)
                for name, member in members(value, {"members": ""}).items()
            }
        else:
            yield place(thing)
        for name, member in below.items():
            yield place(member)
            if inspect.isclass(thing) and not member.__doc__:  # autodoc shows the base's instead
                yield from (place(vars(base)[name]) for base in thing.__mro__ if name in vars(base))


@cache
def documented():
    """The places of all docstrings that the pages show."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.rst"))]
    return {found for page in pages for found in shown(page)}


def with_sections(tree, outer=""):
    """Yield the qualified name of each docstring in a file that has a section."""
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{outer}{node.name}"
            if SECTION.search(ast.get_docstring(node) or ""):
                yield name
            name += "." if isinstance(node, ast.ClassDef) else ".<locals>."
        yield from with_sections(node, name)


def unread(module):
    """The names in a module whose docstring has a section that no page shows."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    found = [""] if SECTION.search(ast.get_docstring(tree) or "") else []
    found += with_sections(tree)
    return [name for name in found if (module, name) not in documented()]


def test_documented_finds_what_pages_show():
    places = documented()
    assert ("mpidist.parallel.ddp", "DDP") in places  # an autoclass, by its public name
    assert ("mpidist.parallel.ddp", "DDP.no_sync") in places  # of its :members:
    assert ("mpidist.nn.layers", "Linear.forward") in places  # of a class of an automodule
    assert ("mpidist.pipeline.partitioning", "partition") in places  # an autofunction
    assert ("mpidist.schedule.prove", "prove") in places  # its module has the same name
    assert ("mpidist.parallel.reducer", "Reducer") not in places


def test_with_sections_finds_each_docstring():
    section = '"""One.\n\n{}Returns\n{}-------\n{}int\n{}    Two.\n{}"""'
    inner, method = section.replace("{}", "    "), section.replace("{}", "        ")
    source = f"def f():\n    {inner}\nclass C:\n    def g(self):\n        {method}\n"
    source += 'def h():\n    """Returns one."""\n'
    assert list(with_sections(ast.parse(source))) == ["f", "C.g"]


def room_of(module):
    """The room of a module, or the module itself at the top; the package is "mpidist"."""
    return [*module.split("."), "mpidist"][1]


@pytest.mark.parametrize("room", sorted(set(map(room_of, MODULES))))
def test_sections_are_on_a_page(room):
    if room == "torch" and torch is None:
        pytest.skip(NEEDS_TORCH)
    modules = [name for name in MODULES if room_of(name) == room]
    found = [f"{name}: {each}" for name in modules for each in unread(name)]
    assert not found, "no page of the docs shows these: a sentence, and types in the signature"


if __name__ == "__main__":
    for module in MODULES:
        for name in unread(module):
            print(module, name)
